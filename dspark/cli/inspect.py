"""`dspark inspect`: what packaging a drafter is in, what is in it, which targets it fits, and why it would be refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from dspark.blas import open_blas
from dspark.cli.failures import FAILURE, OK
from dspark.cli.screen import Answer
from dspark.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from dspark.checkpoints.drafter import DrafterReport, TargetFacts


def inspect(source: str, target: str | None, revision: str | None, as_json: bool) -> int:
    """Print the report and return the exit code: 0 for a drafter that would load, 1 for one that would be refused."""
    open_blas()
    from dspark.checkpoints import drafter
    from dspark.explain import table

    facts = None if target is None else target_facts(target)
    with headers(source, revision) as path:
        try:
            report = _named(drafter.inspect(path, facts), path, source)
        except UserError as error:
            raise type(error)(str(error).replace(str(path), source)) from None
    known = {"recipes": naming(source), "targets": [] if report.refused else fitting(report)}
    answer = Answer()
    if as_json:
        found = {**attrs.asdict(report), "path": source, **known}
        answer.write(json.dumps(found, ensure_ascii=False, default=str) + "\n")
    else:
        answer.write(table([("drafter", source), *report.lines(), *_targets(known)]) + "\n")
    return FAILURE if report.refused else OK


@contextlib.contextmanager
def headers(source: str, revision: str | None) -> Iterator[Path]:
    """What is on this disk, else the headers of a hub repository."""
    from dspark.checkpoints.headers import hub_gguf_header, hub_headers
    from dspark.checkpoints.sources import HUB_PREFIX, cached, split_hub

    here = Path(source).expanduser()
    if here.exists() or (here := cached(source, revision)) is not None:
        yield here
        return
    repo, file = split_hub(source.removeprefix(HUB_PREFIX))
    with hub_gguf_header(repo, file, revision) if file else hub_headers(repo, revision) as path:
        yield path


def _named(report: DrafterReport, path: Path, source: str) -> DrafterReport:
    """The report with the drafter's own name where it would name a passing folder."""
    told = lambda text: text.replace(str(path), source)
    refused = None if report.refused is None else told(report.refused)
    return attrs.evolve(report, refused=refused, notes=tuple(map(told, report.notes)))


def target_facts(source: str) -> TargetFacts:
    """What a drafter must fit, from the target's config alone. Of a target whose layers run more than once, all runs count."""
    from dspark.checkpoints.drafter import TargetFacts
    from dspark.cli.choose import read_target_config
    from dspark.models.target import text_config

    outer = read_target_config(source)
    config = text_config(outer)

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{source}: its config says {key} = {value!r}, where a whole number is expected")
        return value

    return TargetFacts(
        hidden_size=size("hidden_size"),
        vocab_size=size("vocab_size"),
        num_layers=size("num_hidden_layers") * size("num_loops", 1),
        model_type=str(outer.get("model_type", "")),
        name=source,
    )


def naming(source: str) -> list[str]:
    """Shipped recipes that draft by this drafter."""
    return [name for name, recipe in _recipes() if source in _drafters(recipe.draft)]


def fitting(report: DrafterReport) -> list[str]:
    """Targets of shipped recipes whose config a drafter of these sizes agrees with, as far as both say."""
    said = dict(report.target)
    wanted = {
        "hidden_size": said.get("width"),
        "vocab_size": said.get("vocabulary"),
        "num_hidden_layers": said.get("layers"),
    }
    deepest = max(report.target_layer_ids, default=0)
    found = []
    for _, recipe in _recipes():
        config = recipe.target.config
        shared = [key for key, value in wanted.items() if value is not None and key in config]
        # A width alone says little, and without it nothing fits.
        if "hidden_size" not in shared or any(str(config[key]) != wanted[key] for key in shared):
            continue
        if deepest < int(config.get("num_hidden_layers", deepest + 1)) - 1 and recipe.target.source not in found:
            found.append(str(recipe.target.source))
    return found


def _recipes() -> Iterator[tuple[str, Any]]:
    from dspark.errors import DsparkError
    from dspark.recipe import load
    from dspark.shipped import shipped

    for name, path in shipped():
        with contextlib.suppress(DsparkError):
            yield name, load(path)


def _drafters(draft: Any) -> list[str]:
    found = [source for branch in getattr(draft, "branches", ()) for source in _drafters(branch)]
    return [*found, draft.drafter] if hasattr(draft, "drafter") else found


def _targets(known: dict[str, list[str]]) -> list[tuple[str, str]]:
    lines = []
    if known["recipes"]:
        lines.append(("recipes", ", ".join(known["recipes"])))
    if known["targets"]:
        lines.append(("fits by size", ", ".join(known["targets"])))
    return lines
