"""Turns faster kernels on for a loaded model: each for the shapes for which this machine found it right and faster."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn

from dspark.kernels import attention, gated_probe, store, ways
from dspark.kernels.ahead import compile_ahead, few_rows
from dspark.kernels.attention import Attention
from dspark.kernels.attentions import Attentions
from dspark.kernels.attentions import kinds as attention_kinds
from dspark.kernels.gated import Gated
from dspark.kernels.launches import Launches
from dspark.kernels.linears import MOST_ROWS, PREFILL_ROWS, Linears, Shape, Way, rows_of, siblings, suits
from dspark.kernels.measure import Finding, measure, measure_prefill
from dspark.kernels.recurrences import Recurrences, kinds
from dspark.models.target import language_part
from dspark.platform import backend, open_blas

# Sets of modules that stand in turn for all of one shape: together more than a processor's cache holds.
SETS = 12
# Row counts that are measured; the others go the way of the next one up. 7 and 8 are apart, for there MLX's CUDA kernels change.
MEASURED = (1, 2, 4, 7, 8, 12, 16)
# Rows of a prefill that are measured, for all.
PREFILL = 256
# The same of attention: MLX's CUDA kernel for few rows ends at 3, the one for Metal at 8.
ATTENDED = (4, 8, 16)
# What a finding's width is called; else what rows are padded to.
WIDTH_WORDS = {"split": " by", "cuda": ", in other caches split by"}
# Seconds after which a bind begins no further shape: the largest matrices come first, and a later bind goes on.
PATIENCE_S = 20.0


class Kernels:
    """The kernels of one model while it is used: `close` gives everything back; safe to call twice.

    findings: by shape, what this machine found; gated, attention: the same for recurrences and for attention; missing: how many
    shapes it never measured; launches: whole forwards in one launch, where they were asked for.
    """

    def __init__(
        self,
        model: Any,
        kind: str,
        findings: dict[Shape, Finding],
        missing: int = 0,
        gated: dict[Gated, Finding] | None = None,
        attention: dict[Attention, Finding] | None = None,
        launches: Launches | None = None,
    ):
        self.kind, self.findings, self.missing, self.launches = kind, findings, missing, launches
        self.gated, self.attention = gated or {}, attention or {}
        self._open: list[Any] = []
        self._multiply([model], findings)
        on = frozenset(shape for shape, finding in self.gated.items() if finding.way == "cuda")
        if on:
            self._open.append(Recurrences(model, on.__contains__))
        self._attend(model, self.attention)

    def close(self) -> None:
        for handle in self._open:
            handle.close()
        if self.launches is not None:
            self.launches.close()

    def enable_head(self, head: Any, rows: int, *, probe: bool = True, file: Path | None = None) -> None:
        """Give a drafter its round in one launch, else its products and its attention the ways found best for its block of `rows`,
        for as long as these kernels are open. The table that it borrows counts as its own, where the target's forwards are
        launches and leave it alone."""
        if self.launches is not None:
            self.launches.enable_head(head, probe=probe, file=file)
            if head.launch is not None:
                return
        attending = [
            Attention(measured_for(rows, ATTENDED), a.heads, a.kv_heads, a.head_dim, causal, head.dtype)
            for a in (layer.self_attn for layer in head.layers)
            for causal in (False, True)
        ]
        parts = [head]
        if self.launches is not None and self.launches.on and head.config.lm_head == "borrowed":
            table = self.launches.target.lm_head_raw
            parts += [table] if isinstance(table, nn.Module) else []
        sets = {} if self.kind == "cpu" else products(parts, rows)
        if probe and not {str(shape) for shape in sets} <= store.read(file).keys():
            compile_ahead(parts, (measured_for(rows),))
        every = sorted([*sets, *dict.fromkeys(attending)], key=_weight, reverse=True)
        made = lambda shape: measure(shape, sets[shape], self.kind) if shape in sets else attention.measure(shape)
        found = _findings(every, made, probe, file)
        self.missing += len(every) - len(found)
        multiplied = {shape: finding for shape, finding in found.items() if shape in sets}
        attended = {shape: finding for shape, finding in found.items() if shape not in sets}
        self.findings |= multiplied
        self.attention |= attended
        self._multiply(parts, multiplied)
        self._attend(head, attended)

    def _multiply(self, parts: Sequence[Any], findings: dict[Shape, Finding]) -> None:
        other = {(s.out, s.k, s.bits, s.group) for s, finding in findings.items() if finding.way != "stock"}
        self._open += [Linears(part, self._find, worth=other.__contains__) for part in parts]

    def _attend(self, model: Any, found: dict[Attention, Finding]) -> None:
        def find(kind: Attention) -> attention.Call | None:
            finding = found.get(kind._replace(rows=measured_for(kind.rows, ATTENDED)))
            return None if finding is None else attention.way_of(kind, finding)

        if any(finding.way != "stock" for finding in found.values()):
            self._open.append(Attentions([m for _, m in model.named_modules()], find))

    def _find(self, shape: Shape) -> Way | None:
        rows = PREFILL if shape.rows >= PREFILL_ROWS else measured_for(shape.rows)
        finding = self.findings.get(shape._replace(rows=rows))
        return None if finding is None else finding.make(shape)

    def lines(self) -> list[str]:
        """Which kernels are on, for `explain`: a line for all, and one for each matrix."""
        everything = [*self.findings.values(), *self.gated.values(), *self.attention.values()]
        on = [finding for finding in everything if finding.way != "stock"]
        said = [] if self.launches is None else self.launches.lines()
        if everything or self.missing or not said:
            said.append(f"{len(on)} of {len(everything)} shapes by other kernels than MLX's own, as measured here")
            said[-1] += f"; {self.missing} shapes not measured" if self.missing else ""
        for key in dict.fromkeys(shape._replace(rows=0) for shape in self.findings):
            rows = {shape.rows: f for shape, f in self.findings.items() if shape._replace(rows=0) == key}
            said.append(f"{str(key).split(', ', 1)[1]}: {in_words(rows)}")
        for shape, found in self.gated.items():
            detail = f"{found.us:.0f} us for {found.stock_us:.0f} at 8 rows" if found.way != "stock" else found.why
            said.append(f"{shape}: {found.way}" + (f" ({detail})" if detail else ""))
        for key in dict.fromkeys(shape._replace(rows=0) for shape in self.attention):
            by_rows = {shape.rows: f for shape, f in self.attention.items() if shape._replace(rows=0) == key}
            said.append(f"{str(key).split(', ', 1)[1]}: {in_words(by_rows)}")
        return said


def in_words(rows: dict[int, Finding]) -> str:
    """What was found for one matrix at several row counts: `rows 2-8 cuda (12 us for 98); rows 1 stock`."""
    runs: list[tuple[str, list[int]]] = []
    for count in sorted(rows):
        name = rows[count].way
        if rows[count].width:
            name += f"{WIDTH_WORDS.get(name, ' to')} {rows[count].width}"
        if not runs or runs[-1][0] != name:
            runs.append((name, []))
        runs[-1][1].append(count)
    words = []
    for name, counts in runs:
        last = rows[counts[-1]]
        span = f"rows {counts[0]}-{counts[-1]}" if len(counts) > 1 else f"rows {counts[0]}"
        detail = f"{last.us:.0f} us for {last.stock_us:.0f}" if name != "stock" else last.why
        words.append(f"{span} {name}" + (f" ({detail})" if detail else ""))
    return "; ".join(words)


def enable(
    model: Any,
    rows: int,
    *,
    probe: bool = True,
    file: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    kind: str | None = None,
    launches: Launches | None = None,
) -> Kernels | None:
    """Give a model's quantised linears and its attention the ways that this machine found best for 1 to `rows` rows, and its
    gated delta recurrences their kernel; None where there are none: on a CPU without a real BLAS, or in a model without any.

    probe: measure what was never measured here, once for a machine, for PATIENCE_S at most, most of it compilation; file: where
    findings are kept instead of the user's cache; say: told what is measured; launches: of this model's target. Where its forwards
    are launches, other ways are left for batches, and not measured for them.
    """
    kind = kind or backend()
    if kind == "cpu" and not open_blas().real:
        return None
    core = language_part(model)
    # MLX's quantised product on a CPU costs the same again for each row, whatever the way.
    sets = {} if kind == "cpu" else shapes(model, min(rows, MOST_ROWS))
    sets |= {shape._replace(rows=PREFILL): found for shape, found in sets.items()}
    # On Metal the models' own libraries have a kernel for recurrences.
    recurrent = kinds(core) if kind == "cuda" else []
    attending = [
        shape._replace(rows=count)
        for shape in attention_kinds(core, 2)
        for count in ATTENDED
        if count <= measured_for(min(rows, MOST_ROWS), ATTENDED)
    ]
    every: list[Any] = [*sets, *recurrent, *attending]
    if kind == "cpu":
        every = [shape for shape in attending if shape.dtype == mx.float32]
    if launches is not None and launches.on:
        probe = False
    if not every:
        return None if launches is None else Kernels(model, kind, {}, launches=launches)

    def made(shape: Any) -> Finding:
        if isinstance(shape, Attention):
            return attention.measure(shape)
        if isinstance(shape, Gated):
            return gated_probe.measure(shape)
        return measure_prefill(shape, sets[shape]) if shape.rows == PREFILL else measure(shape, sets[shape], kind)

    # Products are compared with MLX's own, whose kernels its compiler takes longer for than the probe may.
    if probe and kind == "cuda" and not {str(shape) for shape in sets} <= store.read(file).keys():
        compile_ahead([model], say=say, meanwhile=partial(few_rows, core))
    found = _findings(sorted(every, key=_weight, reverse=True), made, probe, file, say)
    parts: list[Any] = [
        {shape: found[shape] for shape in part if shape in found} for part in (sets, recurrent, attending)
    ]
    return Kernels(model, kind, parts[0], len(every) - len(found), *parts[1:], launches=launches)


def _findings(
    shapes: Sequence[Any],
    made: Callable[[Any], Finding],
    probe: bool,
    file: Path | None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[Any, Finding]:
    """What is known of shapes, and with `probe` what can be measured in PATIENCE_S, in this order; kept on disk."""
    known = store.read(file)
    found = {shape: known[str(shape)] for shape in shapes if str(shape) in known}
    wanted = [shape for shape in shapes if shape not in found] if probe else []
    # Kernels that an earlier version or compiler measured are not on disk.
    ways.compile_own([*wanted, *(shape for shape, finding in found.items() if finding.way == "cuda")])
    if not wanted:
        return found
    fresh, until = {}, time.monotonic() + PATIENCE_S
    for done, shape in enumerate(wanted):
        if time.monotonic() > until:
            break
        say(f"measuring kernels for {shape} ({done + 1} of {len(wanted)})")
        fresh[shape] = made(shape)
    with contextlib.suppress(OSError):
        store.write({str(shape): finding for shape, finding in fresh.items()}, file)
    return found | fresh


def measured_for(rows: int, counts: Sequence[int] = MEASURED) -> int:
    """The measured row count whose way is taken for `rows`."""
    return next((count for count in counts if count >= rows), rows)


def _weight(shape: Shape | Gated | Attention) -> tuple[int, int, int]:
    """What is measured first: attention, which compiles little, recurrences, which come one a model, then large matrices, of each
    the counts that drafts have; prefills last."""
    if isinstance(shape, Shape) and shape.rows == PREFILL:
        return -1, shape.k * sum(shape.out), 0
    if isinstance(shape, Shape):
        return 0, shape.k * sum(shape.out), -abs(shape.rows - 8)
    return (2 if isinstance(shape, Attention) else 1), 0, 0


def products(parts: Sequence[Any], rows: int) -> dict[Shape, list[Sequence[Any]]]:
    """For each shape of a block of `rows` rows, sets of a drafter's modules that have it."""
    found: dict[Shape, list[Sequence[Any]]] = {}
    for part in parts:
        for shape, sets in shapes(part, rows).items():
            if shape.rows == measured_for(rows):
                found.setdefault(shape, []).extend(sets)
    return found


def shapes(model: Any, rows: int) -> dict[Shape, list[Sequence[Any]]]:
    """For each shape that stands for those of a forward of 1 to `rows` rows, sets of modules that have it."""
    together = list(siblings(model))
    inside = {id(m) for each in together for m in each.members}
    linears = [m for _, m in model.named_modules() if suits(m)]
    heads = {rows_of(m) for m in linears if isinstance(m, nn.QuantizedLinear)}
    found: dict[Shape, list[Sequence[Any]]] = {}
    for members in [each.members for each in together] + [(m,) for m in linears if id(m) not in inside]:
        first = members[0]
        # An embedding is multiplied by where no linear has its vocabulary.
        if isinstance(first, nn.QuantizedEmbedding) and rows_of(first) in heads:
            continue
        dtype, k = first["scales"].dtype, first["scales"].shape[1] * first.group_size
        if not mx.issubdtype(dtype, mx.floating):
            continue
        for count in [count for count in MEASURED if count <= measured_for(rows)]:
            shape = Shape(count, tuple(map(rows_of, members)), k, first.bits, first.group_size, dtype)
            chosen = found.setdefault(shape, [])
            if len(chosen) < SETS:
                chosen.append(members)
    return found
