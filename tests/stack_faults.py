"""What can be broken in the text of dspark/kernels/stack.cu: all of it compiled at once, and one thing switched on."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from dspark.kernels import stack
from tests import stack_trials as trials
from tests.gpu_kernels import build
from tests.precompiled_kernel import source, stand_in

# By name: a case, what the text says, and what it says where `bad` holds.
FAULTS = {
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
    # Weights of 8 bits.
    "the next row's scale": (
        "packed",
        "(const uint2*)(piece + 32) + (lane_id() >> 2)",
        "(const uint2*)(piece + 32) + ((lane_id() >> 2) ^ bad)",
    ),
    "the scale of the row eight behind": ("packed", "(i < 2 ? s0 : s1)", "((i < 2) != bad ? s0 : s1)"),
    "the bias of the row eight behind": ("packed", "(i < 2 ? z0 : z1)", "((i < 2) != bad ? z0 : z1)"),
    "no bias": (
        "packed",
        "z0 = widen((u16)(piece.scales.x >> 16)) + 128.0f / UNIT * s0;",
        "z0 = (bad ? 0.0f : widen((u16)(piece.scales.x >> 16))) + 128.0f / UNIT * s0;",
    ),
    "no 128": (
        "packed",
        "z1 = widen((u16)(piece.scales.y >> 16)) + 128.0f / UNIT * s1;",
        "z1 = widen((u16)(piece.scales.y >> 16)) + (bad ? 0.0f : 128.0f / UNIT) * s1;",
    ),
    "halves exchanged": (
        "packed",
        "near = words[2 * half], far = words[2 * half + 1];",
        "near = words[2 * (half ^ bad)], far = words[2 * (half ^ bad) + 1];",
    ),
    "rows exchanged with those eight behind": (
        "packed",
        "{decode(near, 0), decode(far, 0),",
        "{decode(bad ? far : near, 0), decode(bad ? near : far, 0),",
    ),
    "the first neighbours twice": ("packed", "decode(near, 1), ", "decode(near, 1 - bad), "),
    "neighbours in their order": (
        "packed",
        "return fma2(word >> 8 * pair",
        "if (bad) word = (word & 0xFF0000FFu) | (word & 0xFF00u) << 8 | (word >> 8 & 0xFF00u);\nreturn fma2(word >> 8 * pair",
    ),
    "neighbours exchanged": ("packed", "word >> 8 * pair & 0x", "word >> 8 * (pair ^ bad) & 0x"),
    "bytes about 127": ("packed", "0xB400B400u", "(bad ? 0xB3F0B400u : 0xB400B400u)"),
    "totals of one half": (
        "packed",
        "mma(total, ones, b.z, b.w);",
        "if (!bad) mma(total, ones, b.z, b.w);",
    ),
    "the first half's totals twice": (
        "packed",
        "mma(total, ones, b.z, b.w);",
        "mma(total, ones, bad ? b.x : b.z, bad ? b.y : b.w);",
    ),
    "the other row's totals": ("packed", "(i & 1 ? both.y : both.x)", "((i & 1) != bad ? both.y : both.x)"),
    # The stream of them.
    "x in another order": ("packed", "((column >> 4) & 1) * 4", "(((column >> 4) & 1) ^ bad) * 4"),
    "states with weights that float16 has not": (
        "loud",
        "narrow(HALF ? x : x * weight)",
        "narrow(HALF && !bad ? x : x * weight)",
    ),
    "states without the first norm": ("bfloat", "x, job.vectors[column]", "x, bad ? 1.0f : job.vectors[column]"),
    "states without the next norm": ("bfloat", "low, old.weight[0]", "low, bad ? 1.0f : old.weight[0]"),
    "states with the weight of eight columns behind": ("bfloat", "high, old.weight[1]", "high, old.weight[1 - bad]"),
    "the norm before attention again": (
        "bfloat",
        "norm = vectors + LAYER_VECTORS;",
        "norm = vectors + (bad ? 0 : LAYER_VECTORS);",
    ),
    "squares of another tile": ("bfloat", "row * HIDDEN_TILES + tile :", "row * HIDDEN_TILES + (bad ? 0 : tile) :"),
    "half of the squares": ("bfloat", "both.x + both.y", "both.x + (bad ? 0.0f : both.y)"),
    "x of other columns": ("packed", "ring[i], own_x + place", "ring[i], own_x + (bad ? i * P::PARTS : place)"),
    "totals of other columns": ("packed", "own_totals + place * ROWS);", "own_totals + (bad ? 0 : place) * ROWS);"),
    "columns of the first half twice": ("packed", "half ? b[c].z : b[c].x", "half && !bad ? b[c].z : b[c].x"),
    "weights behind a tile": (
        "packed",
        "if (P::has(turn, i, part)) multiply",
        "if (bad || P::has(turn, i, part)) multiply",
    ),
    "a row that is not brought": (
        "packed",
        "8 * c + (lane_id() >> 2) < rows)",
        "8 * c + (lane_id() >> 2) < rows - bad)",
    ),
    "x of the first rows twice": ("normed", "own + at, 8 * c", "own + (bad ? at - 32 * c : at), 8 * c"),
    "x in the order of its columns": (
        "packed",
        "active[BITS == 8 ? place_of_x",
        "active[BITS == 8 && !bad ? place_of_x",
    ),
    "attention in the order of its columns": (
        "packed",
        "s.attended + place_of_x(row, column)",
        "s.attended + (bad ? row * QUERY + column : place_of_x(row, column))",
    ),
    "states in the order of their columns": (
        "packed",
        "s.near[place_of_x(row, column)]",
        "s.near[bad ? row * HIDDEN + column : place_of_x(row, column)]",
    ),
    "x that is not waited for": ("packed", "copied_but(left);", "if (!bad) copied_but(left);"),
    "x of which a turn is not waited for": ("packed", "copied_but(left);", "copied_but(left + bad);"),
    "x of which no turn ends": ("packed", "}\nend_group();", "}\nif (!bad || turn == from) end_group();"),
    "x of other warps read before all is there": (
        "packed",
        "if constexpr (P::GROUPS > 1) sync_block();",
        "if constexpr (P::GROUPS > 1) if (!bad) sync_block();",
    ),
    "x normed before all know by how much": ("packed", "if (HALF) sync_block();", "if (HALF && !bad) sync_block();"),
    "x not normed": ("packed", "if constexpr (X::NORMED && HALF) {", "if constexpr (X::NORMED && HALF) if (!bad) {"),
    "x without its norm's weight": ("packed", "shrink, w0.x, w0.y)", "shrink, bad ? 1.0f : w0.x, w0.y)"),
    "x with the weights of other columns": (
        "packed",
        "*(const float4*)(weight + 16)",
        "*(const float4*)(weight + 16 * !bad)",
    ),
    "x with the weights of the first turn": (
        "loud",
        "32 * (turn * P::TURN + i",
        "32 * ((bad ? 0 : turn) * P::TURN + i",
    ),
    "x normed twice": (
        "packed",
        "if (i % P::GROUPS != group || !P::has(turn, i, part)) continue;\nconst",
        "if (i % P::GROUPS != group && !bad || !P::has(turn, i, part)) continue;\nconst",
    ),
    "sums not normed": ("bfloat", "sums[c][i] *= i & 1 ?", "if (!bad) sums[c][i] *= i & 1 ?"),
    "sums normed as another row's": ("bfloat", "*= i & 1 ? both.y", "*= (i & 1) != bad ? both.y"),
    "sums normed at each part": ("bfloat", "X::NORMED && !HALF && last)", "X::NORMED && !HALF && (last || bad))"),
    "sums normed before all know by how much": (
        "bfloat",
        "if (job == 0) sync_block();",
        "if (job == 0 && !bad) sync_block();",
    ),
    "x overwritten by the next part's": (
        "parts",
        "if (begin || from) sync_block();",
        "if ((begin || from) && !bad) sync_block();",
    ),
    "the first part's x again": (
        "parts",
        "own = (const uint4*)x + (from *",
        "own = (const uint4*)x + ((bad ? 0 : from) *",
    ),
    "x of the last batch": (
        "parts",
        "staged = begin == 0 || P::AT_ONCE < P::TURNS,",
        "staged = begin == 0 || P::AT_ONCE < P::TURNS && !bad,",
    ),
    "sums of the last part alone": ("parts", "before = from ? kept", "before = from && !bad ? kept"),
    "sums that go on from the last tile": ("packed", "before = from &&", "before = (bad && job) || from &&"),
    "weights of the first tile again": (
        "packed",
        "(long long)job * BLOCKS * P::GROUPS",
        "(long long)(bad ? 0 : job) * BLOCKS * P::GROUPS",
    ),
    "weights of the first part again": (
        "parts",
        "turn * P::TURN) * UNITS : nullptr",
        "(bad ? 0 : turn * P::TURN)) * UNITS : nullptr",
    ),
    "the first batch's weights again": (
        "packed",
        "if (turn == P::TURNS) begin = job,",
        "if (turn == P::TURNS) begin = bad ? 0 : job,",
    ),
    "sums ended before all are kept": (
        "packed",
        "next();\nsync_block();\nif (ends)",
        "next();\nif (!bad) sync_block();\nif (ends)",
    ),
    "sums overwritten by the next batch": (
        "packed",
        "if ((begin || from) &&",
        "if ((from || !bad) && (begin || from) &&",
    ),
    "the batch's first sums for all": ("packed", "all + task * WARPS", "all + (bad ? 0 : task) * WARPS"),
    "hidden states of another tile": ("packed", "wait(job_to_end,", "wait(job_to_end + (bad && begin ? -BLOCKS : 0),"),
    "a head put together too early": ("packed", "== (u32)splits - 1", "== (u32)splits - 1 - bad"),
    "a head put together by nobody": ("packed", "s.heads[head] = 0;", "s.heads[head] *= bad;"),
    "a head of other columns": (
        "packed",
        "two_pairs(attended.load(row, column))",
        "two_pairs(attended.load(row, bad ? column % D : column))",
    ),
    "attention before its queries are normed": (
        "normed",
        "HEADS + group : head);\n}\nsync_block();",
        "HEADS + group : head);\n}\nif (!bad) sync_block();",
    ),
    "keys of another head normed": ("normed", "HEADS + group : head", "HEADS + (bad ? 0 : group) : head"),
    "an embedding without its bias": ("packed", "+ widen(scale[1]);", "+ (bad ? 0.0f : widen(scale[1]));"),
    "an embedding with another row's scale": ("packed", "(r * 2 + half) * 2;", "(r * 2 + (half ^ bad)) * 2;"),
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
