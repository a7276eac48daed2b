"""The promise: taps, embedding and head come from the target's own forward, and nothing of the model changes by it."""

import copy
import threading

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from dspark.errors import BindError, DsparkError
from dspark.models.hooks import Hooks, original_class, watching
from dspark.models.taps import StopAtLayers, Taps
from dspark.models.target import Target, text_config
from tests.families import FAMILIES, build, quantized

IDS = mx.array([[3, 17, 42, 7, 99, 5], [8, 1, 2, 250, 4, 6]])
# One of each shape of trunk: plain, sliding, hybrid, MoE with tuples, looped, softcapped, head inside the trunk, two lists.
SHAPES = ["llama", "gemma3", "qwen3_5", "rwkv7", "kimi_k3", "nanbeige", "gemma4_text", "gpt_neox", "afm7", "nemotron_h"]


@pytest.fixture(params=SHAPES)
def target(request):
    made = Target(build(request.param))
    yield made
    made.close()


def logits_of(model, ids=IDS):
    out = model(ids, cache=Target(model).make_caches())
    return getattr(out, "logits", out)


def norm_of(target):
    """The last norm, found by the names that families use."""
    names = ("norm", "norm_f", "final_layernorm", "final_layer_norm", "output_norm")
    for _, module in target.core.named_modules():
        for name in names:
            if "layers" in module and name in module:
                return module[name]
            if "h" in module and name in module:
                return module[name]
    raise AssertionError("no norm found")


def test_taps_are_what_each_layer_gives_in_the_order_asked(target):
    steps, width = target.num_layers, target.hidden_size
    logits, taps = target(IDS, target.make_caches(), tuple(range(steps)))
    assert mx.array_equal(logits, logits_of(target.core)).item()
    each = taps.reshape(2, 6, steps, width)
    _, two = target(IDS, target.make_caches(), (steps - 1, 0))
    assert mx.array_equal(two, mx.concatenate([each[:, :, -1], each[:, :, 0]], axis=-1)).item()
    assert not mx.allclose(each[:, :, 0], each[:, :, 1], atol=1e-3).item()


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "nemotron_h", "gpt_neox", "minicpm"])
def test_the_last_tap_through_norm_and_head_gives_the_logits(name):
    target = Target(build(name))
    logits, last = target(IDS, target.make_caches(), (target.num_layers - 1,))
    assert mx.array_equal(target.head(norm_of(target)(last)), logits).item()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_is_the_targets_own(name):
    """Whatever caps, scales or ties it: the state that the trunk gives in a forward, handed in, gives the forward's logits."""
    target = Target(build(name))
    hooks, seen = Hooks(), []
    hooks.add([target.anatomy.trunk])

    class Listen(Taps):
        def called(self, module, call, args, kwargs):
            out = call(module, *args, **kwargs)
            if module is target.anatomy.trunk:
                seen.append(out[0] if isinstance(out, tuple) else out)
            return out

    with watching(Listen(frozenset(), ())):
        logits, _ = target(IDS[:1], target.make_caches())
    hooks.close()
    assert len(seen) == 1
    assert mx.array_equal(target.head(seen[0]), logits).item()
    assert not mx.array_equal(target.head(seen[0] * 0.5 + 0.1), logits).item()


def test_the_embedding_is_the_tables_and_the_scaled_one_is_the_first_layers_input(target):
    rows = target.embed(IDS)
    assert rows.shape == (2, 6, rows.shape[-1])
    assert mx.array_equal(rows, target.embedding(IDS)).item()
    scaled = target.embed(IDS, scaled=True)
    if target.name == "target" and type(target.core).__module__.endswith("llama"):
        assert mx.array_equal(scaled, rows).item()
    if type(target.core).__module__.endswith("gemma3"):
        assert mx.allclose(scaled, rows * 8.0, rtol=1e-2).item()


def test_a_watched_model_looks_and_saves_as_before(target, tmp_path):
    model = target.core
    names = [k for k, _ in tree_flatten(model.parameters())]
    fresh = copy.deepcopy(model)
    assert target.anatomy.layers
    classes = [type(layer) for layer in model.layers if layer is not None]
    assert all(isinstance(layer, original_class(layer)) for layer in target.anatomy.layers)
    assert [c.__name__ for c in classes] == [type(layer).__name__ for layer in fresh.layers if layer is not None]
    assert [k for k, _ in tree_flatten(model.parameters())] == names
    model.save_weights(str(tmp_path / "w.safetensors"))
    assert sorted(mx.load(str(tmp_path / "w.safetensors"))) == sorted(names)
    twin = copy.deepcopy(model)
    assert not any(hasattr(type(m), "_dspark_original") for _, m in twin.named_modules())
    assert mx.array_equal(logits_of(twin), logits_of(model)).item()


def test_close_gives_every_class_back_and_waits_for_the_last_owner():
    model = build("qwen3_5")
    before = [type(m) for _, m in model.named_modules()]
    one, two = Target(model), Target(model)
    assert one.num_layers == two.num_layers == 4
    one.close()
    assert two(IDS, two.make_caches(), (1,))[1] is not None
    assert [type(m) for _, m in model.named_modules()] != before
    two.close()
    two.close()
    assert [type(m) for _, m in model.named_modules()] == before


def test_a_forgotten_target_lets_go():
    model = build("llama")
    target = Target(model)
    assert target.num_layers == 4
    del target
    assert not any(hasattr(type(m), "_dspark_original") for _, m in model.named_modules())


def test_targets_of_several_threads_do_not_see_each_other():
    model, other = build("llama"), build("qwen3")
    one, two = Target(model), Target(other)
    expected = {i: one(IDS, one.make_caches(), (i,))[1] for i in range(4)}
    mx.eval(list(expected.values()))
    failures = []

    def run(i):
        with mx.stream(mx.new_thread_local_stream(mx.cpu)):
            for _ in range(8):
                _, taps = one(IDS, one.make_caches(), (i,))
                two(IDS, two.make_caches(), (3 - i,))
                if not mx.array_equal(taps, expected[i]).item():
                    failures.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_looped_model_counts_its_layers_as_they_run():
    target = Target(build("nanbeige"))
    assert target.num_layers == 6
    assert target.anatomy.steps == (0, 1, 2, 0, 1, 2)


def test_a_quantised_model_is_watched_the_same():
    model = quantized(build("qwen3"))
    target = Target(model)
    logits, taps = target(IDS, target.make_caches(), (0, 3))
    assert mx.array_equal(logits, logits_of(model)).item()
    assert mx.array_equal(target.head(norm_of(target)(taps[..., 64:])), logits).item()
    assert isinstance(target.embedding, nn.QuantizedEmbedding)


@pytest.mark.parametrize(
    ("name", "ids", "message"),
    [
        ("llama", (1, 4), r"target_layer_ids \[4\] do not exist in target: its layers count from 0 to 3"),
        ("iquestloopcoder", (0,), r"target_layer_ids \[0\] .* its layers are not called one by one"),
        ("gemma3n", (0,), "its layers carry several streams"),
    ],
)
def test_layers_that_do_not_exist_are_named(name, ids, message):
    target = Target(build(name))
    with pytest.raises(BindError, match=message):
        target(IDS, target.make_caches(), ids)


def test_taps_of_a_forward_that_skipped_layers_are_refused():
    target = Target(build("llama"))
    assert target.num_layers == 4
    target.close()
    with pytest.raises(DsparkError, match="0 times in one forward, not 4 times"):
        target(IDS, target.make_caches(), (1,))


def test_a_stopped_forward_leaves_no_watch_behind():
    target = Target(build("llama"))
    layers = frozenset(map(id, target.anatomy.layers))
    with pytest.raises(Exception, match="stopped"), watching(StopAtLayers(layers)):
        target(IDS, target.make_caches())
    assert mx.array_equal(target(IDS, target.make_caches())[0], logits_of(target.core)).item()


def test_facts_come_from_the_text_part_of_a_config():
    config = {"model_type": "x", "vocab_size": 9, "text_config": {"max_position_embeddings": 77}}
    assert text_config(config)["max_position_embeddings"] == 77
    target = Target(build("gemma3"), config)
    assert (target.context_length, target.vocab_size, target.hidden_size) == (77, 256, 64)


def test_a_tap_taken_one_layer_off_is_caught(monkeypatch):
    """The comparison above must notice a wrong layer."""

    def early(self, module, out):
        if id(module) in self._layers:
            self._kept[self.steps + 1] = out
            self.steps += 1

    target = Target(build("llama"))
    logits, last = target(IDS, target.make_caches(), (2,))
    assert not mx.array_equal(target.head(norm_of(target)(last)), logits).item()
    right = target(IDS, target.make_caches(), (1,))[1]
    monkeypatch.setattr(Taps, "note", early)
    assert not mx.array_equal(target(IDS, target.make_caches(), (1,))[1], right).item()


def test_a_busy_gpu_gets_each_tap_as_soon_as_it_is_there(monkeypatch):
    sent = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: sent.extend(arrays))
    target = Target(build("llama"))
    target(IDS, target.make_caches(), (0, 1))
    assert sent == []
    target.sends_ahead = True
    _, taps = target(IDS, target.make_caches(), (0, 1))
    assert len(sent) == 2
    assert mx.array_equal(mx.concatenate(sent, axis=-1), taps)
    # Training asks without caches, inside transformations that cannot compute yet.
    target(IDS, None, (0, 1))
    assert len(sent) == 2
    target.close()


@pytest.mark.parametrize(("device", "heavy", "sends"), [("gpu", 0, True), ("gpu", 1 << 40, False), ("cpu", 0, False)])
def test_small_targets_and_cpus_send_nothing_ahead(monkeypatch, device, heavy, sends):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(getattr(mx.DeviceType, device)))
    monkeypatch.setattr("dspark.models.target.HEAVY", heavy)
    assert Target(build("llama")).sends_ahead == sends
