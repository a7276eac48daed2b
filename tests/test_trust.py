"""Packed matrices that a GPU multiplies wrong are found by their products and computed unpacked; right ones stay."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from dspark.checkpoints import trust
from dspark.checkpoints.drafter import load_drafter
from dspark.models.target import Target
from tests.families import build
from tests.tiny_drafters import random_drafter


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(32, 96, bias=True), nn.Linear(64, 96, bias=False)
        self.table = nn.Embedding(40, 32)


def packed():
    mx.random.seed(4)
    model = Pair()
    nn.quantize(model, group_size=32, bits=4)
    return model


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose products of one group of columns are wrong."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.DeviceType.gpu))

    def product(module, x):
        y = module(x)
        return y + 7 if module.scales.shape[-1] == 1 else y

    monkeypatch.setattr(trust, "product", product)


def test_what_is_multiplied_wrong_is_unpacked_and_nothing_else(gpu):
    model, x = packed(), mx.random.normal((1, 3, 32))
    before = model.narrow(x)
    assert trust.unpack_wrong(model, mx.float32) == ("narrow",)
    assert type(model.narrow) is nn.Linear
    assert type(model.wide) is nn.QuantizedLinear
    assert type(model.table) is nn.QuantizedEmbedding
    # The same numbers, the bias among them.
    assert mx.abs(model.narrow(x) - before).max().item() < 1e-5


def test_right_products_stay_packed(gpu, monkeypatch):
    monkeypatch.setattr(trust, "product", lambda module, x: module(x))
    model = packed()
    assert trust.unpack_wrong(model, mx.float32) == ()
    assert type(model.narrow) is nn.QuantizedLinear


@pytest.mark.parametrize("broken", [lambda y: y * mx.nan, lambda y: mx.zeros_like(y), lambda y: mx.roll(y, 1, axis=-1)])
def test_other_numbers_are_wrong_too(gpu, monkeypatch, broken):
    monkeypatch.setattr(trust, "product", lambda module, x: broken(module(x)))
    assert len(trust.unpack_wrong(packed(), mx.float32)) == 2


def test_a_cpu_is_trusted(monkeypatch):
    monkeypatch.setattr(trust, "product", lambda module, x: module(x) + 7)
    assert trust.unpack_wrong(packed(), mx.float32) == ()


def test_a_drafter_says_what_it_computes_unpacked(tmp_path, gpu, monkeypatch):
    folder = random_drafter(tmp_path, "vanilla", Target(build("llama")))
    notes = lambda: [
        n for n in load_drafter(folder, bits=4, group_size=32, dtype=mx.float32).about.notes if "unpacked" in n
    ]
    assert notes() == []
    monkeypatch.setattr(trust, "product", lambda module, x: module(x) + 7)
    (note,) = notes()
    assert "multiplies them wrong when packed: fc" in note or "and others" in note
    assert str(folder) in note
