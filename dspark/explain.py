"""What a pipeline does and what it promises, in words: the lines of `dspark explain`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
from mlx.utils import tree_flatten

from dspark.caps.base import AbstractCap
from dspark.caps.fixed import FixedCap
from dspark.pipeline import Pipeline
from dspark.platform import memory_available, memory_total, size_text
from dspark.stages.accept import Rejection
from dspark.stages.registry import KINDS, kind_of

Line = tuple[str, str]

EXACT = "token for token what plain decoding says, in exact arithmetic"
DISTRIBUTED = "plain decoding's distribution, in exact arithmetic; a seed repeats with the same cap and drafter only"


def explain(pipeline: Pipeline) -> list[Line]:
    """(label, text) lines of what holds without a target. Costs nothing, loads nothing."""
    return [
        ("draft", in_words("draft", pipeline.draft.written)),
        ("cap", cap_in_words(pipeline.cap)),
        ("accept", in_words("accept", pipeline.accept)),
        ("rollback", in_words("rollback", pipeline.rollback)),
        ("reads", f"{pipeline.draft.reads} a round"),
        ("lossless", promise(pipeline)),
    ]


def explain_bound(engine: Any) -> list[Line]:
    """The lines of an engine: its target, its cap as calibrated, and the plan of its rollback in place of the wish for one."""
    target, pipeline = engine.target, attrs.evolve(engine.pipeline, accept=engine.accept())
    facts = [str(target.name), f"{target.num_layers} layers"]
    if engine.context_length:
        facts.append(f"context {engine.context_length:,} tokens")
    lines = [("target", ", ".join(facts)), *memory(engine), *explain(pipeline)]
    proved = "not proved" if engine.proof is None else engine.proof.summary()
    plan = [("rollback", f"{engine.plan.summary()}; {proved}"), *(("", line) for line in engine.plan.lines())]
    lines = replaced(lines, "rollback", plan)
    if pipeline.draft.longest != 0:
        lines = replaced(lines, "cap", cap_lines(pipeline.cap, engine.calibration))
    at = next(i for i, (label, _) in enumerate(lines) if label == "draft")
    lines[at + 1 : at + 1] = [("", line) for line in pipeline.draft.details]
    lines += labelled("kernels", ["MLX's own"] if engine.kernels is None else engine.kernels.lines())
    return lines + [("note", note) for note in engine.notes]


def labelled(label: str, texts: Iterable[str]) -> list[Line]:
    """Lines of which only the first has the label."""
    return [("" if at else label, text) for at, text in enumerate(texts)]


def memory(engine: Any) -> list[Line]:
    """What weights and caches take, and what this machine has."""
    target, drafters = _nbytes(getattr(engine.target, "model", None)), drafter_nbytes(engine.pipeline.draft)
    parts = [f"{size_text(target)} of weights"] if target else []
    parts += [f"{size_text(drafters)} of drafter"] if drafters else []
    parts.append(f"caches of {engine.footprint.text()}")
    if engine.context_length:
        whole = size_text(engine.footprint.nbytes(engine.context_length))
        parts.append(f"{whole} for all {engine.context_length:,}")
    has = f"this machine has {size_text(memory_total())}, {size_text(memory_available())} free"
    return [("memory", ", ".join(parts)), ("", has)]


def drafter_nbytes(draft: Any) -> int:
    """What the weights of a bound draft stage's drafters take."""
    branches = getattr(draft, "branches", ())
    return sum(map(drafter_nbytes, branches)) if branches else _nbytes(getattr(draft, "head", None))


def _nbytes(module: Any) -> int:
    arrays = tree_flatten(module.parameters()) if hasattr(module, "parameters") else []
    return sum(array.nbytes for _, array in arrays)


def promise(pipeline: Pipeline) -> str:
    """What lossless means for this accept stage."""
    return DISTRIBUTED if isinstance(pipeline.accept, Rejection) else EXACT


def cap_in_words(cap: AbstractCap) -> str:
    """`32 (pinned)`, or the controller's word and its options."""
    return f"{cap.cap} ({cap.why})" if isinstance(cap, FixedCap) else in_words("cap", cap)


def cap_lines(cap: AbstractCap, applied: Any) -> list[Line]:
    """The cap as this machine has it. applied: the calibration (`calibrate.apply.Applied`) that it went through, or None."""
    if not cap.wants_costs:
        return [("cap", cap_in_words(cap))]
    if applied is None:
        return [
            ("cap", cap_in_words(cap)),
            ("", "not calibrated on this machine, which the first run or dspark calibrate does"),
        ]
    change = f"{applied.old} -> {applied.new}: " if applied.changed and applied.old is not None else ""
    return [("cap", f"{change}{cap_in_words(cap)}"), ("", applied.source()), ("", str(applied.path or "not kept"))]


def replaced(lines: list[Line], label: str, by: list[Line]) -> list[Line]:
    """The lines with others in place of the one with this label."""
    at = next(i for i, (said, _) in enumerate(lines) if said == label)
    return [*lines[:at], *by, *lines[at + 1 :]]


def in_words(role: str, stage: Any) -> str:
    """A stage as a recipe would say it: its kind, and the options that are not the default."""
    word = kind_of(role, type(stage)) or type(stage).__name__
    if role == "warp":
        return " ".join([word, *(str(getattr(stage, f.name)) for f in attrs.fields(type(stage)) if f.init)])
    said = [text for field in attrs.fields(type(stage)) if field.init for text in _field(field, stage)]
    return " ".join([word, *said])


def _field(field: Any, stage: Any) -> Iterable[str]:
    value = getattr(stage, field.name)
    default = field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]
    if value == default and not isinstance(value, AbstractCap):
        return ()
    if links := getattr(value, "links", None):
        return (" ".join(in_words("warp", link) for link in links),)
    name = field.alias or field.name
    if isinstance(value, tuple) and value and all(_role(item) for item in value):
        return ("(" + ", then ".join(in_words(str(_role(item)), item) for item in value) + ")",)
    if role := _role(value):
        return (f"{name}=({in_words(role, value)})",)
    return (f"{name}={value}",)


def _role(value: Any) -> str | None:
    return next((role for role in KINDS if kind_of(role, type(value))), None)


def table(lines: Iterable[Line]) -> str:
    """Lines for a person, labels in one column."""
    lines = list(lines)
    wide = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{wide}}  {text}" for label, text in lines)
