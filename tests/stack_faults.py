"""What can be broken in the text of dspark/kernels/stack.cu: all of it compiled at once, and one thing switched on."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from dspark.kernels import stack
from tests import stack_trials as trials
from tests.gpu_kernels import build
from tests.precompiled_kernel import source, stand_in
from tests.stack_stream_faults import STREAM_FAULTS

# By name: a case, what the text says, and what it says where `bad` holds.
FAULTS = STREAM_FAULTS | {
    # Steps that do not wait for what others compute.
    "queries that do not wait": (
        "llama",
        "QKV_AT * UNITS, 0, counter + APART, job.rows, normed(vectors), wait_once",
        "LATER",
    ),
    "heads normed too early": (
        "qwen3",
        "if constexpr (QK_NORM && !NORMED_WHERE_USED) {\nwait();",
        "if constexpr (QK_NORM && !NORMED_WHERE_USED) {\nif (!bad) wait();",
    ),
    "attention that does not wait": (
        "llama",
        "if (own < attending) {\nwait();",
        "if (own < attending) {\nif (!bad) wait();",
    ),
    "an output that does not wait": ("llama", "attended, wait_and_look", "LATER"),
    "an MLP that does not wait": (
        "llama",
        "MLP_AT * UNITS, 0, counter + APART, job.rows, normed(norm), wait_once",
        "LATER",
    ),
    "its end that does not wait": ("llama", "active, wait_and_look", "LATER"),
    "a head that does not wait": (
        "llama",
        "await(counter, before);\nif constexpr (BITS == 16)",
        "if (!bad) await(counter, before);\nif constexpr (BITS == 16)",
    ),
    "waiting for one block too few": (
        "llama",
        "before = smaller(jobs, BLOCKS)",
        "before = smaller(jobs, BLOCKS) - bad",
    ),
    "a step that nobody hears of": ("llama", "if (done) arrive(done);", "if (done && !bad) arrive(done);"),
    "counters that go on": ("llama", "s.counters[i] = 0;", "s.counters[i] *= bad;"),
    "blocks that are never all gone": ("llama", "s.left = 0;", "s.left *= bad;"),
    "sums overwritten by the next tile": (
        "llama",
        "if (job != own) sync_block();",
        "if (job != own && !bad) sync_block();",
    ),
    "sums overwritten by the next head": (
        "llama",
        "if (i != own) sync_block();",
        "if (i != own && !bad) sync_block();",
    ),
    "sums overwritten by the next rows": ("llama", "if (c) sync_block();", "if (c && !bad) sync_block();"),
    "sums read before all are kept": (
        "llama",
        "sums[c][2], sums[c][3]};\n}\nsync_block();",
        "sums[c][2], sums[c][3]};\n}\nif (!bad) sync_block();",
    ),
    "rows normed before all know by how much": (
        "llama",
        "by[row] = own;\n}\nsync_block();",
        "by[row] = own;\n}\nif (!bad) sync_block();",
    ),
    "normed rows read too early": ("llama", "* w.w});\n}\nsync_block();", "* w.w});\n}\nif (!bad) sync_block();"),
    "warps' values read too early": (
        "llama",
        "to[1] = sums[c][t][n + 2];\n}\n}\nsync_block();",
        "to[1] = sums[c][t][n + 2];\n}\n}\nif (!bad) sync_block();",
    ),
    "largest logits of the forward before": ("llama", "s.best[thread_id()] = 0;", "s.best[thread_id()] *= bad;"),
    # Attention.
    "a key too many": ("llama", "key > last", "key > last + bad"),
    "a key too few": ("llama", "key > last", "key > last - bad"),
    "values behind those in use": ("llama", "key < seen ? load16(values", "key < seen || bad ? load16(values"),
    "another head's keys": (
        "llama",
        "head / (HEADS / KV_HEADS)",
        "(bad ? head % KV_HEADS : head / (HEADS / KV_HEADS))",
    ),
    "no scale": ("llama", "narrow(low * SCALE), ", "narrow(bad ? low : low * SCALE), "),
    "values that do not shrink": ("llama", "sums[c][t][n] *= shrink,", "sums[c][t][n] *= bad ? 1.0f : shrink,"),
    "weights that do not shrink": ("llama", "total[c][n] * shrink", "total[c][n] * (bad ? 1.0f : shrink)"),
    "blocks with maxima of their own": (
        "llama",
        "power2(most[i].x - best)",
        "(bad ? 1.0f : power2(most[i].x - best))",
    ),
    "warps with maxima of their own": (
        "llama",
        "power2(marks[(w * 8 + row) * 2] - base)",
        "(bad ? 1.0f : power2(marks[(w * 8 + row) * 2] - base))",
    ),
    "the last block's keys left out": ("llama", "is = first + i < splits;", "is = first + i < splits - bad;"),
    "blocks behind the first four left out": (
        "llama",
        "first < splits; first += 4",
        "first < (bad ? 1 : splits); first += 4",
    ),
    "the first four blocks' values that do not shrink": (
        "llama",
        "all *= shrink, sum.x *= shrink",
        "all *= shrink, sum.x *= bad ? 1.0f : shrink",
    ),
    "the first four blocks' weights that do not shrink": ("llama", "all *= shrink,", "all *= bad ? 1.0f : shrink,"),
    "a maximum that is forgotten": (
        "llama",
        "best = larger(best, most[i].x)",
        "best = larger(bad ? most[i].x : best, most[i].x)",
    ),
    "keys that no block has": (
        "qwen3",
        "(job.held + job.rows + DEALT - 1)",
        "(job.held + (bad ? 0 : job.rows) + DEALT - 1)",
    ),
    "keys that two blocks have": ("llama", "first = DEALT * split", "first = DEALT * (split >> bad)"),
    "keys that a block takes twice": ("llama", "first += DEALT * SPLITS", "first += DEALT * (SPLITS - bad)"),
    # Products.
    "a row that is not multiplied": ("llama", "step < STEPS && row < rows)", "step < STEPS && row < rows - bad)"),
    "weights that were had before": (
        "llama",
        "next = step + AHEAD * PARTS;",
        "next = step + (bad ? 0 : AHEAD * PARTS);",
    ),
    "columns that are not multiplied": (
        "llama",
        "first < COUNT; first += AHEAD",
        "first < (bad ? 1 : COUNT); first += AHEAD",
    ),
    "states with weights that float16 has not": (
        "loud",
        "narrow(HALF ? x : x * weight)",
        "narrow(HALF && !bad ? x : x * weight)",
    ),
    "x with the weights of the first turn": (
        "loud",
        "32 * (turn * P::TURN + i",
        "32 * ((bad ? 0 : turn) * P::TURN + i",
    ),
    # Positions and norms.
    "turned the other way": ("llama", "low = a * cosine - b * sine", "low = a * cosine - (bad ? -b : b) * sine"),
    "the next row's position": (
        "llama",
        "turn(low, high, job.origin + job.held + row",
        "turn(low, high, job.origin + job.held + row + bad",
    ),
    "the first row's position": (
        "qwen3",
        "KEY_NORM), job.origin + job.held + row",
        "KEY_NORM), job.origin + job.held + (bad ? 0 : row)",
    ),
    "another pair's frequency": ("llama", "job.vectors[FREQUENCIES + i])", "job.vectors[FREQUENCIES + (i ^ bad)])"),
    "no eps": ("llama", "sum / HIDDEN + EPS", "sum / HIDDEN + (bad ? 0.0f : EPS)"),
    "no eps of heads": ("qwen3", "sum / D + EPS", "sum / D + (bad ? 0.0f : EPS)"),
    "a norm without its weight": (
        "llama",
        "{raw.x.x * by[c] * raw.weight.x",
        "{raw.x.x * by[c] * (bad ? 1.0f : raw.weight.x)",
    ),
    "the last norm without its weight": ("llama", "{x.x * shrink * w.x", "{x.x * shrink * (bad ? 1.0f : w.x)"),
    "attention's norm before the MLP": ("llama", "vectors + NORM_OF_MLP", "vectors + (bad ? 0 : NORM_OF_MLP)"),
    "the queries' norm for keys": ("qwen3", "(asks ? QUERY_NORM : KEY_NORM)", "(asks || bad ? QUERY_NORM : KEY_NORM)"),
    # What greedy decoding says.
    "told before all have left": ("llama", "leave(&s.left) ==", "leave(&s.left) + bad =="),
    "gone before it is known who is last": (
        "llama",
        "BLOCKS - 1;\nsync_block();",
        "BLOCKS - 1;\nif (!bad) sync_block();",
    ),
    "forgotten before it is told": (
        "llama",
        "if (thread_id() == 0) end();",
        "if (thread_id() == 0 && bad) std::memset(s.best, 0, sizeof(s.best));\nif (thread_id() == 0) end();",
    ),
    "the last of equal logits": (
        "llama",
        "(0xffffffffu - (u32)place)",
        "(bad ? (u32)place : 0xffffffffu - (u32)place)",
    ),
    "negative logits before positive ones": (
        "llama",
        "bits & 0x80000000u ? ~bits",
        "bits & 0x80000000u && !bad ? ~bits",
    ),
    "a lane's own largest": (
        "llama",
        "better(best[n], across_key(best[n], distance))",
        "(bad ? best[n] : better(best[n], across_key(best[n], distance)))",
    ),
    "drafts behind a wrong one": ("llama", "if (standing == row && ", "if ((bad || standing == row) && "),
    "a draft compared with its own row": ("llama", "ids[row + 1] == best", "ids[row + 1 - bad] == best"),
    "the token behind all": ("llama", "said.choice[standing]", "said.choice[bad ? job.rows - 1 : standing]"),
    # Places.
    "another layer's tap": ("llama", "tapped[i] == layer", "tapped[i] == (bad ? 1 - layer : layer)"),
    "keys a row late": ("llama", "* job.room + at) * D", "* job.room + at + bad) * D"),
    "rows that nobody asked for": (
        "llama",
        "if (row >= job.rows) continue;\nfloat",
        "if (row >= job.rows + bad) continue;\nfloat",
    ),
    "marks behind the memory": ("llama", "all + WARPS * 8 * D;", "all + WARPS * 8 * D + 4 * bad;"),
    # Within the tolerance: only bits show it.
    "sums that depend on how many rows": (
        "llama",
        "low = old.state[n] + sums[n],",
        "low = old.state[n] + sums[n] * (1.0f + bad * 1e-5f * job.rows),",
    ),
}
DEEP = "constexpr int DEEP = BITS == 8 ? 8 : 12;"
NUMBERS = {name: i + 1 for i, name in enumerate(FAULTS)}
# What is told of one that is not seen in numbers.
TOLD = {
    "a step that nobody hears of": "for ever",
    "told before all have left": "for ever",
    "gone before it is known who is last": "for ever",
    "marks behind the memory": "behind its shared memory",
}
ONLY_BITS = "sums that depend on how many rows"


def faulty(text: str, faults: dict[str, tuple[str, str, str]] = FAULTS) -> str:
    """A text in which every fault is, and which has the one whose number `fault` is."""
    for number, (name, (_, right, wrong)) in enumerate(faults.items(), start=1):
        wrong = {
            "LATER": re.sub(
                r"wait_\w+$", r"[&](int tile, int c, bool first) { \g<0>(tile, c, first && !bad); }", right
            ),
        }.get(wrong, wrong)
        assert right in text, f"{name}: the text changed; break it in another way"
        text = text.replace(right, wrong.replace("bad", f"(fault == {number})"))
    # The small cases have few columns, and are to go through them in several steps all the same.
    assert DEEP in text
    return 'extern "C" { int fault; }\n' + text.replace(DEEP, "constexpr int DEEP = 2;")


def broken(t: trials.Trial, name: str | None = None) -> stack.Forward:
    """Forwards of a trial whose text has a fault, or none: until the next are made."""

    def kernel(kind: stack.Stack) -> Any:
        program = stack.program(kind)
        fault = ctypes.c_int.in_dll(build(source(program, faulty(program.text))), "fault")
        fault.value = NUMBERS[name] if name else 0
        return stand_in(program, faulty, written=trials.WRITTEN)

    return trials.forward(t.case, t.model, kernel)
