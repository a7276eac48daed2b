"""A profile as text for a person, and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark.bench.profile import PARTS, Profile, Round, middle, whole

WIDTHS = 6


def profile_lines(found: Profile) -> list[str]:
    """The commonest width's rounds by part, all widths, plain steps by part, and how the whole compares with its parts."""
    lines = []
    if found.drafted:
        width = next(iter(found.widths))
        flowing, apart = found.at(width, False), found.at(width, True)
        lines += [
            "",
            f"drafted rounds of {width} rows, the commonest width: {_tokens(flowing + apart)}, means of the middle half",
        ]
        lines += _by_part({"in the round": flowing, "waited for": apart})
        if (ratio := whole_over_parts(flowing, apart)) is not None:
            lines.append(
                f"  the whole takes {ratio:.2f} times the sum of its parts, each of them waited for in every other round"
            )
        lines += ["", "by rows verified"]
        rows = [["rows", "rounds", "ms", "tokens a round"]]
        for width, count in list(found.widths.items())[:WIDTHS]:
            flowing = found.at(width, False)
            every = flowing + found.at(width, True)
            rows.append([str(width), str(count), _ms(whole(flowing)), f"{_mean_tokens(every):.2f}"])
        lines += _table(rows)
    for rounds, what in ((found.parked, "rounds without a draft"), (found.plain, "steps of the target alone")):
        if rounds:
            lines += [
                "",
                f"{what}, each sent before the last is read where it can be: {len(rounds)}, means of the middle half",
            ]
            lines += _by_part({"in the step": rounds})
    return lines


def whole_over_parts(flowing: Sequence[Round], apart: Sequence[Round]) -> float | None:
    """A round as it runs over the sum of its parts, each waited for; None where either was not seen."""
    mine, alone = whole(flowing), whole(apart)
    return None if mine is None or alone is None else mine / alone


def profile_dict(found: Profile) -> dict[str, Any]:
    """Everything, for JSON: means of the middle half by width, and every round."""
    widths = []
    for width in found.widths:
        flowing, apart = found.at(width, False), found.at(width, True)
        widths.append(
            {"rows": width, "rounds": len(flowing), "tokens_a_round": _mean_tokens(flowing + apart)}
            | {"whole_ms": whole(flowing), "parts_ms": middle(flowing)}
            | {"waited_for_ms": whole(apart), "waited_for_parts_ms": middle(apart)}
            | {"whole_over_parts": whole_over_parts(flowing, apart)}
        )
    return {
        "widths": widths,
        "parked": {"whole_ms": whole(found.parked), "parts_ms": middle(found.parked)},
        "plain": {"whole_ms": whole(found.plain), "parts_ms": middle(found.plain)},
        "rounds": {name: [r._asdict() for r in getattr(found, name)] for name in ("drafted", "parked", "plain")},
    }


def _by_part(columns: dict[str, Sequence[Round]]) -> list[str]:
    """Milliseconds by part; the first column with its shares."""
    means = {name: middle(rounds) for name, rounds in columns.items()}
    (first, *others) = columns
    total = whole(columns[first])
    rows = [["part", first, "share", *others]]
    for part in PARTS:
        share = f"{means[first][part] / total:.0%}" if total and part in means[first] else "-"
        rows.append([part, _ms(means[first].get(part)), share, *(_ms(means[name].get(part)) for name in others)])
    rows.append(["whole", _ms(total), "", *(_ms(whole(columns[name])) for name in others)])
    return _table(rows)


def _tokens(rounds: Sequence[Round]) -> str:
    return f"{len(rounds)} rounds, {_mean_tokens(rounds):.2f} tokens a round"


def _mean_tokens(rounds: Sequence[Round]) -> float:
    return sum(r.tokens for r in rounds) / len(rounds)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} ms"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            f"{cell:>{w}}" if i else f"{cell:<{w}}" for i, (cell, w) in enumerate(zip(row, wide, strict=True))
        ).rstrip()
        for row in rows
    ]
