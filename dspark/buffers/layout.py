"""Which layout several rows get."""

from __future__ import annotations

from dspark.buffers.base import AbstractBuffers
from dspark.buffers.ragged import RaggedBuffers, unbatchable
from dspark.buffers.single import SingleBuffers
from dspark.buffers.stacked import StackedBuffers


def batch_of(row: SingleBuffers) -> AbstractBuffers:
    """A layout of several rows, made of its first one, which must not be used again: one forward for all where the caches
    allow it, else one a row."""
    return RaggedBuffers(row) if unbatchable(row.caches, row.plan) is None else StackedBuffers(row)
