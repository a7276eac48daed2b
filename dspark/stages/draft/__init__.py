"""Draft stages: where guesses come from."""

from dspark.stages.draft.block import DFlash, DFlash2, DSpark
from dspark.stages.draft.first_of import FirstOf, first_of
from dspark.stages.draft.lookup import Lookup
from dspark.stages.draft.none import NoDraft

__all__ = ["DFlash", "DFlash2", "DSpark", "FirstOf", "Lookup", "NoDraft", "first_of"]
