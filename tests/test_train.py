"""Training: losses and gradients as published, a drafter that learns, runs that resume exactly, data that repeats itself."""

from __future__ import annotations

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from dspark.checkpoints.drafter import load_drafter
from dspark.train.dataset import Batch
from dspark.train.losses import Mix, decayed
from dspark.train.step import Lesson
from tests.parity_sets import read_set

# Float32 on both sides, sums of a few thousand terms in another order.
LOSS, GRADIENT = 1e-4, 1e-3
# What trimmed vectors hold of a gradient.
EVERY = 8
DSPARK = Mix(ce=0.1, l1=0.9, confidence=1.0, gamma=4.0)
DFLASH2 = Mix(ce=0.0, l1=0.0, kl=1.0, selector=1.0, gamma=4.0, by_weights=False)


# ---- the published losses -----------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Masked(Lesson):
    """A lesson whose labels count where a vector says so: upstream texts have several answers, ours have one."""

    said: np.ndarray | None = None

    def slots(self, batch, last):
        counts = mx.array(self.said.astype(np.float32))
        weights = decayed(counts, self.mix.gamma).reshape(-1)
        return super().slots(batch, last)._replace(counts=counts.reshape(-1), weights=weights)


def graded(name, mix, folder):
    """The vector's set, the terms of its loss and the gradients by name."""
    vector = read_set(name)
    head, arrays = load_drafter(vector.write(folder / name), bits=None), vector.arrays
    table = head.lm_head.weight
    ids, anchors = mx.array(arrays["input_ids"], dtype=mx.int32), mx.array(np.atleast_2d(arrays["anchor_positions"]))
    said = arrays["out_eval_mask"] if "out_eval_mask" in arrays else arrays["out_aligned_loss_mask"][None, :, 1:]
    kept = np.atleast_2d(arrays["block_keep_mask" if "block_keep_mask" in arrays else "anchor_valid"])
    batch = Batch(ids, anchors.astype(mx.int32), mx.array(kept > 0), mx.array([ids.shape[1]] * ids.shape[0]))
    lesson = Masked(head, None, table, lambda last: last @ table.T, mix, mx.float32, said=said)
    taps, last = (mx.array(arrays[f"target_{n}hidden_states"]) for n in ("", "last_"))
    trained = [p for p in tree_flatten(head.trainable_parameters()) if not p[0].startswith(("embed_tokens", "lm_head"))]

    def loss(parameters):
        terms = lesson.loss(parameters, batch, taps, last)
        return terms.total, terms.parts

    (total, parts), gradients = mx.value_and_grad(loss)(tree_unflatten(trained))
    return vector, {"total": total, **parts}, dict(tree_flatten(gradients))


CASES = {
    "dspark_qwen3_train": (DSPARK, {"total": "total", "ce": "ce", "l1": "l1", "conf": "confidence"}),
    "dflash2_train": (DFLASH2, {"total": "total", "unary": "kl", "selector": "selector"}),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_the_published_ones(name, tmp_path):
    mix, terms = CASES[name]
    vector, found, gradients = graded(name, mix, tmp_path)
    for published, ours in terms.items():
        assert found[ours].item() == pytest.approx(float(vector.arrays[f"out_loss_{published}"]), rel=LOSS), published
    wanted = {key.removeprefix("grad."): array for key, array in vector.arrays.items() if key.startswith("grad.")}
    assert set(gradients) == set(wanted)
    for key, array in wanted.items():
        own = np.array(gradients[key]).reshape(-1)
        own = own if own.size == array.size else own[::EVERY]
        assert np.abs(own - array).max() <= GRADIENT * vector.index["grad_max"][key], key


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("change", [{"gamma": 7.0}, {"by_weights": None}])
def test_another_decay_or_norm_is_noticed(name, change, tmp_path):
    mix, _ = CASES[name]
    change = {"by_weights": not mix.by_weights} if "by_weights" in change else change
    vector, found, _ = graded(name, mix._replace(**change), tmp_path)
    assert found["total"].item() != pytest.approx(float(vector.arrays["out_loss_total"]), rel=10 * LOSS)
