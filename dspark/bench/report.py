"""What the measured runs say: figures by prompt set, speed-ups where they carry one, and whether all arms said the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import attrs

from dspark.bench.measure import Measured, Question
from dspark.bench.record import Run
from dspark.bench.same import Divergence, Gap, first_divergence, spoken
from dspark.bench.stats import SpeedUp, Spread, paired, speed_up, spread

Figure = Callable[[Run], float | None]

FIGURES: dict[str, Figure] = {
    "decode_tokens_per_s": lambda run: run.decode_rate,
    "whole_tokens_per_s": lambda run: run.whole_rate,
    "first_token_s": lambda run: run.first_s,
    "accepted_length": lambda run: run.accepted_length,
    "peak_bytes": lambda run: run.peak_bytes,
}
RATES = ("decode_tokens_per_s", "whole_tokens_per_s")
OURS = "dspark"
ALL = "all"


class Difference(NamedTuple):
    """An arm's first word that is not the reference's, in one prompt. gap: None where the target was not asked."""

    arm: str
    question: Question
    divergence: Divergence
    gap: Gap | None

    @property
    def harmless(self) -> bool:
        """Whether rounding alone explains it."""
        return self.gap is not None and self.gap.near_tie(self.divergence)


@attrs.frozen
class Report:
    """figures: by (set, arm), a spread for each of FIGURES; speed_ups: by (set, arm, rate), of ours over that arm;
    differences: where arms said something else than `reference`."""

    measured: Measured
    reference: str
    figures: dict[tuple[str, str], dict[str, Spread | None]]
    speed_ups: dict[tuple[str, str, str], SpeedUp]
    differences: tuple[Difference, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The sets, and all of them together where there are several."""
        kinds = self.measured.kinds
        return (*kinds, ALL) if len(kinds) > 1 else kinds

    def wrong(self, arm: str) -> bool:
        """Whether an arm said something that rounding does not explain."""
        return any(d.arm == arm and not d.harmless for d in self.differences)


def make_report(
    measured: Measured, stop_tokens: frozenset[int], max_tokens: int, ask: Callable[[tuple[int, ...]], Gap]
) -> Report:
    """`ask`: the gap behind a context, by the target's own forward; called once a difference."""
    reference = next((arm for arm in ("plain", "mlx-lm") if arm in measured.arms), measured.arms[0])
    differences = tuple(_differences(measured, reference, stop_tokens, max_tokens, ask))
    kinds = (*measured.kinds, ALL)
    figures = {(kind, arm): _figures(measured, kind, arm) for kind in kinds for arm in measured.arms}
    speed_ups = {
        (kind, arm, rate): _speed_up(measured, kind, arm, rate, differences)
        for kind in kinds
        for arm in measured.arms
        if arm != OURS
        for rate in RATES
    }
    return Report(measured, reference, figures, speed_ups, differences)


def _questions(measured: Measured, kind: str) -> tuple[Question, ...]:
    return measured.questions if kind == ALL else measured.of(kind)


def _figures(measured: Measured, kind: str, arm: str) -> dict[str, Spread | None]:
    runs = [run for question in _questions(measured, kind) for run in measured.timed.get((arm, question), [])]
    return {name: spread([v for run in runs if (v := figure(run)) is not None]) for name, figure in FIGURES.items()}


def _speed_up(measured: Measured, kind: str, arm: str, rate: str, differences: Iterable[Difference]) -> SpeedUp:
    wrong = {d.question for d in differences if not d.harmless and d.arm in (arm, OURS)}
    questions = [q for q in _questions(measured, kind) if q not in wrong]
    if not questions:
        return SpeedUp(None, "they did not say the same in any prompt, so their speeds cannot be compared")
    rates = lambda name: [[FIGURES[rate](run) for run in measured.timed.get((name, q), [])] for q in questions]
    return speed_up(paired(rates(OURS), rates(arm)))


def _differences(
    measured: Measured,
    reference: str,
    stop_tokens: frozenset[int],
    max_tokens: int,
    ask: Callable[[tuple[int, ...]], Gap],
) -> Iterable[Difference]:
    """At most one an arm and prompt: the first of its answers that differs."""
    for question in measured.questions:
        truth = spoken(measured.warm[reference, question].tokens, stop_tokens, max_tokens)
        for arm in measured.arms:
            for run in measured.runs(arm, question):
                found = first_divergence(truth, spoken(run.tokens, stop_tokens, max_tokens))
                if found is not None:
                    context = question.ids + truth[: found.at]
                    yield Difference(arm, question, found, ask(context) if len(context) > 1 else None)
                    break


def as_dict(report: Report) -> dict[str, Any]:
    """Everything, for JSON: each run's figures, spreads, intervals and refusals, differences with their gaps."""
    measured = report.measured
    return {
        "reference": report.reference,
        "load": measured.load,
        "dropped": measured.dropped,
        "runs": [
            {"arm": arm, "set": question.kind, "prompt": question.place, "repeat": repeat, "tokens": len(run.tokens)}
            | {"prompt_tokens": len(question.ids), "took_s": run.took_s, "rounds": run.rounds}
            | {name: figure(run) for name, figure in FIGURES.items()}
            for (arm, question), runs in measured.timed.items()
            for repeat, run in enumerate(runs, 1)
        ],
        "figures": [
            {"set": kind, "arm": arm, **{name: None if s is None else s._asdict() for name, s in spreads.items()}}
            for (kind, arm), spreads in report.figures.items()
        ],
        "speed_ups": [
            {"set": kind, "over": arm, "of": rate, "refused": found.refused}
            | (found.interval._asdict() if found.interval else {})
            for (kind, arm, rate), found in report.speed_ups.items()
        ],
        "differences": [
            {"arm": d.arm, "set": d.question.kind, "prompt": d.question.place, **d.divergence._asdict()}
            | ({"gap": d.gap.gap, "noise": d.gap.noise} if d.gap else {})
            | {"harmless": d.harmless}
            for d in report.differences
        ],
    }
