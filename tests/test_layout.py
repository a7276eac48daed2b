"""Matrices are laid out as OpenBLAS multiplies them fastest: the same values, another order in memory, nobody else notices."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from dspark.blas import Blas
from dspark.checkpoints import layout
from dspark.checkpoints.layout import by_columns
from tests.families import build


@pytest.fixture
def openblas(monkeypatch):
    monkeypatch.setattr(layout, "open_blas", lambda: Blas("openblas", "/lib", True, "is there"))


def columns(weight):
    """Whether a matrix lies in memory column by column."""
    return memoryview(weight).strides == (4, 4 * weight.shape[0])


class Own(nn.Linear):
    """A layer that does more with its weight."""


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_says_the_same_in_the_other_layout(openblas, tied):
    model = build("llama", tie_word_embeddings=tied)
    ids = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    before = model(ids)
    mx.eval(before)
    values = {path: mx.array(part.weight) for path, part in model.named_modules() if type(part) is nn.Linear}
    by_columns(model)
    # Sums of 64 to 96 products in float32, of logits below 10: other orders of summing move them by less than 1e-5.
    assert mx.abs(model(ids) - before).max().item() < 1e-5
    parts = dict(model.named_modules())
    assert values
    assert all(
        mx.array_equal(parts[path].weight, weight) and columns(parts[path].weight) for path, weight in values.items()
    )
    assert columns(parts["model.embed_tokens"].weight) == tied


def test_a_turned_model_is_saved_and_loaded_as_any_other(openblas, tmp_path):
    model = build("llama")
    by_columns(model)
    weight = model.layers[0].mlp.up_proj.weight
    mx.save_safetensors(str(tmp_path / "w.safetensors"), {"w": weight})
    assert mx.array_equal(mx.load(str(tmp_path / "w.safetensors"))["w"], weight)


def test_only_plain_float32_layers_are_turned(openblas):
    model = nn.Sequential(Own(8, 6), nn.Linear(6, 4), nn.Embedding(5, 4))
    model.layers[1].weight = model.layers[1].weight.astype(mx.float16)
    by_columns(model, tied=False)
    strides = [memoryview(layer.weight).strides for layer in model.layers]
    assert strides == [(32, 4), (12, 2), (16, 4)]


def test_nothing_is_turned_for_another_library():
    model = build("llama")
    by_columns(model)
    assert not columns(model.layers[0].mlp.up_proj.weight)
