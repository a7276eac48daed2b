"""A report as text for a person."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.bench.report import ALL, OURS, RATES, Difference, Report
from dspark.bench.stats import LEVEL, SpeedUp, Spread
from dspark.platform import size_text

HEADS = {
    "decode_tokens_per_s": "decode tok/s",
    "whole_tokens_per_s": "end to end tok/s",
    "first_token_s": "first token s",
    "accepted_length": "accepted",
    "peak_bytes": "peak memory",
}
RATE_WORDS = {"decode_tokens_per_s": "decode", "whole_tokens_per_s": "end to end"}


def lines_of(report: Report) -> list[str]:
    """Tables by prompt set with medians and quartiles, the speed-ups, and what was said."""
    lines = []
    for kind in report.kinds:
        count = len(report.measured.questions if kind == ALL else report.measured.of(kind))
        lines += ["", f"{kind}: {count} {'prompt' if count == 1 else 'prompts'}, medians and quartiles"]
        lines += _table([["arm", *HEADS.values()], *([arm, *_row(report, kind, arm)] for arm in report.measured.arms)])
        for rate in RATES:
            for arm in report.measured.arms:
                if arm != OURS:
                    found = report.speed_ups[kind, arm, rate]
                    lines.append(f"  {RATE_WORDS[rate]}, {OURS} over {arm}: {ratio_text(found)}")
    lines += ["", *said_text(report)]
    return lines + [f"left out: {arm}: {reason}" for arm, reason in report.measured.dropped.items()]


def ratio_text(found: SpeedUp) -> str:
    """`1.83 (95 % interval 1.75 to 1.92, 30 pairs)`, or that there is no figure and why."""
    if found.refused is not None:
        return f"no figure: {found.refused}"
    assert found.interval is not None
    i = found.interval
    return f"{i.ratio:.2f} ({100 * LEVEL:.0f} % interval {i.low:.2f} to {i.high:.2f}, {i.pairs} pairs)"


def said_text(report: Report) -> list[str]:
    """Whether all arms said the same, and where not."""
    prompts, others = len(report.measured.questions), [a for a in report.measured.arms if a != report.reference]
    if not others:
        return ["text: there was only one arm, so nothing was compared"]
    lines, every = [], "its one prompt" if prompts == 1 else f"all {prompts} prompts"
    for arm in report.measured.arms:
        found = [d for d in report.differences if d.arm == arm]
        if not found:
            if arm != report.reference:
                lines.append(f"text: {arm} said what {report.reference} said in {every}")
            continue
        who = "said something else in a repeat" if arm == report.reference else f"differs from {report.reference}"
        lines.append(f"text: {arm} {who} in {len(found)} of {prompts} prompts")
        lines += [f"  {_difference(d)}" for d in found]
    return lines


def _difference(d: Difference) -> str:
    where = f"{d.question.kind} {d.question.place}, token {d.divergence.at + 1}"
    if d.gap is None:
        return f"{where}: the first one"
    if None in (d.divergence.reference, d.divergence.other):
        return f"{where}: one of both ends there, which is not explained by rounding"
    verdict = "a near-tie" if d.harmless else "not explained by rounding, so the prompt is left out of that comparison"
    return f"{where}: the two likeliest tokens are {d.gap.gap:.2g} apart, rounding moves logits by {d.gap.noise:.2g}; {verdict}"


def _row(report: Report, kind: str, arm: str) -> list[str]:
    spreads = report.figures[kind, arm]
    return [_cell(name, spreads[name]) for name in HEADS]


def _cell(name: str, found: Spread | None) -> str:
    if found is None:
        return "-"
    if name == "peak_bytes":
        return size_text(int(found.median))
    digits = 3 if name == "first_token_s" else 2
    if name == "accepted_length":
        return f"{found.median:.{digits}f}"
    return f"{found.median:.{digits}f} ({found.low:.{digits}f}-{found.high:.{digits}f})"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, wide, strict=True)).rstrip() for row in rows]
