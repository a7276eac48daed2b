"""What memory a target takes is known from its config and headers, said in a sentence, and refused where it cannot be had."""

import json

import attrs
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from dspark.buffers.footprint import Footprint, footprint
from dspark.buffers.leaves import all_leaves
from dspark.buffers.quantize import KVBits
from dspark.checkpoints import load, loaders
from dspark.checkpoints import weigh_drafter as weighing
from dspark.checkpoints.drafter import load_drafter
from dspark.checkpoints.load import describe, load_model
from dspark.checkpoints.room import Demand, caches_of
from dspark.checkpoints.weigh_drafter import packing, weigh_drafter
from dspark.engine import bind
from dspark.errors import CheckpointError, InputError
from dspark.explain import explain_bound, table
from dspark.models.target import Target
from dspark.pipeline import chain
from dspark.recipe import loads
from dspark.stages.accept import Greedy
from dspark.stages.draft import Lookup
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import RollbackAuto
from dspark.stages.verify import Verify
from tests.fakes import HashTarget
from tests.families import FAMILIES, WINDOW, _config, build
from tests.test_sources import folder_model, refusal
from tests.tiny_drafters import KINDS, random_drafter

STEP = 256  # mlx-lm's caches grow by so many tokens


def fed(model, tokens, width):
    caches = Target(model).make_caches()
    for start in range(0, tokens, width):
        model(mx.arange(start, start + width)[None] % 200, cache=caches)
    return caches


def held(caches):
    return sum(cache.nbytes for cache in all_leaves(caches) if not cache.empty())


# ---- caches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next", "lfm2", "falcon_h1", "mamba2", "gemma3n"])
def test_bytes_of_any_length_follow_from_one_token(name):
    model = build(name)
    small = footprint(fed(model, 1, 1))
    caches = fed(model, 2 * STEP, STEP)
    expected = small._replace(windows=()).nbytes(2 * STEP)
    rotating = [c for c in all_leaves(caches) if hasattr(c, "max_size") and c.keys is not None]
    assert held(caches) - sum(c.nbytes for c in rotating) == expected
    assert len(rotating) == 0 or small.windows


@pytest.mark.parametrize("name", ["gpt_oss", "olmo3", "gemma3_text"])
def test_a_window_grows_no_further(name):
    model = build(name)
    small = footprint(fed(model, 1, 1))
    ((nbytes, most),) = small.windows
    caches = fed(model, 3 * WINDOW, 1)
    rotating = sum(c.nbytes for c in all_leaves(caches) if hasattr(c, "max_size"))
    assert most == WINDOW
    assert rotating == nbytes * most
    assert small.nbytes(1000) - small.nbytes(999) == small.token_nbytes


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (4, 32)])
def test_quantised_caches(bits, group):
    model, kv = build("llama", head_dim=32), KVBits(bits, group)
    caches = fed(model, STEP, STEP)
    plain = footprint(caches)
    foreseen = footprint(caches, kv)
    kv.apply(caches)
    assert foreseen.nbytes(STEP) == held(caches) == footprint(caches).nbytes(STEP) < plain.nbytes(STEP)


def test_a_layer_that_is_not_counted_is_noticed():
    """Negative control."""
    caches = fed(build("llama"), STEP, STEP)
    assert footprint(caches[1:]).nbytes(STEP) < held(caches)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next", "gpt_oss", "falcon_h1", "nemotron_h"])
def test_the_config_alone_tells_the_same(name):
    extras = {k: v for k, v in FAMILIES[name].items() if k not in ("gain", "embed")}
    assert caches_of(_config(name, dict(extras), {}), None, 4) == footprint(fed(build(name), 1, 1))


def test_a_config_that_makes_no_model_tells_nothing():
    assert caches_of({"model_type": "no-such-family"}, None, 4) is None


def test_an_outline_computes_no_weights():
    before = mx.get_active_memory()
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 128256,
    }  # fmt: skip
    assert caches_of(config, None, 2) == Footprint(32 * 2 * 8 * 128 * 2)
    assert mx.get_active_memory() - before < 1e6


def test_lengths_and_bytes_are_each_others_inverse():
    some = Footprint(100, ((10, 8),), 7)
    assert (some.nbytes(0), some.nbytes(5), some.nbytes(50)) == (7, 557, 5087)
    assert some.most_tokens(some.nbytes(50)) == 50
    assert some.most_tokens(3) == 0
    assert Footprint(0, ((10, 8),)).most_tokens(1) is None
    assert some.text() == "100 bytes a token of context, 10 for each of the last 8 tokens, 0 MB whatever its length"


# ---- drafters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafters_weights_are_known_from_its_headers(tmp_path, kind, bits):
    folder = random_drafter(tmp_path, kind, Target(build("llama")))
    head = load_drafter(folder, bits=bits, group_size=32)
    loaded = sum(a.nbytes for _, a in tree_flatten(head.parameters()))
    foreseen = weigh_drafter(tmp_path, bits, 32, 4)
    # A reduced vocabulary's table of ids is made on loading.
    assert foreseen == loaded or (kind == "reduced" and abs(foreseen - loaded) < 0.02 * loaded)


def test_an_nvidia_gpu_unpacks_what_is_small(tmp_path, monkeypatch):
    random_drafter(tmp_path, "vanilla", Target(build("llama")))
    monkeypatch.setattr(weighing, "backend", lambda: "metal")
    assert packing(None, tmp_path, 32) == (4, False)
    monkeypatch.setattr(weighing, "backend", lambda: "cuda")
    assert packing(None, tmp_path, 32) == (0, True)
    monkeypatch.setattr(weighing, "SMALL", weigh_drafter(tmp_path, 0, 32, 2, dense=True) - 1)
    assert packing(None, tmp_path, 32) == (4, False)
    assert packing(8, tmp_path, 32) == (8, False)


# ---- against this machine ---------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """A machine of so many bytes, on which nothing can be loaded."""
    monkeypatch.setattr(loaders.MlxLmLoader, "load", None)

    def of(total, free=None):
        monkeypatch.setattr(load, "memory_total", lambda: total)
        monkeypatch.setattr(load, "memory_available", lambda: total if free is None else free)

    return of


def test_the_sentence_counts_weights_drafter_and_caches(tmp_path, machine):
    folder = folder_model(tmp_path / "model")
    machine(24_000_000_000, 8_000_000_000)
    config = json.loads((folder / "config.json").read_text())
    a_token = caches_of(config, None, 4).token_nbytes
    text = describe(str(folder), demand=Demand(context=20_000, drafter_nbytes=25_600_000))
    limit = min(20_000, config["max_position_embeddings"])
    assert text.startswith("model: ")
    assert f"26 MB of drafter, {limit * a_token / 1e6:.0f} MB of caches for {limit:,} tokens of context;" in text
    assert text.endswith("this machine has 24.0 GB, 8.0 GB free")


def test_a_context_that_cannot_fit_is_refused_before_anything_is_loaded(tmp_path, machine):
    folder = folder_model(tmp_path / "model", {"max_position_embeddings": 1_000_000})
    machine(50_000_000)
    demand = Demand(context=900_000)
    text = refusal(load_model, str(folder), demand=demand, error=InputError)
    most = int(text.split("--max-context ")[1].split()[0])
    assert "quantise the caches with --set target.kv_bits=8" in text
    for fits, context in ((True, most), (False, most + 1)):
        # What fits goes on to the loader, which is not there.
        with pytest.raises(TypeError if fits else InputError):
            load_model(str(folder), demand=attrs.evolve(demand, context=context))


def test_a_context_that_nobody_asked_for_is_not_refused(tmp_path, machine):
    folder = folder_model(tmp_path / "model", {"max_position_embeddings": 1_000_000})
    machine(50_000_000)
    with pytest.raises(TypeError):
        load_model(str(folder))


def test_a_drafter_that_does_not_fit_beside_its_target_is_refused(tmp_path, machine):
    folder = folder_model(tmp_path / "model")
    machine(50_000_000)
    text = refusal(load_model, str(folder), demand=Demand(drafter_nbytes=49_990_000), error=CheckpointError)
    assert "target and drafter cannot fit together" in text


def test_a_recipe_asks_for_its_context_and_its_drafter(tmp_path, machine):
    folder = folder_model(tmp_path / "model")
    random_drafter(tmp_path / "drafter", "vanilla", Target(build("llama")))
    text = f"schema = 1\n[target]\nsource = '{folder}'\nmax_context = 32\n[draft]\nkind = 'dspark'\ndrafter = '{tmp_path}/drafter'"
    machine(100_000)
    said = refusal(loads(text).bind, error=CheckpointError)
    assert "of drafter" in said
    assert "of caches for 32 tokens" in said


# ---- prompts ----------------------------------------------------------------------------------------------------------


def engine(target, **how):
    return bind(chain(Prefill(), Lookup(), Verify(), Greedy(), RollbackAuto(), cap=4), target, **how)


def test_a_prompt_whose_caches_cannot_fit_is_refused_before_it_is_read(monkeypatch):
    target = HashTarget()
    bound = engine(target)
    _ = bound.footprint
    forwards = target.forwards
    # Eight bytes a token: two float32 numbers.
    monkeypatch.setattr("dspark.engine.memory_total", lambda: mx.get_active_memory() + 8 * 6000)
    bound.open([1] * 5000)
    with pytest.raises(InputError, match=r"the prompt of 7,000 tokens takes 0 MB of caches.*shorten it"):
        bound.open([1] * 7000)
    with pytest.raises(InputError, match=r"2 prompts at once take 0 MB.*decode fewer at once"):
        bound.open([[1] * 5000, [1] * 5000])
    assert target.forwards == forwards


@pytest.mark.parametrize("own", [None, 8, 100])
def test_max_context_refuses_a_prompt_before_a_forward(own):
    target = HashTarget()
    target.context_length = own
    bound = engine(target, context_length=8)
    forwards = target.forwards
    with pytest.raises(InputError, match="the prompt is too long: 9 tokens, and the context holds 8"):
        bound.open([1] * 9)
    assert target.forwards == forwards
    assert bound.open([1] * 6, max_tokens=99).results[0].prompt_tokens == 6


def test_max_context_beyond_the_models_own_is_said():
    target = HashTarget()
    target.context_length = 8
    bound = engine(target, context_length=1000)
    assert bound.context_length == 8
    assert bound.notes == ("max_context is 1,000, more than the 8 tokens that this model allows, which count",)
    assert engine(target, context_length=8).notes == ()


def test_explain_says_bytes_a_token_and_for_the_whole_context():
    model = build("llama")
    target = Target(model, {"max_position_embeddings": 100_000})
    lines = table(explain_bound(engine(target)))
    small = footprint(fed(model, 1, 1))
    assert f"caches of {small.token_nbytes:,} bytes a token of context" in lines
    assert f"{small.nbytes(100_000) / 1e6:.0f} MB for all 100,000" in lines
    assert "this machine has" in lines
