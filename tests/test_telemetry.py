"""Telemetry: what sinks keep, what a tally adds up to, and that text and view never garble one another."""

import io
import json
import re
import threading

import pytest

from dspark.engine import bind
from dspark.errors import InputError
from dspark.pipeline import chain
from dspark.records import RoundEvent, RowCommit, Shadow, TokenLogprobs
from dspark.rows import Result
from dspark.stages.accept import Greedy
from dspark.stages.prefill import Prefill
from dspark.stages.rollback import KvTrim
from dspark.stages.verify import Verify
from dspark.telemetry import live, terminal
from dspark.telemetry.live import Board, LiveView, svg, to_rows
from dspark.telemetry.panel import Facts, Phase, line, panel
from dspark.telemetry.sinks import Collect, JsonLines, from_dict, read_events, tee, to_dict
from dspark.telemetry.summary import as_dict, summary
from dspark.telemetry.tally import WINDOW_MS, Tally
from tests.fakes import HashTarget, ScriptedDraft, plain

PROMPT = (5, 6, 7)


def event(number, accepted=2, offered=4, source="lookup", text="", ms=100.0, **more):
    row = RowCommit(0, tuple(range(accepted + 1)), accepted, offered, source, text)
    return RoundEvent(number, (row,), 4, "pinned", offered + 1, 1, ms, (50 + number,), memory_bytes=5_000_000, **more)


@pytest.fixture
def decoded():
    """Events and result of a session whose drafts are half right."""
    target, sink = HashTarget(), Collect()
    truth = PROMPT + tuple(plain(target, PROMPT, 80))
    pipe = chain(Prefill(), ScriptedDraft((truth,), 0.7), Verify(), Greedy(), KvTrim(), cap=4)
    with bind(pipe, target).open(PROMPT, max_tokens=60, sinks=(sink,)) as session:
        for _ in session:
            pass
    return sink.events, session.result


# ---- sinks and tallies ------------------------------------------------------------------------------------------------


def test_a_tally_agrees_with_the_session(decoded):
    events, result = decoded
    tally = Tally()
    for one in events:
        tally.add(one)
    assert (tally.tokens, tally.rounds, tally.offered, tally.accepted) == (
        result.generated_tokens, result.rounds, result.offered_tokens, result.accepted_tokens
    )  # fmt: skip
    assert tuple(map(tuple, tally.positions)) == result.by_position
    assert dict(tally.sources) == dict(result.by_source)
    assert (tally.accepted_length, tally.acceptance_rate) == (result.accepted_length, result.acceptance_rate)
    assert 0 < tally.acceptance_rate < 1
    assert tally.rates()[0] > tally.rates()[-1]


def test_a_tally_that_misses_a_round_is_noticed(decoded):
    events, result = decoded
    tally = Tally()
    for one in events[1:]:
        tally.add(one)
    assert tuple(map(tuple, tally.positions)) != result.by_position


def test_speed_now_is_that_of_the_last_seconds():
    tally = Tally()
    for i in range(100):
        tally.add(event(i, ms=WINDOW_MS / 10))
    assert tally.tokens_per_s_now == pytest.approx(tally.tokens_per_s) == pytest.approx(3e4 / WINDOW_MS)
    for i in range(20):
        tally.add(event(i, ms=WINDOW_MS))
    assert tally.tokens_per_s_now == pytest.approx(3e3 / WINDOW_MS)
    assert tally.tokens_per_s > tally.tokens_per_s_now


def test_shares_of_rounds_sum_to_one_and_plain_comes_last():
    tally = Tally()
    for source, n in (("plain", 7), ("lookup", 1), ("dspark", 2)):
        for i in range(n):
            tally.add(event(i, source=source))
    assert tally.shares() == [("dspark", 0.2), ("lookup", 0.1), ("plain", 0.7)]


def test_predictions_are_averaged_over_the_rounds_that_had_one():
    tally = Tally()
    assert tally.predicted_ms is None
    tally.add(event(1))
    tally.add(event(2, predicted_ms=80.0))
    tally.add(event(3, predicted_ms=90.0))
    assert tally.predicted_ms == 85.0


def test_events_survive_a_file(decoded, tmp_path):
    events, _ = decoded
    logged = event(99, text="é\x1b\n", predicted_ms=1.5)
    row = logged.rows[0]._replace(logprobs=(TokenLogprobs(-0.5, ((3, -0.5), (4, -1.0))),))
    events = [*events, logged._replace(rows=(row,))]
    path = tmp_path / "events.jsonl"
    with JsonLines(path) as sink:
        for i, one in enumerate(events, 1):
            sink(one)
            assert path.read_text().count("\n") == i, "a line is there as soon as its round is over"
    assert list(read_events(path)) == events
    assert all(json.loads(text) for text in path.read_text().splitlines())


def test_a_file_that_holds_no_events_is_refused_by_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(to_dict(event(1))) + '\n{"round": 2}\n')
    with pytest.raises(InputError, match="line 2: no event"):
        list(read_events(path))
    path.write_text("{")
    with pytest.raises(InputError, match="line 1: no event"):
        list(read_events(path))
    with pytest.raises(InputError, match="cannot be read"):
        list(read_events(tmp_path / "none"))


def test_an_unwritable_file_is_refused_and_a_full_disk_is_remembered(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        JsonLines(tmp_path / "no" / "folder")
    with JsonLines("/dev/full") as sink:
        sink(event(1))
        sink(event(2))
    assert re.search(r"/dev/full: No space left on device; 0 rounds were written", sink.problem)


def test_tee_hands_on_in_order():
    seen = []
    tee(lambda e: seen.append(("a", e.round)), lambda e: seen.append(("b", e.round)))(event(3))
    assert seen == [("a", 3), ("b", 3)]


def test_an_event_is_plain_data():
    table = to_dict(event(1))
    assert "logprobs" not in table["rows"][0]
    assert from_dict(json.loads(json.dumps(table))) == event(1)


def test_the_summary_has_the_figures(decoded):
    _, result = decoded
    text = "\n".join(summary(result))
    assert f"{result.generated_tokens} tokens in" in text
    assert f"accepted length {result.accepted_length:.2f} over {result.rounds} rounds" in text
    assert f"({result.accepted_tokens} of {result.offered_tokens})" in text
    assert as_dict(result).keys() >= set(Result.__annotations__)


# ---- the view's drawing -----------------------------------------------------------------------------------------------


def shown(n=40, offered=4, **more):
    board = Board(Facts("some/target-4bit", "lookup, then dspark", 8192))
    for i in range(1, n + 1):
        board(event(i, accepted=min(2, offered), offered=offered, source="lookup" if i % 3 else "plain", **more))
    return board.shown()


@pytest.mark.parametrize("width", [30, 44, 60, 79, 80, 119, 200])
@pytest.mark.parametrize("offered", [0, 1, 4, 9, 17, 32, 64])
def test_the_table_stays_within_its_width_and_height(width, offered, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", row) for row in to_rows(panel(shown(offered=offered), width), max(width, 40))]
    assert len(rows) <= 16
    assert {len(row) for row in rows} == {max(40, min(width, 120))}


def test_the_table_says_what_it_should():
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(to_rows(panel(shown(predicted_ms=91.0), 80), 80)))
    words = "some/target-4bit|lookup, then dspark|4 (pinned)|90 of 8,192 (1 %)|5 MB|100 ms (predicted 91.0)"
    words += "|accepted length 3.00|acceptance rate 50 %|30.0, mean 30.0|68 %|32 %|120 tokens, 40 rounds"
    for word in words.split("|"):
        assert word in text, text
    assert re.search(r"% 100 100 0   0", text)


def test_the_table_says_what_shadows_would_have_brought():
    """Seven drafts beside plain steps, three of which those steps said: while it is parked, and not before any was judged."""

    def cap_of(*events):
        board = Board(Facts("some/target-4bit", "lookup, then dspark", 8192))
        for one in events:
            board(one)
        text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(to_rows(panel(board.shown(), 80), 80)))
        return re.search(r"cap +(\S.*?) *│?\n", text)[1]

    parked = event(1, accepted=0, offered=0, source="plain")._replace(cap=0, cap_reason="parked")
    judged = parked._replace(round=2, judged=(Shadow("dspark", 4, 3), Shadow("dspark", 3, 0)))
    assert cap_of(parked) == "0 (parked)"
    assert cap_of(parked, judged) == cap_of(parked, judged, parked._replace(round=3)) == "0 (parked; shadows 43 %)"
    assert cap_of(parked, judged, event(3)) == "4 (pinned)"


def test_bars_grow_with_the_rate():
    def bars(accepted):
        tally = Tally()
        for i in range(8):
            tally.add(event(i, accepted=int(i < accepted), offered=1))
        rows = to_rows(live.panel(shown()._replace(tally=tally), 80), 80)
        return sum(row.count("█") for row in rows[4:8])

    assert bars(0) < bars(4) < bars(8)


@pytest.mark.parametrize("phase", [Phase("load", "loading x"), Phase("prefill", "", 30, 120)])
def test_what_comes_before_the_first_token_is_shown(phase):
    before = shown(0)._replace(phase=phase)
    text = "\n".join(to_rows(panel(before, 80), 80)) + line(before, 80).plain
    assert ("loading x" if phase.name == "load" else "30 of 120 tokens") in text


def test_no_color_means_none(monkeypatch):
    def colours():
        return re.findall(r"\x1b\[[0-9;]*?(?:3[0-7]|9[0-7]|38)[0-9;]*m", "\n".join(to_rows(panel(shown(), 80), 80)))

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colours()
    monkeypatch.setenv("NO_COLOR", "1")
    assert colours() == []


def test_the_view_can_be_kept_as_a_picture():
    events = [event(i, text=f"word{i} ") for i in range(1, 9)]
    picture = svg(
        events, Facts("target", "lookup", 100), prompt_tokens=9, prefill_s=0.5, command="dspark run lookup hi"
    )
    assert picture.startswith("<svg")
    for words in ("accepted length", "word8", "dspark run lookup hi", "0.60 s (prefill 18/s)"):
        assert words.replace(" ", "&#160;") in picture, words


# ---- text and view on one screen --------------------------------------------------------------------------------------


class Glass:
    """A small terminal: enough of one to see what a person sees. Rows that scroll off the top are kept."""

    def __init__(self, columns=50, rows=24):
        self.columns, self.rows = columns, rows
        self.lines, self.top, self.x, self.y, self.wraps = [[]], 0, 0, 0, True

    def isatty(self):
        return True

    def fileno(self):
        raise OSError

    def flush(self): ...

    def write(self, text):
        for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[^\x1b]", text, re.DOTALL):
            self._control(part) if part[0] == "\x1b" else self._put(part)

    def _control(self, part):
        if part[-1] == "A":
            self.y -= int(part[2:-1] or 1)
            assert self.y >= self.top, "went up beyond the top of the screen"
        elif part[-1] == "J":
            self.lines[self.y] = self.lines[self.y][: self.x]
            del self.lines[self.y + 1 :]
        elif part[2:4] == "?7":
            self.wraps = part[-1] == "h"

    def _put(self, char):
        if char == "\n":
            self.x, self.y = 0, self.y + 1
        elif char == "\r":
            self.x = 0
        else:
            if self.x == self.columns and self.wraps:
                self.x, self.y = 0, self.y + 1
            self._grow()
            row = self.lines[self.y]
            row[self.x : self.x + 1] = [char]
            self.x = min(self.x + 1, self.columns if self.wraps else self.columns - 1)
        self._grow()

    def _grow(self):
        while len(self.lines) <= self.y:
            self.lines.append([])
        self.top = max(self.top, self.y - self.rows + 1)

    def text(self):
        return ["".join(row) for row in self.lines]


def wrapped(text, columns=50):
    """The rows that a terminal shows of a text alone."""
    glass = Glass(columns)
    glass.write(text)
    return glass.text()


@pytest.fixture
def glass(monkeypatch):
    made = Glass()
    for module in (live, terminal):
        monkeypatch.setattr(module, "size", lambda stream: (made.columns, made.rows))
    return made


TEXTS = {
    "short lines": "one\ntwo\n\nthree\n",
    "a line that wraps": "word " * 30 + "\nand then another one\n" + "x" * 120,
    "exactly the width": "a" * 50 + "\n" + "b" * 100,
    "wider than the screen is high": "wide " * 260 + "\nend",
    "many lines": "".join(f"line {i}\n" for i in range(60)),
    "nothing": "",
}


def view_of(glass, mode="table"):
    board = Board(Facts("target", "lookup", 100))
    view = LiveView(board, glass, mode, glass)
    view._drawn_at = -1e9
    return board, view


@pytest.mark.parametrize("mode", ["table", "line"])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("step", [5, 64])
def test_only_the_text_is_left(glass, name, mode, step):
    """Drawn after every piece, without a thread: what stands on the screen at the end is the text as it would be alone."""
    text = TEXTS[name]
    board, view = view_of(glass, mode)
    for i in range(0, len(text), step):
        view.text(text[i : i + step])
        board(event(i))
        view._drawn_at = -1e9
        view._draw()
        view_rows = [row for row in glass.text() if "╭" in row or " tokens/s" in row]
        assert len(view_rows) <= 2, "one view at a time"
    view.stop()
    assert [row for row in glass.text() if row] == [row for row in wrapped(text) if row]


def test_while_it_runs_the_line_under_way_stands_above_the_view(glass):
    board, view = view_of(glass)
    view.text("first\nsecond li")
    board(event(1))
    view._draw()
    rows = glass.text()
    assert rows[:2] == ["first", "second li"]
    assert rows[2].startswith("╭")


def test_a_view_that_does_not_erase_is_caught(glass, monkeypatch):
    monkeypatch.setattr(terminal.Region, "_back", lambda self: "\r\n")
    with pytest.raises(AssertionError):
        test_only_the_text_is_left(glass, "short lines", "table", 5)


def test_notes_stand_above_the_text(glass):
    _, view = view_of(glass)
    view.note("note: said once")
    view.text("hello")
    view._draw()
    view.stop()
    assert glass.text()[:2] == ["note: said once", "hello"]


def test_a_terminal_that_became_narrower_is_cleaned(glass):
    board, view = view_of(glass)
    glass.columns = 80
    view._draw()
    wide = [list(row) for row in glass.lines]
    glass.columns = 50
    # As a terminal does: rows that are too long now are wrapped.
    glass.lines = [row[i : i + 50] for row in wide for i in range(0, max(len(row), 1), 50)]
    glass.y = len(glass.lines) - -(-len(wide[-1]) // 50)
    view._drawn_at = -1e9
    board(event(1))
    view._draw()
    assert sum("╭" in row for row in glass.text()) == 1
    view.stop()
    assert not any(row.strip() for row in glass.text())


def test_the_view_runs_on_a_thread_of_its_own_and_stops(glass, monkeypatch):
    drawn = threading.Event()
    draw = LiveView._draw
    monkeypatch.setattr(LiveView, "_draw", lambda self: (draw(self), drawn.set()))
    _, view = view_of(glass)
    view.start()
    view.text("abc")
    assert drawn.wait(30)
    view.stop()
    view.stop()
    assert glass.text() == ["abc"]
    assert not view._thread.is_alive()


def test_a_terminal_that_went_away_is_told_to_the_one_who_writes():
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    view = LiveView(Board(Facts("target")), Gone(), "table", Gone())
    view.start()
    view._thread.join(30)
    with pytest.raises(OSError, match="Input/output"):
        view.text("x")
    with pytest.raises(OSError, match="Input/output"):
        view.stop()


def test_control_characters_become_visible():
    assert terminal.harmless("a\x1b[31mb\tc\nd\r\x07\x7f\x9b") == "a␛[31mb\tc\nd␍␇␡<9b>"
    assert terminal.harmless("příliš 👩‍👧 日本") == "příliš 👩‍👧 日本"


@pytest.mark.parametrize("text", ["", "abc", "日本語" * 9, "a\tb\t" * 8, "e\u0301" * 50, "x" * 40])
def test_folding_keeps_every_character(text):
    rows = terminal.fold(text, 20)
    assert "".join(row for _, row in rows).replace(" ", "") == text.replace("\t", "").replace(" ", "")
    assert all(sum(map(terminal.cells, row)) <= 20 for _, row in rows)
    assert [at for at, _ in rows] == sorted({at for at, _ in rows})
