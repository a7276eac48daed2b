"""What a drafter learns from: the frozen target's hidden states, taken from its own forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dspark.errors import BindError
from dspark.models.hooks import watching
from dspark.models.taps import Taps, first_array
from dspark.models.target import Target


class _Lesson(Taps):
    """Taps, and what the target's head would take."""

    def __init__(self, layers: frozenset[int], wanted: Sequence[int], trunk: Any):
        super().__init__(layers, wanted)
        self._trunk, self.last = trunk, None

    def note(self, module: Any, out: Any) -> None:
        if module is self._trunk:
            self.last = first_array(out)
        super().note(module, out)


def make_teacher(target: Target, layers: tuple[int, ...]) -> Callable[[mx.array], tuple[mx.array, mx.array]]:
    """A function ids [B, S] -> taps [B, S, T * D] and last hidden states [B, S, D], behind the final norm. Graph only; the
    vocabulary projection is not computed."""
    parts = target.anatomy
    if parts.trunk is None or not parts.steps:
        raise BindError(
            f"{target.name} does not show its layers and the input of its head, so it cannot teach a drafter"
        )
    ids_of_layers = frozenset(map(id, parts.layers))

    def teach(ids: mx.array) -> tuple[mx.array, mx.array]:
        lesson = _Lesson(ids_of_layers, layers, parts.trunk)
        with watching(lesson):
            target.core(ids, cache=None)
        assert lesson.last is not None
        return mx.stop_gradient(lesson.states(len(parts.steps))), mx.stop_gradient(lesson.last)

    return teach


def head_table(target: Target) -> mx.array:
    """The vocabulary projection's rows [V, D]. Raises BindError for one with a bias or one that is packed."""
    head = target.lm_head_raw
    if head is None or "weight" not in head or "scales" in head or "bias" in head:
        raise BindError(f"{target.name}: its vocabulary projection is no plain matrix, which training needs")
    return head.weight


def unpack(model: nn.Module) -> None:
    """Turn packed linears and tables into plain ones: training runs thousands of rows at once, where packing only costs."""
    from mlx_lm.utils import dequantize_model

    dequantize_model(model)


def same_head(target: Target, table: mx.array) -> bool:
    """Whether the target's own way to logits is the bare product with the table: no cap, no scale."""
    probe = mx.random.normal((1, 4, table.shape[1]), key=mx.random.key(0)).astype(table.dtype)
    own, bare = target.head(probe).astype(mx.float32), (probe @ table.T).astype(mx.float32)
    return bool((mx.abs(own - bare).max() <= 0.02 * mx.abs(own).max()).item())
