"""What can be broken in the text of dspark/kernels/stack_draft.cu: all of it compiled at once, and one thing switched on."""

from __future__ import annotations

import ctypes

from dspark.kernels import stack_draft
from tests import draft_trials as trials
from tests.gpu_kernels import build
from tests.precompiled_kernel import source
from tests.stack_faults import faulty

# By name: which rounds show it, what the text says, and what it says where `bad` holds.
FAULTS = {
    # Taps.
    "the first rows' taps again": ("told", "at = first + row", "at = (bad ? 0 : first) + row"),
    "an array of taps too few": ("parted", "i <= round.apart) from", "i <= round.apart - bad) from"),
    "an array of taps for all rows": ("parted", "if (i <= at && ", "if ((i <= at || bad) && "),
    "the last array as if it were the first": (
        "parted",
        "(at - round.apart) * TAPS",
        "(at - (bad ? 0 : round.apart)) * TAPS",
    ),
    "the last array's first row again": ("parted", "if (at > round.apart) from", "if (at > round.apart && !bad) from"),
    "the first rows' places again": (
        "told",
        "before = round.before + first;",
        "before = round.before + (bad ? 0 : first);",
    ),
    "rows left out": ("told", "first < round.taken; first += ROWS", "first < round.taken - bad; first += ROWS"),
    "a row left out": (
        "told",
        "rows = smaller(round.taken - first, ROWS)",
        "rows = smaller(round.taken - first - bad, ROWS)",
    ),
    "taps of another format": (
        "told",
        "TAPS_HALF ? widen_half(value) : widen_bfloat(value)",
        "TAPS_HALF && !bad ? widen_half(value) : widen_bfloat(value)",
    ),
    "context rows without their norm": ("told", "FREQUENCIES + D / 2}", "(bad ? LAST_NORM : FREQUENCIES + D / 2)}"),
    "squares of one half": (
        "told",
        "square = sums[n] * sums[n] + sums[n + 2]",
        "square = sums[n] * sums[n] + (bad ? 0.0f : sums[n + 2])",
    ),
    "keys of the first layer": (
        "told",
        "keys + (row * LAYERS + number) * KEYS + own",
        "keys + (row * LAYERS + (bad ? 0 : number)) * KEYS + own",
    ),
    "the queries' norm for context keys": (
        "told",
        "number * LAYER_VECTORS + KEY_NORM,",
        "number * LAYER_VECTORS + (bad ? QUERY_NORM : KEY_NORM),",
    ),
    "context keys a position late": ("told", "before + row, 1.0f", "before + row + bad, 1.0f"),
    "context keys from position 0": (
        "told",
        "KEY_NORM), job.origin + before",
        "KEY_NORM), (bad ? 0 : job.origin) + before",
    ),
    "block keys from position 0": (
        "told",
        "KEY_NORM), job.origin + job.held",
        "KEY_NORM), (bad ? 0 : job.origin) + job.held",
    ),
    "values a row late": ("told", "number, 1, at / D, before + row)", "number, 1, at / D, before + row + bad)"),
    # Waiting.
    "context rows overwritten too early": (
        "told",
        "if (is_first && first) await(",
        "if (is_first && first && !bad) await(",
    ),
    "context rows read too early": (
        "told",
        "if (is_first) await(counter, time",
        "if (is_first && !bad) await(counter, time",
    ),
    "context keys normed too early": ("told", "await(counter + APART, time", "if (!bad) await(counter + APART, time"),
    "as many as the first time": (
        "told",
        "time * smaller(HIDDEN_TILES, BLOCKS)",
        "(bad ? 1 : time) * smaller(HIDDEN_TILES, BLOCKS)",
    ),
    "as many keys as the first time": (
        "told",
        "time * smaller(CONTEXT_TILES, BLOCKS)",
        "(bad ? 1 : time) * smaller(CONTEXT_TILES, BLOCKS)",
    ),
    "a chain that does not wait for logits": (
        "told",
        "await(counter, before);\nint previous",
        "if (!bad) await(counter, before);\nint previous",
    ),
    "a slot that does not wait": (
        "told",
        "await(counter, BLOCKS);\nprevious",
        "if (!bad) await(counter, BLOCKS);\nprevious",
    ),
    "a slot that nobody hears of": ("told", "arrive(counter);", "if (!bad) arrive(counter);"),
    "slots that share a counter": ("told", "counter += APART;", "counter += bad ? 0 : APART;"),
    "the best of the round before": ("told", "s.best[thread_id()] = 0;", "s.best[thread_id()] *= bad;"),
    "counters that go on": ("told", "s.counters[i] = 0;", "s.counters[i] *= bad;"),
    # The block.
    "a mask for the anchor": ("told", "(row ? MASK", "(row || bad ? MASK"),
    "anchors for masks": ("told", "? MASK : round.anchor", "? (bad ? round.anchor : MASK) : round.anchor"),
    "slots that see what is behind": ("told", "last = CAUSAL ?", "last = CAUSAL && !bad ?"),
    # The chain.
    "the next slot's logits": ("told", "+ slot) * VOCAB", "+ slot + bad) * VOCAB"),
    "the anchor's slot": ("told", "(FIRST + slot", "((bad ? 0 : FIRST) + slot"),
    "another rank row": ("told", "(long long)previous * RANK", "(long long)(previous ^ bad) * RANK"),
    "another anchor's rank row": ("told", "(long long)round.anchor * RANK", "(long long)(round.anchor ^ bad) * RANK"),
    "the anchor's rank row for all": ("told", "slot ? round.by_row", "slot && !bad ? round.by_row"),
    "the target's rank row": ("told", "? round.by_row +", "? (bad ? round.after : round.by_row) +"),
    "half of the rank": ("told", "column < RANK; column += 8", "column < (bad ? RANK / 2 : RANK); column += 8"),
    "rows of the drafter's own": ("told", "round.names[previous]", "(bad ? previous : round.names[previous])"),
    "a lane's own best": (
        "told",
        "better(best, across_key(best, distance))",
        "(bad ? best : better(best, across_key(best, distance)))",
    ),
    "a block's share too few": (
        "told",
        "at < SHARE; at += THREADS) {\nif (first + at",
        "at < SHARE >> bad; at += THREADS) {\nif (first + at",
    ),
    # What the host knows.
    "one kept too few": ("told", ": kept;", ": kept - bad;"),
    "one too few of the report": ("untold", "[0] + 1 : kept", "[0] + 1 - bad : kept"),
    "the count for an anchor": ("untold", "[kept < 0]", "[kept < 0 && !bad]"),
}
NUMBERS = {name: i + 1 for i, name in enumerate(FAULTS)}
FOREVER = {"rows left out", "a slot that nobody hears of"}


# One block is a step behind the others: the stand-ins of blocks take turns else. Its warps and it itself go on once before.
NORMING = "norm_context(job, round, before, rows);"


def text(text: str) -> str:
    assert NORMING in text
    return faulty(text, FAULTS).replace(
        NORMING, f"if (block_id() == 0) for (int i = 0; i < 3; ++i) fibers::pause();\n{NORMING}"
    )


def broken(t: trials.Trial, name: str | None = None) -> trials.Rounds:
    """Rounds of a trial whose text has a fault, or none: until the next are made."""
    made = trials.Rounds(t, text)
    program = stack_draft.program(made.kind)
    ctypes.c_int.in_dll(build(source(program, text(program.text))), "fault").value = NUMBERS[name] if name else 0
    return made
