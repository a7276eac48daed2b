"""Cap controllers."""

from dspark.caps.adaptive import AdaptiveCap
from dspark.caps.base import AbstractCap
from dspark.caps.fixed import ClipCap, FixedCap, ParkCap

__all__ = ["AbstractCap", "AdaptiveCap", "ClipCap", "FixedCap", "ParkCap"]
