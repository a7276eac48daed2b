"""`dspark bench`: arms in turn, texts compared, figures refused where they mean nothing, peers in processes of their own."""

import json
import os
import sys
import textwrap
from itertools import pairwise

import mlx.core as mx
import pytest

import dspark.assemble
from dspark import cuda_switches
from dspark.bench import arms as arms_module
from dspark.bench import peers as peers_module
from dspark.bench import same
from dspark.bench.arms import MlxLmArm, SessionArm, greedy, plain
from dspark.bench.folders import drafting_of, export_drafter, export_target, held_dtype
from dspark.bench.measure import Question, measure, schedule
from dspark.bench.peers import PeerArm, PeerError, PeerTask, blas_files, environment, pythons
from dspark.bench.prompts import NAMES, read_set
from dspark.bench.record import Run
from dspark.bench.report import ALL, OURS, as_dict, make_report
from dspark.bench.same import Divergence, Gap, first_divergence, gap_behind, spoken
from dspark.bench.words import lines_of
from dspark.blas import Blas
from dspark.checkpoints.load import load_model
from dspark.checkpoints.sources import resolve
from dspark.cli import main
from dspark.engine import bind
from dspark.errors import InputError
from dspark.models.target import Target
from dspark.pipeline import chain
from dspark.recipe import loads
from dspark.stages.accept import Rejection, SampleMatch
from dspark.stages.draft import Lookup
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import RollbackAuto
from dspark.stages.verify import Verify
from dspark.stages.warp import temperature, warps
from tests.fakes import HashTarget, ScriptedDraft
from tests.fakes import plain as plain_tokens
from tests.test_cli import assert_one_sentence, tiny_model
from tests.tiny_drafters import random_drafter

ASKED = [Question("chat", 1, (3, 1, 4)), Question("chat", 2, (9, 2)), Question("code", 1, (6, 5, 3, 5))]

WIDE = Gap(1.0, 1e-4, (2, 7))


class FakeArm:
    """Says what it is told to, at a speed of its own; notes when it ran."""

    def __init__(self, name, said=None, rate=1.0, log=None):
        self.name, self.about, self.said, self.rate, self.log = name, "fake", said or {}, rate, log

    def run(self, ids, max_tokens):
        if self.log is not None:
            self.log.append((self.name, ids))
        tokens = self.said.get(ids, (1, 2, 3, 4))
        if isinstance(tokens, Exception):
            raise tokens
        return Run(tuple(tokens), ((0.1, 1), (0.1 + 3 / self.rate, 3)), 1.0, 2, 100)

    def close(self): ...


def measured(*arms, repeats=4, told=lambda text: None):
    return measure(arms, ASKED, repeats, 8, told)


def reported(*arms, repeats=4, gap=WIDE):
    return make_report(measured(*arms, repeats=repeats), frozenset({0}), 8, lambda ids: gap)


# ---- in turn ----------------------------------------------------------------------------------------------------------


def test_arms_of_a_prompt_run_side_by_side_forwards_and_backwards():
    order = [(arm, q.place, r) for arm, q, r in schedule("ABC", [Question("x", i, ()) for i in (1, 2)], 2)]
    assert "".join(arm for arm, _, _ in order) == "ABCCBACBAABC"
    assert [place for _, place, _ in order] == [1, 1, 1, 2, 2, 2] * 2
    assert [repeat for _, _, repeat in order] == [1] * 6 + [2] * 6


def test_every_arm_runs_as_often_in_every_place():
    places = {arm: [0, 0, 0] for arm in "ABC"}
    runs = [arm for arm, _, _ in schedule("ABC", [Question("x", i, ()) for i in range(4)], 4)]
    for i, arm in enumerate(runs):
        places[arm][i % 3] += 1
    assert places["A"] == [8, 0, 8]
    assert places["B"] == [0, 16, 0]
    assert places["C"] == [8, 0, 8]


def test_the_first_pass_is_not_timed():
    log = []
    found = measured(FakeArm("dspark", log=log), FakeArm("plain", log=log), repeats=2)
    assert len(log) == 2 * 3 * (1 + 2)
    assert {len(runs) for runs in found.timed.values()} == {2}
    assert len(found.warm) == 6


def test_an_arm_that_fails_is_left_out_with_its_reason():
    broken = FakeArm("mlx-lm", {(9, 2): RuntimeError("no\nsuch layer")})
    found = measured(FakeArm("dspark"), broken)
    assert found.arms == ["dspark"]
    assert found.dropped == {"mlx-lm": "RuntimeError: no such layer"}
    with pytest.raises(RuntimeError):
        measured(FakeArm("dspark", {(9, 2): RuntimeError("ours")}), FakeArm("plain"))


# ---- the same text ----------------------------------------------------------------------------------------------------


def test_answers_are_compared_up_to_their_end():
    stop = frozenset({0})
    assert spoken((1, 2, 0, 5), stop, 9) == (1, 2, 0)
    assert spoken((1, 2, 3, 4), stop, 3) == (1, 2, 3)
    assert first_divergence((1, 2), (1, 2)) is None
    assert first_divergence((1, 2, 3), (1, 5, 3)) == Divergence(1, 2, 5)
    assert first_divergence((1, 2, 0), (1, 2)) == Divergence(2, 0, None)


def test_the_gap_is_that_of_the_targets_own_logits():
    target = HashTarget()
    context = (3, 1, 4, 1, 5)
    logits, _ = target(mx.array([context]), target.make_caches())
    ranked = sorted(range(target.vocab_size), key=lambda i: logits[0, -1, i].item())
    found = gap_behind(target, context)
    assert found.top == (ranked[-1], ranked[-2])
    assert found.gap == (logits[0, -1, ranked[-1]] - logits[0, -1, ranked[-2]]).item()
    assert found.noise == 0.0
    assert gap_behind(target, context * 200).top == gap_behind(target, context * 200).top


def test_only_the_two_likeliest_tokens_close_together_are_a_near_tie():
    close, wide = Gap(9e-4, 1e-4, (5, 7)), Gap(2e-3, 1e-4, (5, 7))
    assert close.near_tie(Divergence(3, 5, 7))
    assert close.near_tie(Divergence(3, 7, 5))
    assert not close.near_tie(Divergence(3, 5, 8))
    assert not close.near_tie(Divergence(3, 5, None))
    assert not wide.near_tie(Divergence(3, 5, 7))
    assert not Gap(1e-9, 0.0, (5, 7)).near_tie(Divergence(3, 5, 7))
    assert Gap(9e-4, 1e-4, (5, 7, 8)).near_tie(Divergence(3, 7, 8))


def test_all_tokens_that_rounding_may_swap_are_told(monkeypatch):
    row = mx.array([0.0, 4.0, 3.9995, 3.9992, 3.998])
    said = {same.CHUNK: row + 1e-4, 1: row}
    monkeypatch.setattr(same, "_last_logits", lambda target, context, last: said[last])
    assert same.gap_behind(None, (1, 2)).top == (1, 2, 3)
    said[same.CHUNK] = row
    assert same.gap_behind(None, (1, 2)).top == (1, 2)


def test_all_the_same_is_said():
    text = "\n".join(lines_of(reported(FakeArm("dspark"), FakeArm("plain"), FakeArm("mlx-lm"))))
    assert "text: dspark said what plain said in all 3 prompts" in text
    assert "text: mlx-lm said what plain said in all 3 prompts" in text


def test_another_text_is_found_and_its_speed_not_compared():
    wrong = FakeArm("mlx-lm", {(9, 2): (1, 7, 3, 4)}, rate=0.5)
    found = reported(FakeArm("dspark"), FakeArm("plain"), wrong)
    (difference,) = found.differences
    assert (difference.arm, difference.question.place, difference.divergence) == ("mlx-lm", 2, Divergence(1, 2, 7))
    assert found.wrong("mlx-lm")
    assert not found.wrong(OURS)
    assert found.speed_ups[ALL, "mlx-lm", "decode_tokens_per_s"].interval.pairs == 8
    assert found.speed_ups[ALL, "plain", "decode_tokens_per_s"].interval.pairs == 12
    assert (
        "chat 2, token 2: the two likeliest tokens are 1 apart, rounding moves logits by 0.0001; not explained"
        in "\n".join(lines_of(found))
    )


def test_a_near_tie_is_said_and_compared():
    tie = FakeArm("mlx-lm", {(9, 2): (1, 7, 3, 4)})
    found = reported(FakeArm("dspark"), FakeArm("plain"), tie, gap=Gap(1e-4, 1e-4, (2, 7)))
    assert not found.wrong("mlx-lm")
    assert found.speed_ups[ALL, "mlx-lm", "decode_tokens_per_s"].interval.pairs == 12
    assert "a near-tie" in "\n".join(lines_of(found))


def test_a_text_that_differs_everywhere_has_no_speed():
    wrong = FakeArm("mlx-lm", {q.ids: (7,) for q in ASKED})
    found = reported(FakeArm("dspark"), FakeArm("plain"), wrong)
    assert "they did not say the same" in found.speed_ups[ALL, "mlx-lm", "decode_tokens_per_s"].refused


class Fickle(FakeArm):
    """Says something else in its third answer to a prompt."""

    count = 0

    def run(self, ids, max_tokens):
        self.count += 1
        return super().run(ids, max_tokens)._replace(tokens=(1, 2, 3, 9 if self.count > 6 else 4))


def test_a_repeat_that_says_something_else_is_found():
    assert reported(FakeArm("dspark"), FakeArm("plain"), Fickle("mlx-lm")).wrong("mlx-lm")


# ---- figures ----------------------------------------------------------------------------------------------------------


def test_speed_ups_are_those_of_paired_runs():
    found = reported(FakeArm("dspark", rate=3.0), FakeArm("plain", rate=2.0), repeats=4)
    up = found.speed_ups["chat", "plain", "decode_tokens_per_s"]
    assert up.refused is None
    assert up.interval.ratio == pytest.approx(1.5, rel=1e-9)
    assert (
        found.speed_ups["code", "plain", "decode_tokens_per_s"].refused == "4 pairs of runs are too few, 8 are needed"
    )
    text = "\n".join(lines_of(found))
    assert "decode, dspark over plain: 1.50 (95 % interval 1.50 to 1.50, 8 pairs)" in text
    assert "no figure: 4 pairs of runs are too few" in text


def test_equal_arms_have_no_speed_up():
    found = reported(FakeArm("dspark"), FakeArm("plain"))
    assert "holds 1" in found.speed_ups[ALL, "plain", "decode_tokens_per_s"].refused
    assert found.speed_ups[ALL, "plain", "decode_tokens_per_s"].interval.ratio == 1.0


def test_figures_and_json():
    found = reported(FakeArm("dspark", rate=3.0), FakeArm("plain"))
    figures = found.figures["chat", "dspark"]
    assert figures["decode_tokens_per_s"].median == pytest.approx(3.0)
    assert figures["accepted_length"].median == 2.0
    assert figures["peak_bytes"].count == 8
    table = json.loads(json.dumps(as_dict(found)))
    assert len(table["runs"]) == 2 * 3 * 4
    assert {r["repeat"] for r in table["runs"]} == {1, 2, 3, 4}
    assert {"ratio", "low", "high", "refused"} <= table["speed_ups"][0].keys()


# ---- arms of this process ---------------------------------------------------------------------------------------------


def engine_of(target, draft, accept=None, cap=4, **how):
    accept = accept or SampleMatch(warps(temperature(1.0)))
    return bind(chain(Prefill(), draft, Verify(), accept, RollbackAuto(), cap=cap), target, **how)


def test_sessions_are_greedy_whatever_the_recipe_says():
    prompt = (3, 1, 4, 1, 5)
    truth = tuple(plain_tokens(HashTarget(), prompt, 20))
    for accept in (SampleMatch(warps(temperature(5.0))), Rejection(warp=warps(temperature(5.0)))):
        engine = greedy(engine_of(HashTarget(), ScriptedDraft(((*prompt, *truth),), 0.6), accept))
        ours, alone = (
            SessionArm("dspark", "", engine).run(prompt, 16),
            SessionArm("plain", "", plain(engine)).run(prompt, 16),
        )
        assert ours.tokens == alone.tokens == truth[:16]
        assert ours.rounds < alone.rounds == 16
        assert sum(count for _, count in ours.deliveries) == 16
        assert len(ours.deliveries) == ours.rounds
        assert all(a <= b for (a, _), (b, _) in pairwise(ours.deliveries))


def test_a_session_that_sampled_would_differ():
    """Negative control: the same engine, not made greedy."""
    prompt = (3, 1, 4, 1, 5)
    truth = tuple(plain_tokens(HashTarget(), prompt, 16))
    engine = engine_of(HashTarget(), Lookup(), SampleMatch(warps(temperature(5.0))), seed=1)
    assert SessionArm("dspark", "", engine).run(prompt, 16).tokens != truth


def test_memory_of_what_an_arm_does_not_use_is_not_its_own(monkeypatch):
    monkeypatch.setattr(arms_module.mx, "get_peak_memory", lambda: 1000)
    engine = greedy(engine_of(HashTarget(), Lookup()))
    assert SessionArm("a", "", engine).run((1, 2), 2).peak_bytes == 1000
    assert SessionArm("a", "", engine, 300).run((1, 2), 2).peak_bytes == 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model(path)
    return path


@pytest.fixture(scope="module")
def tiny(folder, tmp_path_factory):
    os.environ["DSPARK_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    try:
        recipe = loads(f"schema = 1\n[target]\nsource = '{folder}'\n[draft]\nkind = 'lookup'")
        yield greedy(recipe.bind())
    finally:
        del os.environ["DSPARK_CACHE"]


def test_mlx_lm_runs_on_our_model_object_and_says_the_same(tiny, monkeypatch):
    import mlx_lm

    seen = []
    honest = mlx_lm.stream_generate
    monkeypatch.setattr(mlx_lm, "stream_generate", lambda model, *a, **k: seen.append(model) or honest(model, *a, **k))
    ids = tiny.encode("to be, to be, to be")
    theirs, ours = MlxLmArm("mlx-lm", "", tiny).run(ids, 30), SessionArm("dspark", "", tiny).run(ids, 30)
    assert seen == [tiny.target.model]
    assert theirs.tokens == ours.tokens
    assert len(theirs.deliveries) == len(theirs.tokens) == theirs.rounds == 30


# ---- peers ------------------------------------------------------------------------------------------------------------


PEER = """
import sys, json, os
print("a library talks on standard output", flush=True)
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    print("and on standard error", file=sys.stderr)
    {body}
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Put a program in the worker's place; gives the arm that talks to it."""

    def make(body):
        worker = tmp_path / "worker.py"
        text = "import os, sys\nout = os.fdopen(os.dup(1), 'w')\nos.dup2(2, 1)\n" + PEER.format(
            body=textwrap.indent(textwrap.dedent(body), "    ").strip()
        )
        worker.write_text(text)
        monkeypatch.setattr(peers_module, "WORKER", worker)
        return PeerArm("mlx-vlm", "mlx-vlm", sys.executable, PeerTask(tmp_path))

    return make


def test_a_peer_is_asked_line_by_line(program):
    arm = program("""
        facts = {"version": "1.0", "mlx": "2.0", "nbytes_by_dtype": {"uint32": 9, "float32": 5, "bfloat16": 1}}
        said = {"tokens": asked.get("ids"), "deliveries": [[0.5, 1], [1.0, 2]], "took_s": 1.5, "rounds": 2, "peak_bytes": 7}
        out.write(json.dumps(said if number else facts) + chr(10)); out.flush()
    """)
    try:
        assert (arm.about, arm.dtype) == ("mlx-vlm 1.0, mlx 2.0", "float32")
        assert arm.run((4, 5, 6), 3) == Run((4, 5, 6), ((0.5, 1), (1.0, 2)), 1.5, 2, 7)
    finally:
        arm.close()
    assert arm._process.returncode is not None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('out.write(json.dumps({"error": "ValueError: no such family"}) + chr(10)); out.flush()', "no such family"),
        ("raise SystemExit(3)", "ended with code 3: and on standard error"),
        ("raise RuntimeError('a bolt')", "ended with code 1: RuntimeError: a bolt"),
    ],
)
def test_what_a_peer_cannot_do_is_one_sentence(program, body, said):
    with pytest.raises(PeerError, match=said) as caught:
        program(body)
    assert "\n" not in str(caught.value)


def test_peers_and_their_pythons():
    assert pythons({})["mlx-vlm"] == sys.executable
    assert pythons({"mlx-dspark": sys.executable}) == {"mlx-vlm": sys.executable, "mlx-dspark": sys.executable}
    with pytest.raises(InputError, match="there is no peer 'vllm'"):
        pythons({"vllm": sys.executable})
    with pytest.raises(InputError, match="is no program"):
        pythons({"mlx-vlm": "/no/such/python"})


def test_a_peer_opens_the_same_blas_and_nothing_of_our_python(monkeypatch, tmp_path):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    assert blas_files(Blas("bundled", None, False, "")) == []
    assert blas_files(Blas("openblas", "libopenblas.so.0", True, "")) == ["libopenblas.so.0"]
    (tmp_path / "blas").mkdir()
    for name in ("libgfortran.so.5", "libopenblas.so.0"):
        (tmp_path / "blas" / name).write_text("")
    found = blas_files(Blas("openblas", str(tmp_path / "blas" / "libopenblas.so.0"), True, ""))
    assert found == [str(tmp_path / "blas" / name) for name in ("libgfortran.so.5", "libopenblas.so.0")]
    (tmp_path / "blis").mkdir()
    for name in ("libgomp.so.1", "libblis.so.4"):
        (tmp_path / "blis" / name).write_text("")
    found = blas_files(Blas("blis", str(tmp_path / "blis" / "libblis.so.4"), True, ""))
    assert found == [str(tmp_path / "blis" / name) for name in ("libgomp.so.1", "libblis.so.4")]
    assert environment({"PYTHONPATH": "x", "HOME": "y"}, []) == {"HOME": "y"}


def test_a_peer_runs_with_mlx_as_it_comes(monkeypatch):
    """What dspark sets for itself on CUDA is not handed on; what the user set is."""
    monkeypatch.setattr(cuda_switches, "_ours", [])
    attention, check = cuda_switches.SWITCHES
    own, users = {"HOME": "y"}, {attention: "1"}
    cuda_switches.set_switches(users)
    assert environment(users, []) == {attention: "1"}
    cuda_switches.set_switches(own)
    assert (own[attention], own[check]) == ("0", "0")
    assert environment(own, []) == {"HOME": "y"}


def test_the_worker_needs_nothing_but_the_standard_library():
    import ast

    tree = ast.parse(peers_module.WORKER.read_text())
    names = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {str(n.module).split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert names <= set(sys.stdlib_module_names)


def test_mlx_vlm_says_the_same_on_the_written_out_folder(tiny, tmp_path):
    """The real peer that is at hand, in a process of its own."""
    target = export_target(tiny, tmp_path / "target")
    arm = PeerArm("mlx-vlm", "mlx-vlm", sys.executable, PeerTask(target))
    try:
        assert arm.dtype == held_dtype(tiny) == "float32"
        ids = tiny.encode("to be, to be, to be")
        ours, theirs = SessionArm("dspark", "", tiny).run(ids, 24), arm.run(ids, 24)
        assert theirs.tokens == ours.tokens
        assert sum(count for _, count in theirs.deliveries) == 24
    finally:
        arm.close()


# ---- the same weights ---------------------------------------------------------------------------------------------------


def test_a_target_that_is_written_out_is_the_same_target(tiny, tmp_path):
    target = export_target(tiny, tmp_path / "target")
    again = load_model(str(target))
    ids = mx.array([tiny.encode("a rose is a rose")])
    ours, _ = tiny.target(ids, tiny.target.make_caches())
    theirs, _ = Target(again.model)(ids, Target(again.model).make_caches())
    assert mx.array_equal(ours, theirs)
    assert again.tokenizer.encode("a rose") == tiny.tokenizer.encode("a rose")
    assert set(again.generation_defaults["eos_token_ids"]) == tiny.stop_tokens
    config = json.loads((target / "config.json").read_text())
    assert config["torch_dtype"] == "float32"
    assert "quantization" not in config


def test_a_full_disk_is_said_before_anything_is_written(tiny, tmp_path, monkeypatch):
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("dspark.bench.folders.shutil.disk_usage", lambda folder: usage(10, 9, 1))
    with pytest.raises(InputError, match="0 MB free, and the target takes"):
        export_target(tiny, tmp_path / "target")
    assert not list((tmp_path / "target").iterdir())


def test_a_drafters_folder_is_cast_and_stays_in_its_layout(tiny, tmp_path):
    random_drafter(tmp_path / "own", "vanilla", tiny.target, target_layer_ids=(0,))
    stored = mx.load(str(tmp_path / "own" / "model.safetensors"))
    mx.save_safetensors(
        str(tmp_path / "own" / "model.safetensors"), {k: a.astype(mx.bfloat16) for k, a in stored.items()}
    )
    export_drafter(resolve(str(tmp_path / "own")), tmp_path / "cast", "float32")
    cast = mx.load(str(tmp_path / "cast" / "model.safetensors"))
    assert cast.keys() == stored.keys()
    assert {str(a.dtype) for a in cast.values()} == {"mlx.core.float32"}
    own, its = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("own", "cast"))
    assert its == own | {"torch_dtype": "float32"}


@pytest.mark.parametrize(
    ("draft", "mode", "lookup"),
    [
        ("kind = 'none'", "baseline", False),
        ("kind = 'lookup'", "lookup", True),
        ("kind = 'dspark'\ndrafter = 'a/b'", "dspark", False),
        ("kind = 'dflash2'\ndrafter = 'a/b'", "dflash", False),
        ("kind = 'hybrid'\nbranches = [{kind = 'lookup'}, {kind = 'dspark', drafter = 'a/b'}]", "dspark", True),
    ],
)
def test_a_recipes_drafting_in_other_programs_words(draft, mode, lookup):
    found = drafting_of(loads(f"schema = 1\n[draft]\n{draft}").draft)
    assert (found.mode, found.lookup) == (mode, lookup)
    assert (found.drafter is not None) == (mode in ("dspark", "dflash"))


# ---- prompts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_shipped_prompts(name):
    found = read_set(name)
    assert 5 <= len(found.prompts) <= 8
    assert len(set(found.prompts)) == len(found.prompts)
    assert found.about.endswith(".")
    words = [len(prompt.split()) for prompt in found.prompts]
    assert min(words) > (1000 if name == "long" else 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("prompts = [", "not valid TOML"),
        ("prompts = []", "at least one"),
        ("prompts = ['a', '']", "none of them empty"),
        ("promts = ['a']", "unknown key 'promts'"),
        ("prompts = ['a']\ndocument = 3", "must be strings"),
    ],
)
def test_a_prompt_file_that_is_none(tmp_path, text, said):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_set(str(path))


def test_an_unknown_set_brings_a_suggestion():
    with pytest.raises(InputError, match="did you mean 'chat'"):
        read_set("chatt")


# ---- the command --------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(capfd, tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text("prompts = ['to be, to be, to be', 'a rose is a rose']")
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))

    def call(*args):
        code = main(["bench", *args, "--prompts", str(tmp_path / "mine.toml"), "--quiet"])
        return code, *capfd.readouterr()

    return call


def test_the_command_prints_and_writes_a_report(bench, folder, tmp_path):
    out = tmp_path / "out.json"
    args = ("--target", str(folder), "--repeats", "4", "--max-tokens", "12", "--json", str(out))
    code, text, err = bench("lookup", *args)
    assert (code, err) == (0, "")
    for line in ("machine ", "target ", "drafter  lookup", "mine: 2 prompts", "text: mlx-lm said what plain said"):
        assert line in text
    table = json.loads(out.read_text())
    assert {"machine", "versions", "at", "command", "runs", "speed_ups", "load"} <= table.keys()
    assert len(table["runs"]) == 3 * 2 * 4
    assert {r["arm"] for r in table["runs"]} == {"dspark", "plain", "mlx-lm"}


def test_a_recipe_that_says_something_else_fails(bench, folder, monkeypatch):
    honest = SessionArm.run

    def spoil(self, ids, max_tokens):
        run = honest(self, ids, max_tokens)
        return run._replace(tokens=(1, *run.tokens[1:])) if self.name == "dspark" else run

    monkeypatch.setattr(SessionArm, "run", spoil)
    code, text, err = bench(
        "lookup", "--target", str(folder), "--against", "plain", "--repeats", "1", "--max-tokens", "3"
    )
    assert code == 1
    assert "dspark differs from plain in 2 of 2 prompts" in text
    assert_one_sentence(err)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--against", "plain,mlxlm"), "--against: unknown 'mlxlm'; allowed: plain, mlx-lm"),
        (("--against", "mlx-dspark"), "--against mlx-dspark needs --peer-python mlx-dspark=/path/to/python"),
        (("--peer-python", "mlx-dspark"), "--peer-python mlx-dspark: expected NAME=PATH"),
        (("--repeats", "0"), "--repeats is 0"),
        (("--max-tokens", "x"), "--max-tokens is 'x'"),
        (("--json", "/no/such/file"), "--json /no/such/file: cannot be written"),
    ],
)
def test_mistakes_are_one_sentence(bench, monkeypatch, args, said):
    monkeypatch.setattr(dspark.assemble, "assemble", None)
    code, text, err = bench("lookup", *args)
    assert_one_sentence(err)
    assert said in err
    assert (code, text) == (2, "")


def test_a_prompt_that_leaves_no_room_is_named(bench, folder):
    code, _, err = bench("lookup", "--target", str(folder), "--max-tokens", "500")
    assert code == 2
    assert (
        "prompt 1 of mine: its 27 tokens leave room for 485 of the context of 512; take --max-tokens 485 or less" in err
    )
