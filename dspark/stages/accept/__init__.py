"""Accept: how many drafts stand, and the token that follows them."""

from dspark.stages.accept.base import AbstractSampler
from dspark.stages.accept.greedy import Greedy
from dspark.stages.accept.match import SampleMatch
from dspark.stages.accept.rejection import Rejection
from dspark.stages.accept.rows import ByRow, by_row, row_accepts
from dspark.stages.accept.sampling import Sampling

__all__ = ["AbstractSampler", "ByRow", "Greedy", "Rejection", "SampleMatch", "Sampling", "by_row", "row_accepts"]
