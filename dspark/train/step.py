"""One training step: teach, draft, compare, move. Pure functions of arrays, compiled once for each shape of batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_map

from dspark.models.heads.head import Head
from dspark.models.heads.packed import packed_hidden
from dspark.train.dataset import Batch
from dspark.train.losses import Mix, Slots, Terms, decayed, head_loss
from dspark.train.optimise import State, clipped, updated
from dspark.train.quick import compiled

Teach = Callable[[mx.array], tuple[mx.array, mx.array]]
Step = Callable[[State, Batch, float], tuple[State, dict[str, mx.array]]]


@attrs.frozen(eq=False)
class Lesson:
    """What a step needs beside its state. table: lm_head's rows [V, D], a reduced vocabulary's only; rows_of: int32 [V of the
    target], each token's row in it or -1, None for a whole vocabulary; dtype: what is computed in; logits: last hidden states
    -> the target's logits, over the table's rows."""

    head: Head
    teach: Teach
    table: mx.array
    logits: Callable[[mx.array], mx.array]
    mix: Mix
    dtype: mx.Dtype
    rows_of: mx.array | None = None

    def cast(self, parameters: Any) -> Any:
        return tree_map(lambda p: p.astype(self.dtype), parameters)

    @property
    def needs_teacher(self) -> bool:
        mix, config = self.mix, self.head.config
        return bool(mix.l1 or mix.kl or config.confidence != "none" or config.kind == "dflash2")

    def loss(self, parameters: Any, batch: Batch, taps: mx.array, last: mx.array) -> Terms:
        """The loss of a batch whose taps and last hidden states are known."""
        self.head.update(self.cast(parameters))
        config = self.head.config
        count, first = config.num_drafts, config.first_slot
        batch_rows, blocks = batch.anchors.shape
        anchor_ids = mx.take_along_axis(batch.ids, batch.anchors, axis=1)
        hidden = packed_hidden(self.head, taps, batch.anchors, anchor_ids)
        hidden = hidden[:, :, first : first + count].reshape(batch_rows * blocks, count, -1)
        return head_loss(self.head, hidden, self.slots(batch, last), self.mix, self.table)

    def slots(self, batch: Batch, last: mx.array) -> Slots:
        """What each predicting row is held against: the k-th sees label A + 1 + k, behind the token at A + k."""
        config, (rows, length) = self.head.config, batch.ids.shape
        places = batch.anchors[..., None] + mx.arange(config.num_drafts)
        valid = batch.kept[..., None] & (places + 1 < batch.ends[:, None, None])
        at = mx.minimum(places, length - 2)
        look = lambda where: mx.take_along_axis(batch.ids, where.reshape(rows, -1), axis=1).reshape(-1)
        labels = look(at + 1)
        if self.rows_of is not None:
            labels = self.rows_of[labels]
            valid = valid & (labels >= 0).reshape(valid.shape)
            labels = mx.maximum(labels, 0)
        counts = valid.astype(mx.float32)
        teacher = None
        if self.needs_teacher:
            logits = self.logits(last).reshape(rows * length, -1)
            teacher = mx.stop_gradient(mx.softmax(logits, axis=-1, precise=True))
        return Slots(
            labels=labels,
            previous=look(at),
            teacher=teacher,
            rows=(at + mx.arange(rows)[:, None, None] * length).reshape(-1),
            counts=counts.reshape(-1),
            weights=decayed(counts, self.mix.gamma).reshape(-1),
        )


def make_step(lesson: Lesson, clip: float, decay: float) -> Step:
    """A function (state, batch, rate) -> new state and metrics, not evaluated yet."""

    def objective(
        parameters: Any, batch: Batch, taps: mx.array, last: mx.array
    ) -> tuple[mx.array, dict[str, mx.array]]:
        terms = lesson.loss(parameters, batch, taps, last)
        return terms.total, terms.parts

    slope = mx.value_and_grad(objective)

    def run(parameters, first, second, step, rate, ids, anchors, kept, ends):
        batch = Batch(ids, anchors, kept, ends)
        taps, last = lesson.teach(ids)
        (loss, parts), gradients = slope(parameters, batch, taps, last)
        gradients, norm = clipped(gradients, clip)
        made = updated(parameters, first, second, gradients, step, rate, decay)
        return (*made, {"loss": loss, "norm": norm, "blocks": kept.sum(), **parts})

    fast = compiled(run)

    def step(state: State, batch: Batch, rate: float) -> tuple[State, dict[str, mx.array]]:
        number = mx.array(float(state.step + 1))
        made = fast(state.parameters, state.first, state.second, number, mx.array(rate), *batch)
        parameters, first, second, metrics = made
        return State(parameters, first, second, state.step + 1), metrics

    return step
