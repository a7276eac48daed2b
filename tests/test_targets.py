"""The promise: every family that mlx-lm and mlx-vlm load and that can be built here is watched without a trace and decoded to
plain decoding's own tokens, alone and in batches, before and behind its window."""

import functools
import importlib
import pkgutil
import re

import mlx.core as mx
import pytest

from docs.make_targets import PAGE, page, row
from dspark.buffers.batch import batch_of
from dspark.buffers.probe import prove
from dspark.buffers.single import SingleBuffers
from dspark.errors import BindError
from dspark.models.target import Target
from dspark.stages.rollback import Checkpoint, RollbackAuto
from tests.families import FAMILIES, NOT_BUILT, build
from tests.speculation import drafted, plain, prompts

# Families whose own forward cannot be verified in blocks, and the reason that binding gives.
REFUSED = {"plamo3": "keeps a window of 8 tokens but lets a block look back 9"}
WORKING = [name for name in FAMILIES if name not in REFUSED]
SHORT, LONG = (4, 3, 2, 5), (21, 6, 13, 9)


@functools.lru_cache(maxsize=2)
def target(name):
    return Target(build(name))


@functools.lru_cache(maxsize=16)
def truth(name, lengths, length):
    asked = prompts(target(name).vocab_size, lengths)
    return asked, [plain(target(name), prompt, length) for prompt in asked]


def test_at_least_45_families_of_mlx_lm_and_five_models_of_mlx_vlm_work():
    assert len([name for name in WORKING if not name.startswith("vlm/")]) >= 45
    assert {name for name in WORKING if name.startswith("vlm/")} == {
        f"vlm/{name}" for name in ("gemma4", "lfm2", "muse_glimmer", "nemotron_h", "qwen3_5")
    }


@pytest.mark.parametrize("name", WORKING)
def test_a_family_is_watched_without_a_trace_and_decoded_alike(name):
    model = build(name)
    ids = mx.array([[3, 17, 42, 7, 99, 5]])
    watched = Target(model)
    untouched = watched._logits(ids, watched.make_caches())
    mx.eval(untouched)
    layers = tuple(range(watched.num_layers)) if "taps" in watched.provides else ()
    logits, taps = watched(ids, watched.make_caches(), layers)
    assert mx.array_equal(logits, untouched).item()
    assert not layers or taps.shape == (1, 6, len(layers) * watched.hidden_size)
    asked = prompts(watched.vocab_size, (12, 5))
    said = [plain(watched, asked[0], 16), plain(watched, asked[1], 8)]
    assert len({token for row in said for token in row}) >= 8
    assert drafted(watched, asked[:1], said[:1], 16, 0.5) == said[:1]
    assert drafted(watched, asked, said, 8, 0.5) == [row[:8] for row in said]
    watched.close()


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "past the window"])
@pytest.mark.parametrize("rollback", [RollbackAuto(), Checkpoint()], ids=["auto", "checkpoint"])
@pytest.mark.parametrize("name", WORKING)
def test_every_rate_rollback_and_batch_says_the_same(name, rollback, lengths):
    length = 3 if lengths is SHORT else 12
    asked, said = truth(name, lengths, length)
    for rate in (0.0, 0.5, 1.0, "lookup"):
        assert drafted(target(name), asked[:1], said[:1], length, rate, rollback) == said[:1]
        assert drafted(target(name), asked, said, length, rate, rollback) == said


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKING)
def test_the_plan_of_a_family_is_proved(name):
    proof = prove(target(name), RollbackAuto().plan(target(name)))
    assert proof.worst <= proof.tolerance < 0.01 * proof.signal
    assert not proof.notes


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_contradicts_itself_is_refused(name):
    with pytest.raises(BindError, match=REFUSED[name]):
        prove(target(name), RollbackAuto().plan(target(name)))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2", "come out .* off in one forward"),
        ("gpt_bigcode", "fails on rows of different lengths"),
        ("llama4", "ChunkedKVCache, which has no form for several rows"),
        ("minimax_m3_vl", "an index that counts columns"),
        ("deepseek_v41", "rolled back by checkpoint"),
    ],
)
def test_rows_that_cannot_share_a_forward_say_why(name, reason):
    buffers = SingleBuffers(target(name).make_caches(), RollbackAuto().plan(target(name)))
    buffers.forward(target(name), mx.array([[1, 2, 3]]))
    buffers.settle((3,), ())
    assert re.search(reason, batch_of(target(name), buffers).reason)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "nemotron_h", "plamo3", "gemma2", "deepseek_v41", "vlm/qwen3_5"])
def test_the_page_says_what_a_family_gets(name):
    assert row(name) in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_the_page_is_what_make_targets_writes():
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_family_of_mlx_lm_is_tried_or_named():
    import mlx_lm.models

    found = []
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        if module.name in NOT_BUILT or hasattr(importlib.import_module(f"mlx_lm.models.{module.name}"), "ModelArgs"):
            found.append(module.name)
    assert set(found) == {name for name in FAMILIES if not name.startswith("vlm/")} | set(NOT_BUILT)
