"""Random keys belong to a position of a row and to a purpose, whatever led there; seeds decide and repeat."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dspark.errors import InputError
from dspark.stages.accept import Sampling
from dspark.stages.keys import check_seed, coins, fresh_seed, keys, noise, row_seeds
from tests.reference import decode, scripted_table


def test_a_position_has_one_key():
    """Whatever the width, the batch and where the block began; and another one for any other seed, position or purpose."""
    wide = keys((5, 6), (13, 40), 20, "sample")
    assert mx.array_equal(keys((6,), (47,), 3, "sample")[0], wide[1, 7:10])
    assert mx.array_equal(coins((6,), (47,), 3)[0], coins((5, 6), (13, 40), 20)[1, 7:10])
    others = [keys((5,), (13,), 20, purpose) for purpose in ("accept", "draft")]
    found = np.concatenate([np.array(array).reshape(-1, 2) for array in (wide, *others)])
    assert len({tuple(key) for key in found.tolist()}) == 80


def test_noise_is_the_same_alone_and_in_company():
    many = keys((5, 6), (13, 40), 3, "sample")
    assert mx.array_equal(noise(many, 7)[1, 2], noise(many[1:, 2:], 7)[0, 0])


def test_coins_are_uniform():
    """Mean and variance of 80,000 coins within five standard errors, none is 1."""
    flat = np.array(coins(range(10_000), [3] * 10_000, 8)).astype(np.float64).ravel()
    assert abs(flat.mean() - 1 / 2) < 5 * (1 / 12 / flat.size) ** 0.5
    assert abs(flat.var() - 1 / 12) < 5 * (1 / 180 / flat.size) ** 0.5
    assert flat.min() >= 0
    assert flat.max() < 1


def test_seeds_matter_and_repeat():
    stage, table = Sampling(temperature=0.9).accept(), scripted_table(23, 1.0)
    said = {seed: decode(stage, table, (3, 1, 4), 40, seed=seed) for seed in (0, 1, 2**64 - 1)}
    assert len({tuple(answer) for answer in said.values()}) == 3
    assert all(decode(stage, table, (3, 1, 4), 40, seed=seed) == answer for seed, answer in said.items())
    assert len({fresh_seed() for _ in range(10)}) == 10


def test_rows_of_one_seed():
    assert row_seeds(7, 1) == (7,)
    assert row_seeds(7, 3)[:2] == row_seeds(7, 2)
    assert len({*row_seeds(7, 9), *row_seeds(8, 9)}) == 18


@pytest.mark.parametrize("value", ["x", -1, 2**64, 1.5, True, None, "-3"])
def test_bad_seeds(value):
    with pytest.raises(InputError, match=r"seed is .*; it must be a whole number from 0 to 2\^64 - 1"):
        check_seed(value)


def test_good_seeds():
    assert [check_seed(s) for s in ("12", 0, 2**64 - 1)] == [12, 0, 2**64 - 1]
