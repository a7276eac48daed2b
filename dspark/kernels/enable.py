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

from dspark.kernels import gated_probe, store, ways
from dspark.kernels.ahead import compile_ahead, few_rows
from dspark.kernels.gated import Gated
from dspark.kernels.linears import MOST_ROWS, Linears, Shape, Way, rows_of, siblings, suits
from dspark.kernels.measure import Finding, measure
from dspark.kernels.recurrences import Recurrences, kinds
from dspark.models.target import language_part
from dspark.platform import backend

# Sets of modules that stand in turn for all of one shape: together more than a processor's cache holds.
SETS = 12
# Row counts that are measured; the others go the way of the next one up. 7 and 8 are apart, for there MLX's CUDA kernels change.
MEASURED = (1, 2, 4, 7, 8, 12, 16)
# Seconds after which a bind begins no further shape: the largest matrices come first, and a later bind goes on.
PATIENCE_S = 20.0


class Kernels:
    """The kernels of one model while it is used: `close` gives everything back; safe to call twice.

    findings: by shape, what this machine found; gated: the same for recurrences; missing: how many shapes it never measured.
    """

    def __init__(
        self,
        model: Any,
        kind: str,
        findings: dict[Shape, Finding],
        missing: int = 0,
        gated: dict[Gated, Finding] | None = None,
    ):
        self.kind, self.findings, self.missing, self.gated = kind, findings, missing, gated or {}
        self._linears = Linears(model, self._find)
        on = frozenset(shape for shape, finding in self.gated.items() if finding.way == "cuda")
        self._recurrences = Recurrences(model, on.__contains__) if on else None

    def close(self) -> None:
        self._linears.close()
        if self._recurrences is not None:
            self._recurrences.close()

    def _find(self, shape: Shape) -> Way | None:
        finding = self.findings.get(shape._replace(rows=measured_for(shape.rows)))
        return None if finding is None else finding.make(shape)

    def lines(self) -> list[str]:
        """Which kernels are on, for `explain`: a line for all, and one for each matrix."""
        everything = [*self.findings.values(), *self.gated.values()]
        on = [finding for finding in everything if finding.way != "stock"]
        said = [f"{len(on)} of {len(everything)} shapes by other kernels than MLX's own, as measured here"]
        if self.missing:
            said[0] += f"; {self.missing} shapes not measured"
        for key in dict.fromkeys(shape._replace(rows=0) for shape in self.findings):
            rows = {shape.rows: f for shape, f in self.findings.items() if shape._replace(rows=0) == key}
            said.append(f"{str(key).split(', ', 1)[1]}: {in_words(rows)}")
        for shape, found in self.gated.items():
            detail = f"{found.us:.0f} us for {found.stock_us:.0f} at 8 rows" if found.way != "stock" else found.why
            said.append(f"{shape}: {found.way}" + (f" ({detail})" if detail else ""))
        return said


def in_words(rows: dict[int, Finding]) -> str:
    """What was found for one matrix at several row counts: `rows 2-8 cuda (12 us for 98); rows 1 stock`."""
    runs: list[tuple[str, list[int]]] = []
    for count in sorted(rows):
        name = rows[count].way + (f" to {rows[count].width}" if rows[count].width else "")
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
) -> Kernels | None:
    """Give a model's quantised linears the ways that this machine found best for 1 to `rows` rows, and its gated delta
    recurrences their kernel; None where there are none: on a CPU, or in a model without either.

    probe: measure what was never measured here, once for a machine, for PATIENCE_S at most, most of it compilation; file: where
    findings are kept instead of the user's cache; say: told what is measured.
    """
    kind = kind or backend()
    # MLX's quantised product on a CPU costs the same again for each row, whatever the way.
    if kind == "cpu":
        return None
    core = language_part(model)
    sets = shapes(model, min(rows, MOST_ROWS))
    # On Metal the models' own libraries have a kernel.
    recurrent = kinds(core) if kind == "cuda" else []
    if not sets and not recurrent:
        return None
    every = [*sets, *recurrent]
    # Products are compared with MLX's own, whose kernels its compiler takes longer for than the probe may.
    if probe and kind == "cuda" and not {str(shape) for shape in sets} <= store.read(file).keys():
        compile_ahead([model], say=say, meanwhile=partial(few_rows, core))
    known = store.read(file)
    found: dict[Any, Finding] = {shape: known[str(shape)] for shape in every if str(shape) in known}
    wanted = sorted((shape for shape in every if shape not in found), key=_weight, reverse=True)
    # Kernels that an earlier version or compiler measured are not on disk.
    ways.compile_own(
        [*(wanted if probe else ()), *(shape for shape, finding in found.items() if finding.way == "cuda")]
    )
    if probe and wanted:
        made, until = {}, time.monotonic() + PATIENCE_S
        for done, shape in enumerate(wanted):
            if time.monotonic() > until:
                break
            say(f"measuring kernels for {shape} ({done + 1} of {len(wanted)})")
            made[shape] = gated_probe.measure(shape) if isinstance(shape, Gated) else measure(shape, sets[shape], kind)
        with contextlib.suppress(OSError):
            store.write({str(shape): finding for shape, finding in made.items()}, file)
        found |= made
        wanted = wanted[len(made) :]
    findings = {shape: found[shape] for shape in sets if shape in found}
    return Kernels(model, kind, findings, len(wanted), {shape: found[shape] for shape in recurrent if shape in found})


def measured_for(rows: int) -> int:
    """The measured row count whose way is taken for `rows`."""
    return next((count for count in MEASURED if count >= rows), rows)


def _weight(shape: Shape | Gated) -> tuple[bool, int, int]:
    """What is measured first: recurrences, which come one a model, then large matrices, of each the counts that drafts have."""
    if isinstance(shape, Gated):
        return True, 0, 0
    return False, shape.k * sum(shape.out), -abs(shape.rows - 8)


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
