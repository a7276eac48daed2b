"""The command line: what goes where, how it ends, and one sentence for every mistake."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import dspark
import dspark.assemble
import dspark.cli.calibrated
from dspark.cli import main
from dspark.cli.options import RunOptions
from dspark.cli.overrides import load_recipe, overrides
from dspark.errors import BindError, SourceError
from dspark.shipped import shipped
from dspark.telemetry.sinks import read_events
from tests.cli_fake import fake_assemble, uncalibrated

ANSWER = "The sea, the sea, the sea."
ROOT = Path(__file__).parent.parent


@pytest.fixture
def fake(monkeypatch):
    """Every target answers ANSWER; gives the list of recipes that were bound."""
    seen = []
    monkeypatch.setattr(dspark.assemble, "assemble", fake_assemble(ANSWER, seen=seen))
    monkeypatch.setattr(dspark.cli.calibrated, "calibrated", uncalibrated)
    return seen


@pytest.fixture
def run(fake, capfd, monkeypatch):
    """Run a command line in this process: its exit code, standard output and standard error."""

    def call(*args, stdin=b""):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin), isatty=lambda: False))
        code = main(list(args))
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return call


def command(answer, delay_s, *args):
    return [sys.executable, "-m", "tests.cli_fake", answer, str(delay_s), *args]


def assert_one_sentence(err):
    """A mistake is told in one line, and Python is not mentioned."""
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("dspark: ")
    assert not re.search(r"Traceback|File \"|Error\b.*Error\b|line \d+, in ", err), err


# ---- what goes where --------------------------------------------------------------------------------------------------


def test_text_goes_to_standard_output_and_nothing_else_does(run):
    done = run("run", "lookup", "hi")
    assert (done.code, done.out) == (0, ANSWER + "\n")
    assert "accepted length" in done.err
    assert "\x1b" not in done.out + done.err


def test_quiet_says_nothing_else(run):
    done = run("run", "lookup", "hi", "--quiet")
    assert (done.out, done.err) == (ANSWER + "\n", "")


@pytest.mark.parametrize("args", [("-",), ()])
def test_the_prompt_comes_from_a_pipe(run, args):
    assert run("run", "lookup", *args, stdin=b"hi\n").out == ANSWER + "\n"


def test_the_prompt_comes_from_a_file(run, tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfhi\r\n")
    assert run("run", "lookup", "--file", str(tmp_path / "prompt.txt")).out == ANSWER + "\n"


def test_json_is_one_object_with_every_figure(run, tmp_path):
    events = tmp_path / "events.jsonl"
    done = run("run", "lookup", "hi", "--json", "--seed", "7", "--events", str(events), "--cap", "5")
    found = json.loads(done.out)
    assert done.out.count("\n") == 1
    assert (found["text"], found["finish"], found["prompt_tokens"]) == (ANSWER, "stop", 2)
    assert (found["seed"], found["cap"], found["drafter"]) == (7, 5, "lookup")
    assert found["generated_tokens"] == len(found["tokens"]) == len(ANSWER) + 1
    assert {"machine", "versions", "recipe", "target", "changes", "tokens_per_s", "by_position"} <= found.keys()
    told = list(read_events(events))
    assert [e.round for e in told] == list(range(1, found["rounds"] + 1))
    assert "".join(e.rows[0].text for e in told) == ANSWER
    assert sum(e.rows[0].accepted for e in told) == found["accepted_tokens"] > 0


def test_plain_drafts_nothing_and_says_the_same(run):
    found = json.loads(run("run", "lookup", "hi", "--plain", "--json").out)
    assert (found["text"], found["by_source"], found["offered_tokens"]) == (ANSWER, {"plain": len(ANSWER) + 1}, 0)


def test_an_answer_is_cut_by_max_tokens_and_stop(run):
    assert run("run", "lookup", "hi", "--max-tokens", "3").out == ANSWER[:3] + "\n"
    assert run("run", "lookup", "hi", "--max-tokens", "0").out == ""
    assert run("run", "lookup", "hi", "--stop", "zzz", "--stop", ", the").out == "The sea\n"


def test_control_characters_stay_in_a_pipe(run, monkeypatch):
    monkeypatch.setattr(dspark.assemble, "assemble", fake_assemble("a\x1b[2Jb"))
    assert run("run", "lookup", "hi").out == "a\x1b[2Jb\n"


# ---- options ----------------------------------------------------------------------------------------------------------


def test_options_become_keys_of_the_recipe(run, fake):
    args = (
        "--temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --cap 3 --system Be --no-thinking --reasoning-effort low"
    )
    more = ["--chat-template-kwargs", '{"a": [1]}', "--max-context", "99", "--target", "a/b", "--dtype", "float32"]
    assert run("run", "lookup", "hi", *args.split(), *more, "--set", "draft.min_ngram=4", "--seed", "9").code == 0
    (recipe,) = fake
    sampling = recipe.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
        0.5,
        0.9,
        40,
        0.1,
        9,
    )
    assert (recipe.cap.cap, recipe.draft.min_ngram) == (3, 4)
    assert (recipe.target.source, recipe.target.max_context, recipe.target.dtype) == ("a/b", 99, "float32")
    chat = recipe.chat
    assert (chat.system, chat.thinking, chat.reasoning_effort, chat.template) == ("Be", False, "low", {"a": [1]})
    assert {change.source for change in recipe.changes} >= {"--temperature", "--target", "--no-thinking", "--cap"}


def test_another_target_takes_nothing_of_the_recipes_own(run, fake):
    assert run("run", "smollm2-135m", "hi", "--target", "a/b", "--plain").code == 0
    assert (fake[0].target.source, fake[0].target.sha256) == ("a/b", None)


def test_another_drafter_goes_to_the_branch_that_loads_weights(tmp_path):
    file = tmp_path / "both.toml"
    file.write_text(
        'schema = 1\n[draft]\nkind = "hybrid"\n[[draft.branches]]\nkind = "lookup"\n'
        '[[draft.branches]]\nkind = "dspark"\ndrafter = "a/old"\nrevision = "main"\n'
    )
    recipe = load_recipe(RunOptions(recipe=str(file), drafter="b/new"))
    assert (recipe.draft.branches[1].drafter, recipe.draft.branches[1].revision) == ("b/new", None)


def test_options_that_are_not_given_change_nothing():
    assert overrides(RunOptions(recipe="lookup")) == []


def test_a_conversation_comes_from_a_file(run, tmp_path, monkeypatch):
    """The fake has no chat template, so the messages reach it and are refused there, by name."""
    file = tmp_path / "talk.json"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    done = run("run", "lookup", "--messages", str(file), "--quiet")
    assert done.code == 2
    assert "no chat template" in done.err


# ---- mistakes ---------------------------------------------------------------------------------------------------------

MISTAKES = {
    "empty prompt": (["hi"[:0]], b"", "the prompt is empty"),
    "blank prompt": ([" \n"], b"", "the prompt is empty"),
    "empty pipe": ([], b"", "the prompt is empty"),
    "prompt over the context": (["hi", "--max-context", "1"], b"", "too long: 2 tokens, and the context holds 1"),
    "temperature nan": (["hi", "--temperature", "nan"], b"", "--temperature: expected a number, got nan"),
    "temperature negative": (["hi", "--temperature", "-0.1"], b"", "--temperature: got -0.1"),
    "temperature a word": (["hi", "--temperature", "hot"], b"", "--temperature is 'hot'; it must be a number"),
    "top_p 7": (["hi", "--top-p", "7"], b"", "--top-p: got 7"),
    "seed a word": (["hi", "--seed", "x"], b"", "seed is 'x'; it must be a whole number from 0 to 2^64 - 1"),
    "seed negative": (["hi", "--seed", "-1"], b"", "seed is '-1'"),
    "seed too large": (["hi", "--seed", str(2**64)], b"", f"seed is '{2**64}'"),
    "empty stop": (["hi", "--stop", ""], b"", "--stop is empty"),
    "max_tokens negative": (["hi", "--max-tokens", "-1"], b"", "--max-tokens is -1"),
    "pipe not UTF-8": ([], b"ok\n\xff", "standard input, line 2: not UTF-8 (byte 0xff)"),
    "argument not UTF-8": (["h\udcff"], b"", "the prompt is not UTF-8"),
    "no such file": (["--file", "/no/such"], b"", "/no/such: cannot be read (No such file or directory)"),
    "two prompts": (["hi", "--file", "x"], b"", "a prompt and --file were given"),
    "unwritable events": (["hi", "--events", "/no/such/e"], b"", "events file /no/such/e: cannot be written"),
    "set without a value": (["hi", "--set", "cap"], b"", "--set cap: expected KEY=VALUE"),
    "set of an unknown key": (["hi", "--set", "draft.min_ngra=5"], b"", "did you mean 'min_ngram'?"),
    "template no JSON": (["hi", "--chat-template-kwargs", "{"], b"", "--chat-template-kwargs: not valid JSON"),
    "template no object": (["hi", "--chat-template-kwargs", "[]"], b"", "expected a JSON object"),
    "unknown view": (["hi", "--live", "tabel"], b"", "did you mean 'table'?"),
    "drafter without weights": (["hi", "--drafter", "a/b"], b"", "loads no weights"),
    "unknown option": (["hi", "--temprature", "1"], b"", "no such option"),
    "negative cap": (["hi", "--cap", "-1"], b"", "--cap: got -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(run, name):
    args, stdin, said = MISTAKES[name]
    done = run("run", "lookup", *args, "--quiet", stdin=stdin)
    assert_one_sentence(done.err)
    assert said in done.err
    assert (done.code, done.out) == (2, "")


def test_a_traceback_is_no_sentence():
    with pytest.raises(AssertionError):
        assert_one_sentence('dspark: no\nTraceback (most recent call last):\n  File "x.py", line 1, in f\n')


@pytest.mark.parametrize(
    ("text", "said"),
    [("[1,", "not valid JSON"), ("[]", "expected a list of messages"), ("[" * 100_000, "nested too deeply")],
)
def test_messages_that_are_none(run, tmp_path, text, said):
    file = tmp_path / "talk.json"
    file.write_text(text)
    done = run("run", "lookup", "--messages", str(file))
    assert_one_sentence(done.err)
    assert said in done.err
    assert done.code == 2


def test_a_file_that_is_not_utf8(run, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"one\ntwo\xe9\n")
    done = run("run", "lookup", "--file", str(file))
    assert_one_sentence(done.err)
    assert "line 2: not UTF-8 (byte 0xe9)" in done.err


def test_every_fault_of_a_recipe_is_named_at_once(run, tmp_path):
    file = tmp_path / "broken.toml"
    file.write_text('schema = 1\ncap = -1\n[draft]\nkind = "lokup"\n[target]\nsorce = "x"\n[sampling]\ntop_p = 7.0\n')
    done = run("run", str(file), "hi", "--temperature", "-3")
    assert done.code == 2
    lines = done.err.strip().splitlines()
    assert len(lines) == 5
    assert {key for key in ("cap", "draft.kind", "target.sorce", "sampling.top_p") if f"{file}: {key}" in done.err} == {
        "cap", "draft.kind", "target.sorce", "sampling.top_p"
    }  # fmt: skip
    assert any(line.startswith("dspark: --temperature") for line in lines)


def test_an_unknown_recipe_brings_a_suggestion(run):
    done = run("run", "lokup", "hi")
    assert_one_sentence(done.err)
    assert "did you mean 'lookup'?" in done.err


@pytest.mark.parametrize(
    "error", [SourceError("a/b: the repository is gated; accept its terms"), BindError("layer 3 caches a Thing")]
)
def test_what_the_loader_refuses_is_passed_on(run, monkeypatch, error):
    def refuse(*args, **how):
        raise error

    monkeypatch.setattr(dspark.assemble, "assemble", refuse)
    done = run("run", "lookup", "hi", "--target", "a/b")
    assert (done.code, done.err) == (2, f"dspark: {error}\n")


def test_the_unexpected_is_one_sentence_too_and_says_how_to_see_more(run, monkeypatch):
    def break_down(*args, **how):
        raise RuntimeError("a bolt came loose\nand another")

    monkeypatch.setattr(dspark.assemble, "assemble", break_down)
    done = run("run", "lookup", "hi")
    assert (done.code, done.out) == (1, "")
    assert done.err == "dspark: unexpected RuntimeError: a bolt came loose; DSPARK_DEBUG=1 shows where\n"
    monkeypatch.setenv("DSPARK_DEBUG", "1")
    assert "Traceback" in run("run", "lookup", "hi").err


def test_a_full_disk_under_the_events_costs_no_text(run):
    done = run("run", "lookup", "hi", "--events", "/dev/full", "--quiet")
    assert (done.code, done.out) == (1, ANSWER + "\n")
    assert_one_sentence(done.err)
    assert "No space left on device; 0 rounds were written" in done.err


# ---- the process ------------------------------------------------------------------------------------------------------


def test_a_full_disk_under_standard_output():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command("hello", 0, "run", "lookup", "hi", "-q"), stdout=full, stderr=subprocess.PIPE, check=False, cwd=ROOT
        )
    assert done.returncode == 1
    assert_one_sentence(done.stderr.decode())
    assert "standard output: No space left on device" in done.stderr.decode()


def test_a_reader_that_goes_away_ends_it_quietly():
    child = subprocess.Popen(
        command("hello" * 40, 0.02, "run", "lookup", "hi", "-q"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert child.stdout is not None
    child.stdout.read(1)
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait(60) == 141


class Terminal:
    """A child on a terminal of its own, and everything that it writes there."""

    def __init__(self, *args, **env):
        self.written = b""
        self.child, self.fd = pty.fork()
        if self.child == 0:
            os.chdir(ROOT)
            os.environ.update({"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"} | env)
            os.execv(args[0], args)

    def until(self, text, limit_s=60):
        """Read until `text` has come."""
        end = time.monotonic() + limit_s
        while text not in self.written:
            assert time.monotonic() < end, self.written[-2000:]
            self._read(0.2)

    def wait(self):
        """The exit code."""
        while self._read(60):
            pass
        code = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
        os.close(self.fd)
        return code

    def interrupt(self):
        os.kill(self.child, signal.SIGINT)

    def _read(self, wait_s):
        try:
            if select.select([self.fd], [], [], wait_s)[0]:
                got = os.read(self.fd, 65536)
                self.written += got
                return bool(got)
        except OSError:
            return False
        return True


def test_on_a_terminal_the_view_is_drawn_and_the_text_stays():
    child = Terminal(*command(r"one\x1b[2J\ntwo\x07 three", 0.05, "run", "lookup", "hi"))
    assert child.wait() == 0
    written = child.written.decode()
    assert "accepted length" in written
    assert "╭─" in written
    assert "\x1b[2J" not in written, "the answer's own escape sequence reached the terminal"
    assert written.endswith("\x1b[0m\r\n")
    last = written[written.rindex("\x1b[?25h") :]
    assert "two␇ three\r\n" in last
    assert "one␛[2J" in written


def test_the_first_interrupt_keeps_the_text_so_far():
    child = Terminal(*command("0123456789" * 20, 0.1, "run", "lookup", "hi", "--live", "off"), NO_COLOR="1")
    child.until(b"0123")
    child.interrupt()
    assert child.wait() == 130
    written = child.written.decode()
    assert "cancelled" in written
    shown = re.search(r"(0123\d*)\r\n", written)
    assert shown is not None
    assert f"{len(shown[1])} tokens" in written
    assert "\x1b" not in written
    assert "Traceback" not in written


def test_the_second_interrupt_leaves_at_once():
    """The forward under way would take ten minutes."""
    child = Terminal(*command("hello", 600, "run", "lookup", "hi", "--live", "line"))
    child.until(b"reading the prompt")
    child.interrupt()
    time.sleep(0.3)
    child.interrupt()
    assert child.wait() == 130
    assert child.written.decode().endswith("\x1b[?25h")


def test_help_loads_nothing_heavy():
    code = (
        "import sys, contextlib, io\nfrom dspark.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out: assert main(['run', '--help']) == 0\n"
        "assert '--chat-template-kwargs' in out.getvalue()\n"
        "print([m for m in ('mlx', 'mlx_lm', 'transformers', 'rich', 'cattrs') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_python_m_dspark_and_shell_completion():
    done = subprocess.run(
        [sys.executable, "-m", "dspark", "--version"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == f"dspark {dspark.__version__}\n"
    env = os.environ | {"_DSPARK_COMPLETE": "complete_bash", "COMP_WORDS": "dspark run smol", "COMP_CWORD": "2"}
    code = "import sys; from dspark.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.split() == ["smollm2-135m"]


# ---- the other commands -----------------------------------------------------------------------------------------------


def test_no_command_shows_the_help(run):
    done = run()
    assert done.code == 0
    assert "doctor" in done.out


def test_an_unknown_command_brings_a_suggestion(run):
    done = run("rum")
    assert_one_sentence(done.err)
    assert "'run'" in done.err
    assert done.code == 2


def test_explain_needs_no_target(run, fake):
    done = run("explain", "lookup", "--set", "cap=3", "--set", "sampling.temperature=0.5")
    assert done.code == 0
    assert fake == []
    labels = {line.split("  ")[0]: line for line in done.out.splitlines()}
    assert {"recipe", "changed", "target", "draft", "cap", "accept", "rollback", "reads", "lossless"} <= labels.keys()
    assert "3 (pinned)" in labels["cap"]
    assert "sample-match temperature 0.5" in labels["accept"]
    assert "left open" in labels["target"]


def test_explain_says_how_a_target_rolls_back(run, fake):
    done = run("explain", "lookup", "--proof")
    assert done.code == 0
    assert len(fake) == 1
    assert re.search(r"rollback +kv-trim \(1 of 1\)", done.out)


def test_recipes_says_what_each_needs(run, tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    done = run("recipes")
    assert done.code == 0
    for name, _ in shipped():
        assert re.search(rf"^{name}$", done.out, re.MULTILINE)
    assert "not on this disk" in done.out


def test_doctor_is_content_with_this_machine(run):
    done = run("doctor")
    *checks, blank, verdict = done.out.splitlines()
    assert (done.code, blank) == (0, "")
    assert all(re.match(r"(ok|warn) +\w+ +\S", line) for line in checks)
    assert {"python", "device", "BLAS", "memory", "cache"} <= {line.split()[1] for line in checks}
    assert verdict.startswith("a run will work")


def test_doctor_fails_when_a_check_does(run, monkeypatch):
    from dspark.cli import doctor

    monkeypatch.setattr(doctor, "NEEDED", ("mlx", "no-such-package-here"))
    done = run("doctor")
    assert done.code == 1
    assert re.search(r"^fail +packages +missing: no-such-package-here; pip install", done.out, re.MULTILINE)


# ---- a real model -----------------------------------------------------------------------------------------------------


def tiny_model(folder):
    """A llama of two layers and one token a byte, with a chat template, as mlx_lm and the hub write models."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.models.llama import Model, ModelArgs

    from tests.fakes import byte_tokenizer

    config = {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": 257,
        "max_position_embeddings": 512, "tie_word_embeddings": True, "eos_token_id": 256,
    }  # fmt: skip
    mx.random.seed(1)
    model = Model(ModelArgs.from_dict(config))
    weights = tree_map(lambda p: 4 * mx.random.normal(p.shape) / p.shape[-1] ** 0.5, model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(weights)))
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = byte_tokenizer()._tokenizer
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)


def test_a_model_folder_answers_the_same_with_and_without_drafts(monkeypatch, capfd, tmp_path):
    tiny_model(tmp_path)
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    found = []
    for more in ([], ["--plain"]):
        args = ["run", "lookup", "to be, to be, to be", "--target", str(tmp_path), "--max-tokens", "60", "--json", "-q"]
        assert main([*args, "--system", "S", *more]) == 0, capfd.readouterr().err
        found.append(json.loads(capfd.readouterr().out))
    drafted, plain = found
    assert drafted["tokens"] == plain["tokens"]
    assert len(set(drafted["tokens"])) > 5
    assert drafted["prompt_tokens"] == len("[system] S\n[user] to be, to be, to be\n")
    assert plain["by_source"].keys() == {"plain"}
