"""`dspark run --batch`: many prompts in, a line of JSON an answer out, and one sentence for a faulty line."""

import io
import json
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

import dspark.assemble
import dspark.cli.calibrated
from dspark.cli import batch as module
from dspark.cli import main
from dspark.cli.batch import Writer
from dspark.cli.batch_file import Line
from dspark.cli.batch_progress import BatchProgress
from dspark.cli.screen import Answer
from dspark.records import Commit, RowCommit
from dspark.rows import Result
from dspark.telemetry.sinks import read_events
from tests.cli_fake import fake_assemble, uncalibrated
from tests.test_cli import ROOT, Terminal, assert_one_sentence, command, tiny_model

ANSWER = "The sea, the sea, the sea."


@pytest.fixture
def run(capfd, monkeypatch):
    """Run a command line on a target that says ANSWER to `hi`."""
    monkeypatch.setattr(dspark.assemble, "assemble", fake_assemble(ANSWER))
    monkeypatch.setattr(dspark.cli.calibrated, "calibrated", uncalibrated)

    def call(*args, stdin=b""):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin), isatty=lambda: False))
        code = main(["run", "lookup", *args])
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return call


@pytest.fixture
def file(tmp_path):
    def write(*lines, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        return str(path)

    return write


def answers(done):
    return [json.loads(line) for line in done.out.splitlines()]


def test_no_character_of_an_answer_ends_its_line(run, file, monkeypatch):
    monkeypatch.setattr(dspark.assemble, "assemble", fake_assemble("a\n\u2028\x85\x1cb"))
    (answer,) = answers(run("--file", file('"hi"\n'), "--batch", "1"))
    assert answer["text"] == "a\n\u2028\x85\x1cb"


# ---- in and out -------------------------------------------------------------------------------------------------------


def test_each_line_of_a_text_file_is_a_prompt(run, file):
    done = run("--file", file("hi\r\n", "\n", "hi\n", name="p.TXT"), "--batch", "2", "--max-tokens", "7")
    assert done.code == 0
    assert [(a["index"], a["line"], a["text"], a["finish"]) for a in answers(done)] == [
        (0, 1, ANSWER[:7], "length"),
        (1, 3, ANSWER[:7], "length"),
    ]
    assert "2 prompts: 2 length; 14 tokens" in done.err


def test_lines_of_json_have_options_of_their_own(run, file):
    path = file(
        {"prompt": "hi", "id": "first"},
        '"hi"\n',
        {"prompt": "hi", "max_tokens": 3, "id": 17},
        {"prompt": "hi", "stop": ", the", "max_tokens": None},
        {"prompt": "hi", "stop": [" the", "sea,"], "seed": 5},
        {"prompt": "hi", "max_tokens": 0},
    )
    done = run("--file", path, "--batch", "4", "--stop", "sea.", "--max-tokens", "100")
    assert done.code == 0
    found = answers(done)
    assert [a["text"] for a in found] == [ANSWER[:-4], ANSWER[:-4], ANSWER[:3], "The sea", "The ", ""]
    assert [a.get("id") for a in found] == ["first", None, 17, None, None, None]
    assert found[4]["seed"] == 5
    assert found[5]["finish"] == "length"
    assert all("error" not in a and "tokens" not in a for a in found)


def test_standard_input_holds_lines_of_json(run):
    for more in ((), ("--file", "-"), ("-",)):
        done = run(*more, "--batch", "1", "--max-tokens", "3", stdin=b'{"prompt": "hi"}\n"hi"')
        assert [a["text"] for a in answers(done)] == ["The", "The"]


def test_json_gives_every_figure_and_events_every_round(run, file, tmp_path):
    events = tmp_path / "events.jsonl"
    done = run("--file", file('"hi"\n', '"hi"\n'), "--batch", "2", "--json", "--quiet", "--events", str(events))
    assert done.err == ""
    for answer in answers(done):
        assert answer["generated_tokens"] == len(answer["tokens"]) == len(ANSWER) + 1
        assert {"by_position", "ttft_s", "accepted_tokens", "by_source"} <= answer.keys()
    told = [row for event in read_events(events) for row in event.rows]
    assert "".join(row.text for row in told if row.index == 1) == ANSWER


def test_a_seed_in_the_output_repeats_a_row_alone(run, file):
    args = ("--temperature", "1.2", "--batch", "3")
    together = answers(run("--file", file(*['"hi"\n'] * 3), *args, "--seed", "3"))
    assert together[0]["seed"] == 3
    assert len({a["seed"] for a in together}) == 3
    alone = answers(run("--file", file({"prompt": "hi", "seed": together[2]["seed"]}), *args))
    assert alone[0]["text"] == together[2]["text"]
    assert together[2]["text"] != ANSWER


def test_a_lines_own_temperature(run, file):
    path = file({"prompt": "hi"}, {"prompt": "hi", "temperature": 1.2, "seed": 4}, {"prompt": "hi", "temperature": 0})
    found = answers(run("--file", path, "--batch", "3"))
    assert found[0]["text"] == found[2]["text"] == ANSWER
    assert found[1]["text"] != ANSWER


def test_rows_that_cannot_share_a_forward_are_said_to_go_one_after_another(run, file):
    """The fake target counts one position for all rows, so that it is refused as a batch."""
    err = run("--file", file('"hi"\n', '"hi"\n'), "--batch", "2").err
    assert err.count("note: the rows go one after another") == 1


def test_a_model_folder_answers_in_a_batch_as_alone(monkeypatch, capfd, tmp_path):
    tiny_model(tmp_path)
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    asked = [
        {"prompt": "to be, to be, to be", "max_tokens": 30},
        {"messages": [{"role": "user", "content": "a rose is a rose is"}], "max_tokens": 12},
        {"prompt": "x", "temperature": 0.8, "seed": 11, "max_tokens": 20},
        {"prompt": "one, two, one, two, one", "max_tokens": 5},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, asked)))
    shared = ["run", "lookup", "--target", str(tmp_path), "--json", "-q"]
    assert main([*shared, "--file", str(tmp_path / "p.jsonl"), "--batch", "3"]) == 0, capfd.readouterr().err
    together = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    for line, answer in zip(asked, together, strict=True):
        prompt = line.get("prompt") or line["messages"][0]["content"]
        more = ["--seed", str(line["seed"]), "--temperature", str(line["temperature"])] if "seed" in line else []
        assert main([*shared, prompt, "--max-tokens", str(line["max_tokens"]), *more]) == 0
        assert json.loads(capfd.readouterr().out)["tokens"] == answer["tokens"]
    assert len({tuple(a["tokens"]) for a in together}) == 4


# ---- mistakes ---------------------------------------------------------------------------------------------------------

GOOD = '{"prompt": "hi"}\n'
FAULTS = {
    "no JSON": ('{"prompt": "hi"', "line 2: not valid JSON (", ),
    "a number": ("7", "line 2: expected an object such as"),
    "no prompt": ('{"id": 1}', "line 2: neither prompt nor messages; give one of them"),
    "two prompts": ('{"prompt": "a", "messages": [{}]}', "line 2: both prompt and messages; give one of them"),
    "unknown key": ('{"promt": "a"}', "line 2: unknown key 'promt'; allowed: prompt, messages, id"),
    "a near miss": ('{"prompt": "a", "max_token": 1}', "did you mean 'max_tokens'?"),
    "prompt a list": ('{"prompt": ["a"]}', "line 2: prompt is ['a']; it must be a string"),
    "prompt empty": ('{"prompt": " "}', "line 2: prompt is empty"),
    "half a pair": ('{"prompt": "\\ud800"}', "line 2: prompt holds half of a surrogate pair"),
    "messages empty": ('{"messages": []}', "line 2: messages: expected a list such as"),
    "messages of text": ('{"messages": ["a"]}', "line 2: messages[0]: expected a table with role and content"),
    "messages, no template": (
        '{"messages": [{"role": "user", "content": "a"}]}',
        "line 2: this model has no chat template",
    ),
    "max_tokens negative": ('{"prompt": "a", "max_tokens": -1}', "line 2: max_tokens is -1"),
    "max_tokens true": ('{"prompt": "a", "max_tokens": true}', "line 2: max_tokens is True"),
    "seed too large": ('{"prompt": "a", "seed": 18446744073709551616}', "line 2: seed is 18446744073709551616"),
    "temperature a word": ('{"prompt": "a", "temperature": "hot"}', "line 2: temperature is 'hot'"),
    "temperature nan": ('{"prompt": "a", "temperature": NaN}', "line 2: temperature is nan"),
    "temperature negative": ('{"prompt": "a", "temperature": -1}', "line 2: temperature is -1"),
    "stop empty": ('{"prompt": "a", "stop": ["x", ""]}', "line 2: stop is ['x', '']"),
    "id an object": ('{"prompt": "a", "id": {}}', "line 2: id is {}; it must be a string or a number"),
    "over the context": ('{"prompt": "aaaaaaaaa"}', "line 2: the prompt is too long: 9 tokens, and the context holds 8"),
    "nested": ("[" * 100_000, "line 2: nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_line_is_one_sentence_and_nothing_is_generated(run, file, name):
    text, said = FAULTS[name]
    path = file(GOOD, text + "\n", GOOD)
    done = run("--file", path, "--batch", "2", "--max-context", "8", "--quiet")
    assert_one_sentence(done.err)
    assert f"{path}, {said}" in done.err or ("line 2" in done.err and said in done.err)
    assert (done.code, done.out) == (2, "")


def test_the_file_without_its_fault_is_answered(run, file):
    """Negative control."""
    assert len(answers(run("--file", file(GOOD, GOOD), "--batch", "2", "--max-context", "8"))) == 2


def test_further_faulty_lines_are_counted(run, file):
    done = run("--file", file(GOOD, "x\n", "y\n", "z\n"), "--batch", "2")
    assert_one_sentence(done.err)
    assert "line 2: not valid JSON" in done.err
    assert "(and 2 more faulty lines)" in done.err


@pytest.mark.parametrize(
    ("args", "stdin", "said"),
    [
        (("hi",), b"", "--batch and a prompt were given"),
        (("--messages", "x"), b"", "--batch and --messages were given"),
        (("--file", "/no/such.txt"), b"", "/no/such.txt: cannot be read"),
        ((), b"", "standard input: holds no prompt"),
        ((), b"\xff", "standard input, line 1: not UTF-8"),
        (("--live", "table"), b'"hi"', "--live table shows one answer"),
    ],
)
def test_mistakes_about_the_whole(run, args, stdin, said):
    done = run(*args, "--batch", "2", stdin=stdin)
    assert_one_sentence(done.err)
    assert said in done.err
    assert (done.code, done.out) == (2, "")


def test_a_batch_is_of_at_least_one(run):
    done = run("hi", "--batch", "0")
    assert (done.code, done.err) == (2, "dspark: --batch is 0; it must be a whole number of at least 1\n")


# ---- order, ends, interrupts -----------------------------------------------------------------------------------------


def result(text, finish):
    return Result(tuple(text.encode()), text, finish, 1, 0, len(text), 0, 0, (), {}, 0.0, 0.0, 0.0)


class Rows:
    """A session whose rows stand as they are set."""

    def __init__(self, *results):
        self.results = list(results)

    def result_of(self, index):
        return self.results[index]


def writer(n):
    return Writer(Answer(), [Line(i + 1, "hi") for i in range(n)], list(range(n)), False)


def written(capfd):
    return [(a["index"], a["text"]) for a in map(json.loads, capfd.readouterr().out.splitlines())]


def test_an_answer_is_written_when_those_before_it_are_done(capfd):
    rows, out = Rows(result("a", None), result("b", "stop"), result("", None)), writer(3)
    out.advance(rows)
    assert written(capfd) == []
    rows.results[0] = result("aa", "length")
    out.advance(rows)
    assert written(capfd) == [(0, "aa"), (1, "b")]
    out.advance(rows)
    assert written(capfd) == []


def test_a_writer_that_does_not_wait_is_caught(capfd, monkeypatch):
    monkeypatch.setattr(module, "ENDED", (None, "stop"))
    writer(3).advance(Rows(result("a", None), result("b", "stop"), result("", None)))
    assert written(capfd) != []


def test_what_is_done_behind_a_slow_one_is_kept_at_the_end(capfd):
    rows = Rows(result("a", None), result("b", "stop"), result("c", "cancelled"), result("", "cancelled"))
    out = writer(4)
    out.rest(rows)
    assert written(capfd) == [(1, "b"), (2, "c")]
    out.rest(rows)
    assert written(capfd) == []


def test_an_interrupt_keeps_what_is_done(tmp_path):
    path = tmp_path / "p.jsonl"
    short = '{"prompt": "hi", "max_tokens": 4}\n'
    path.write_text(short + '"hi"\n' + short + '"hi"\n')
    child = subprocess.Popen(
        command("0123456789" * 20, 0.05, "run", "lookup", "--file", str(path), "--batch", "2", "--max-tokens", "200"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert child.stdout is not None
    first = child.stdout.readline()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    found = [json.loads(line) for line in (first + out).splitlines()]
    assert child.returncode == 130
    assert (found[0]["text"], found[0]["finish"]) == ("0123", "length")
    assert (found[1]["index"], found[1]["finish"]) == (1, "cancelled")
    assert 0 < len(found[1]["text"]) < 200
    assert [a["index"] for a in found] == sorted(a["index"] for a in found)
    assert 3 not in {a["index"] for a in found}, "a prompt that was not begun has no answer"
    assert f"interrupted; {len(found)} of 4 answers were written" in err.decode()
    assert "Traceback" not in err.decode()


def test_a_row_that_fails_is_a_line_and_exit_code_1(run, file, monkeypatch):
    honest = module.Writer.advance

    def spoil(self, session):
        if 1 in session._ended:
            session._ended[1].error, session._ended[1].transcript.finish = "it broke", "error"
        honest(self, session)

    monkeypatch.setattr(module.Writer, "advance", spoil)
    done = run("--file", file('"hi"\n', '"hi"\n'), "--batch", "2", "--quiet")
    assert done.code == 1
    assert [(a["finish"], a.get("error")) for a in answers(done)] == [("stop", None), ("error", "it broke")]
    assert done.err == "dspark: 1 of 2 prompts ended by an error, which their lines say\n"


# ---- progress ---------------------------------------------------------------------------------------------------------


def test_progress_counts_prompts_and_tokens():
    progress = BatchProgress(3, shown=False)
    row = lambda i, tokens, finish=None: RowCommit(i, tokens, 0, 0, "plain", "", finish)
    progress.count(Commit((row(0, (1, 2)), row(1, (3,), "stop")), 1, 4))
    progress.count(Commit((row(0, (4,)),), 2, 4))
    assert re.match(r"1 of 3 answered, 1 at once, 4 tokens, \d", progress.text())


def test_on_a_terminal_progress_never_stands_in_an_answer(tmp_path):
    (tmp_path / "p.txt").write_text("hi\n" * 3)
    args = ("run", "lookup", "--file", str(tmp_path / "p.txt"), "--batch", "1", "--max-tokens", "12")
    child = Terminal(*command("0123456789" * 2, 0.05, *args), NO_COLOR="1")
    assert child.wait() == 0
    text = child.written.decode()
    assert "answered, 1 at once" in text
    shown = [line.rsplit("\x1b[2K", 1)[-1].rstrip("\r") for line in text.split("\n")]
    found = [json.loads(line) for line in shown if line.startswith("{")]
    assert [a["text"] for a in found] == ["012345678901"] * 3
