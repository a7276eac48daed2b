"""`dspark inspect` says what a drafter is from its headers, which targets it fits, and why it would be refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import huggingface_hub
import mlx.core as mx
import pytest

from dspark.cli import main
from dspark.cli.options import RunOptions
from dspark.cli.overrides import load_recipe
from dspark.models.heads.shapes import parameter_shapes
from dspark.stages.draft import DFlash2, DSpark
from tests.fake_hub import serving
from tests.fakes import HashTarget
from tests.parity_sets import read_set
from tests.tiny_drafters import head_config, published, random_drafter, write


class Tiny(HashTarget):
    hidden_size, vocab_size, num_layers = 64, 61, 6


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def run(capfd):
    def call(*args):
        code = main(["inspect", *map(str, args)])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with serving() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        yield served


def lines(out: str) -> dict[str, str]:
    return {line.split("  ")[0].strip(): line.split("  ", 1)[1].strip() for line in out.splitlines()}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vanilla", {"packaging": "DeepSpec (qwen3)", "slots": "anchor predicts", "block": "5 slots, 5 drafts"}),
        ("rnn", {"heads": "Markov rnn of rank 8", "tables": "embedding borrowed, lm_head borrowed"}),
        ("causal", {"masks": "all layers causal, window 6"}),
        ("reduced", {"packaging": "speculators", "vocabulary": "30 of 61", "taps": "layers 0, 4"}),
        ("dflash", {"packaging": "z-lab DFlash", "block": "5 slots, 4 drafts", "masks": "all layers bidirectional"}),
        ("dflash2", {"kind": "dflash2", "masks": "all layers bidirectional, window 6"}),
    ],
)
def test_what_a_folder_holds(run, tmp_path, name, said):
    path = random_drafter(tmp_path / name, name, Tiny())
    code, out, err = run(path)
    found = lines(out)
    assert (code, err) == (0, "")
    assert {key: found[key] for key in said} == said
    assert found["rope"] == "halves (neox), theta 10000"
    assert found["drafter"] == path


def test_json_holds_the_same(run, tmp_path):
    path = random_drafter(tmp_path / "d", "vanilla", Tiny())
    code, out, _ = run(path, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["path"], found["kind"], found["block_size"], found["refused"]) == (path, "dspark", 5, None)
    assert found["target_layer_ids"] == [0, 4]
    assert found["recipes"] == found["targets"] == []


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_what_would_be_refused_says_why_and_fails(run, tmp_path):
    path = Path(random_drafter(tmp_path / "d", "vanilla", Tiny()))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLMEagle3"]}))
    code, out, err = run(path)
    assert (code, err) == (1, "")
    assert "this is an EAGLE drafter (LlamaForCausalLMEagle3), which drafts one token a step" in lines(out)["refused"]
    assert json.loads(run(path, "--json")[1])["refused"].startswith(f"{path}/config.json: this is an EAGLE")


def test_a_target_is_held_against_it(run, tmp_path):
    path = random_drafter(tmp_path / "d", "vanilla", Tiny())
    sizes = {"model_type": "llama", "hidden_size": 64, "vocab_size": 61, "num_hidden_layers": 6}
    for name, config in {
        "fits": sizes,
        "nested": {"model_type": "qwen3_5", "text_config": sizes},
        "narrow": {**sizes, "hidden_size": 32},
        "shallow": {**sizes, "num_hidden_layers": 5},
        "looped": {**sizes, "num_hidden_layers": 3, "num_loops": 2},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    answers = {
        name: run(path, "--target", tmp_path / name) for name in ("fits", "nested", "looped", "narrow", "shallow")
    }
    assert [code for code, _, _ in answers.values()] == [0, 0, 0, 1, 1]
    assert "its taps are 64 wide and the target's layers 32" in answers["narrow"][1]
    assert "the last layer of a target with 5" in answers["shallow"][1]


@pytest.mark.parametrize("what", ["nothing", "no/such/folder/here"])
def test_nothing_there(run, what):
    code, out, err = run(what)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1


# ---- targets ---------------------------------------------------------------------------------------------------------


class Qwen3_8B(HashTarget):
    hidden_size, vocab_size, num_layers = 4096, 151936, 36


def hollow_drafter(folder: Path, **changes) -> Path:
    """A head of full size whose file is all hole: gigabytes to whoever would read the weights, none on the disk."""
    config = head_config("vanilla", Qwen3_8B, **changes)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published("vanilla", config) | {"num_target_layers": 36}))
    entries, at = {}, 0
    for name, shape in parameter_shapes(config).items():
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at := at + 2 * math.prod(shape)]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + at)
    return folder


def test_targets_that_fit_by_size(run, tmp_path):
    sizes = {"intermediate_size": 12288, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "embedding": "own"}
    path = hollow_drafter(tmp_path / "d", lm_head="own", **sizes)
    assert (path / "model.safetensors").stat().st_size > 2e9
    assert (path / "model.safetensors").stat().st_blocks * 512 < 1e6
    code, out, _ = run(path)
    assert code == 0
    assert lines(out)["fits by size"] == "mlx-community/Qwen3-8B-8bit"
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_target_layers": 40}))
    assert "fits by size" not in lines(run(path)[1])


# ---- one's own drafter ----------------------------------------------------------------------------------------------


def test_ones_own_drafter_sets_the_kind(tmp_path):
    """`--drafter` brings any drafter: what of the recipe's options another kind has no use for is left out."""
    file = tmp_path / "r.toml"
    file.write_text(
        'schema = 1\n[draft]\nkind = "hybrid"\n[[draft.branches]]\nkind = "lookup"\n[[draft.branches]]\n'
        'kind = "dspark"\ndrafter = "a/b"\nrevision = "v1"\nconfidence = 0.5\nbits = 8\n'
    )
    own = {name: random_drafter(tmp_path / name, name, Tiny()) for name in ("vanilla", "dflash2")}
    for name, kept in (
        ("vanilla", DSpark(own["vanilla"], bits=8, confidence=0.5)),
        ("dflash2", DFlash2(own["dflash2"], bits=8)),
    ):
        recipe = load_recipe(RunOptions(recipe=str(file), drafter=own[name]))
        assert recipe.draft.branches[1] == kept
    unknown = load_recipe(RunOptions(recipe=str(file), drafter="not/here"))
    assert unknown.draft.branches[1] == DSpark("not/here", bits=8, confidence=0.5)


# ---- hub repositories ------------------------------------------------------------------------------------------------


def served(folder: str) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in Path(folder).iterdir()}


def test_of_a_repository_only_headers_are_fetched(run, hub, tmp_path):
    class Wide(Tiny):
        vocab_size = 4000

    path = random_drafter(tmp_path / "d", "vanilla", Wide(), embedding="own", lm_head="own")
    hub.repos["deepseek-ai/dspark_qwen3_8b_block7"] = {**served(path), "README.md": b"x", "mask.bin": b"y"}
    code, out, err = run("deepseek-ai/dspark_qwen3_8b_block7")
    assert (code, err) == (0, "")
    assert lines(out)["packaging"] == "DeepSpec (qwen3)"
    assert lines(out)["recipes"] == "qwen3-8b-8bit"
    assert hub.files_got() == {"config.json", "model.safetensors"}
    ranges = [wanted for path, wanted in hub.got if path.endswith(".safetensors")]
    assert ranges == ["bytes=0-99999"]
    assert len(hub.repos["deepseek-ai/dspark_qwen3_8b_block7"]["model.safetensors"]) > 1_000_000


def test_a_long_header_is_fetched_whole(run, hub, tmp_path, monkeypatch):
    monkeypatch.setattr("dspark.checkpoints.headers.FIRST_BYTES", 64)
    hub.repos["a/b"] = served(random_drafter(tmp_path / "d", "vanilla", Tiny()))
    assert run("hf://a/b")[0] == 0
    assert len([1 for path, _ in hub.got if path.endswith(".safetensors")]) == 2


def test_shards_and_a_mask_row_apart_are_seen(run, hub, tmp_path):
    folder = Path(random_drafter(tmp_path / "d", "dflash", Tiny()))
    weights = mx.load(str(folder / "model.safetensors"))
    names = sorted(weights)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in shards.items():
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in part})
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    hub.repos["a/b"] = served(str(folder))
    assert run("a/b")[0] == 0
    hub.repos["a/c"] = {**hub.repos["a/b"], "mask_embedding.pt": b"never read"}
    code, out, _ = run("a/c")
    assert code == 1
    assert lines(out)["refused"].startswith("a/c: its mask row is in mask_embedding.pt")
    assert "mask_embedding.pt" not in hub.files_got()


def test_a_gguf_of_a_repository(run, hub):
    hub.repos["prism-ml/heads"] = {"sub/head-bf16.gguf": read_set("gguf_dspark").gguf or b""}
    code, out, err = run("prism-ml/heads/sub/head-bf16.gguf")
    assert (code, err) == (0, "")
    assert lines(out)["packaging"] == "PrismML GGUF DSpark"
    assert "log-SNR conditioning" in lines(out)["heads"]
    code, _, err = run("prism-ml/heads/other.gguf")
    assert code == 2
    assert "prism-ml/heads/other.gguf: the repository has no such file" in err


def test_a_repository_that_is_not_there(run, hub):
    code, _, err = run("a/none")
    assert code == 2
    assert "a/none: there is no such repository, or it is private" in err


def test_no_network(run, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _, err = run("a/none")
    assert code == 2
    assert "HF_HUB_OFFLINE keeps it from being fetched" in err


def test_a_damaged_file_of_a_repository(run, hub, tmp_path):
    files = served(random_drafter(tmp_path / "d", "vanilla", Tiny()))
    hub.repos["a/b"] = {**files, "model.safetensors": files["model.safetensors"][:5000]}
    code, _, err = run("a/b")
    assert code == 2
    assert "a/b" in err
    assert "dspark-" not in err


def test_a_config_alone_is_no_drafter(run, hub, tmp_path):
    config = head_config("vanilla", Tiny())
    write(tmp_path / "d", "vanilla", config, {"fc.weight": mx.zeros((2, 2))})
    code, out, _ = run(tmp_path / "d")
    assert code == 1
    assert "refused" in lines(out)
