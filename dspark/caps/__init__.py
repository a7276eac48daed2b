"""Cap controllers."""

from dspark.caps.base import AbstractCap
from dspark.caps.fixed import ClipCap, FixedCap, ParkCap

__all__ = ["AbstractCap", "ClipCap", "FixedCap", "ParkCap"]
