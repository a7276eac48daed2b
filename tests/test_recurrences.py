"""Another way to compute a hybrid's recurrences: on for its instances while a handle is open, in plain steps, verify and replay
alike, and nowhere else."""

import copy

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3_5
from mlx_lm.models.gated_delta import gated_delta_ops

from dspark.buffers.plan import make_plan
from dspark.buffers.single import SingleBuffers
from dspark.kernels import attention, enable, gated, gated_probe
from dspark.kernels.measure import Finding
from dspark.kernels.recurrences import Recurrences, kinds
from dspark.models.target import Target
from tests.gated_kernel import launch_by

TEXT = {
    "model_type": "qwen3_5",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"},
}
IDS = (3, 5, 7, 9, 11, 13)


def hybrid(seed=1):
    mx.random.seed(seed)
    model = qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=copy.deepcopy(TEXT)))
    model.eval()
    mx.eval(model.parameters())
    return model


@pytest.fixture
def seen(monkeypatch):
    """Launches of the kernel, by what they were given."""
    calls, run = [], launch_by()

    def launch(kind, *call):
        calls.append(kind.given)
        return run(kind, *call)

    monkeypatch.setattr(gated, "launch", launch)
    return calls


def same(a, b):
    return mx.array_equal(a, b).item()


def ids(*tokens):
    return mx.array([tokens])


def every(kind):
    return True


def settled(target, keep):
    """Buffers behind a prompt and a block of six of which `keep` rows were kept, and the block's logits."""
    buffers = SingleBuffers(
        target.make_caches(), make_plan(target.make_caches(), "recurrence-replay", target.replays())
    )
    buffers.forward(target, ids(2, 4, 6))
    buffers.settle((3,), ((2, 4, 6),))
    logits, _ = buffers.forward(target, ids(*IDS))
    buffers.settle((keep,), (IDS,))
    return buffers, logits


def test_the_kernel_computes_every_forward_while_the_handle_is_open(seen):
    model = hybrid()
    before = model(ids(*IDS))
    with Recurrences(model, every) as handle:
        assert len(handle.modules) == 3
        # Float32 sums in another order.
        assert mx.abs(model(ids(*IDS)) - before).max().item() <= 1e-5 * mx.abs(before).max().item()
        assert seen == [""] * 3
    assert same(model(ids(*IDS)), before)
    assert len(seen) == 3


def test_steps_blocks_and_replays_agree_bit_for_bit(seen):
    model = hybrid()
    target = Target(model, TEXT)
    with Recurrences(model, every):
        caches = target.make_caches()
        target(ids(2, 4, 6), caches)
        steps = [target(ids(token), caches)[0] for token in IDS]
        for keep in (1, 4, 6):
            seen.clear()
            buffers, logits = settled(target, keep)
            assert same(mx.concatenate(steps, axis=1), logits)
            assert seen.count("counts") == (0 if keep == 6 else 3)
            fresh = target.make_caches()
            target(ids(2, 4, 6), fresh)
            target(ids(*IDS[:keep]), fresh)
            assert all(
                same(a, b)
                for cache, other in zip(buffers.caches[:3], fresh[:3], strict=True)
                for a, b in zip(cache.cache, other.cache, strict=True)
            )
    target.close()


def test_a_replay_that_is_a_row_short_would_show(seen, monkeypatch):
    model = hybrid()
    target = Target(model, TEXT)
    with Recurrences(model, every):
        right = settled(target, 4)[0].caches[0].cache[1]
        behind = gated.state_behind
        monkeypatch.setattr(gated, "state_behind", lambda *call: behind(*call[:-1], [k - 1 for k in call[-1]]))
        assert not same(settled(target, 4)[0].caches[0].cache[1], right)
    target.close()


@pytest.mark.parametrize("hooked_first", [True, False])
@pytest.mark.parametrize("handle_closes_first", [True, False])
def test_hooks_and_the_kernel_share_an_instance(seen, hooked_first, handle_closes_first):
    model = hybrid()
    before = model(ids(*IDS))
    target = Target(model, TEXT)
    if hooked_first:
        target.replays()
    handle = Recurrences(model, every)
    settled(target, 4)
    assert seen.count("counts") == 3
    for close in (handle.close, target.close) if handle_closes_first else (target.close, handle.close):
        close()
        close()
    assert {type(layer.linear_attn) for layer in model.layers[:3]} == {qwen3_5.GatedDeltaNet}
    seen.clear()
    assert same(model(ids(*IDS)), before)
    assert seen == []


def test_replays_are_told_apart_with_and_without_the_kernel(seen):
    """What a target learned of its caches before the kernel was on holds while it is on, and behind it."""
    model = hybrid()
    target = Target(model, TEXT)
    stock = settled(target, 4)[0].caches[0].cache[1]
    with Recurrences(model, every):
        settled(target, 4)
    assert same(settled(target, 4)[0].caches[0].cache[1], stock)
    target.close()


def test_two_handles_on_one_model(seen):
    model = hybrid()
    first, second = Recurrences(model, every), Recurrences(model, every)
    first.close()
    model(ids(*IDS))
    assert len(seen) == 3
    second.close()
    model(ids(*IDS))
    assert len(seen) == 3
    assert type(model.layers[0].linear_attn) is qwen3_5.GatedDeltaNet


def test_nothing_else_is_touched(seen):
    model, other = hybrid(), hybrid()
    with Recurrences(model, every):
        other(ids(*IDS))
        assert seen == []
        layer = model.layers[0].linear_attn
        assert isinstance(layer, qwen3_5.GatedDeltaNet)
        assert repr(layer) == repr(other.layers[0].linear_attn)
        assert type(copy.deepcopy(layer)) is qwen3_5.GatedDeltaNet
        # A module in training asks for operations that can be differentiated.
        model.train()
        model(ids(*IDS))
        assert seen == []
        model.eval()
        # A state in another format than the kernel's.
        caches = model.make_cache()
        model(ids(1, 2), cache=caches)
        seen.clear()
        caches[0][1] = caches[0][1].astype(mx.bfloat16)
        model(ids(3), cache=caches)
        assert len(seen) == 2


def test_shapes_that_were_not_found_right_are_left_alone(seen):
    model = hybrid()
    assert [str(kind) for kind in kinds(model)] == [
        "gated delta, 1 and 2 heads, 32 -> 32, scalar gates, float32/float32/float32"
    ]
    with Recurrences(model, lambda kind: False):
        model(ids(*IDS))
    assert seen == []


def test_the_probe_turns_it_on_and_explain_says_so(seen, tmp_path, monkeypatch):
    model, file = hybrid(), tmp_path / "kernels.json"
    monkeypatch.setattr(gated_probe, "timed", lambda kind, length: (20.0, 300.0))
    monkeypatch.setattr(attention, "measure", lambda kind: Finding("stock"))
    kernels = enable.enable(model, 8, kind="cuda", file=file)
    assert kernels.lines()[:2] == [
        "1 of 3 shapes by other kernels than MLX's own, as measured here",
        "gated delta, 1 and 2 heads, 32 -> 32, scalar gates, float32/float32/float32: cuda (20 us for 300 at 8 rows)",
    ]
    seen.clear()
    model(ids(*IDS))
    assert seen == [""] * 3
    kernels.close()
    monkeypatch.setattr(gated_probe, "measure", lambda kind: Finding("stock", why="no such instruction"))
    again = enable.enable(model, 8, kind="cuda", file=file)
    assert again.gated == kernels.gated
    again.close()
    seen.clear()
    refused = enable.enable(model, 8, kind="cuda", file=tmp_path / "other.json")
    assert refused.lines()[1].endswith("stock (no such instruction)")
    model(ids(*IDS))
    assert seen == []
    refused.close()
    # Metal has a kernel of the model's own library, and a CPU none.
    with_metal = enable.enable(model, 8, kind="metal", file=file)
    assert with_metal.gated == {}
    with_metal.close()
    assert enable.enable(model, 8, kind="cpu", file=file) is None


def test_the_probes_own_rule_is_the_models():
    kind = gated.Gated(1, 2, 32, 32, False, mx.float32, mx.float32, mx.float32)
    given = gated_probe.drawn(kind, 2, 3)
    for ours, theirs in zip(gated_probe.in_float32(*given), gated_delta_ops(*given), strict=True):
        assert mx.abs(ours - theirs).max().item() <= 1e-6
