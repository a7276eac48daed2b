"""Lossless speculative decoding on MLX: a small drafter guesses, the target checks, the text stays the same.

    import dspark

    with dspark.load("smollm2-135m").bind().open("Why is the sky blue?") as session:
        for commit in session:
            print(commit.text, end="", flush=True)

Importing this package loads nothing: each public name is fetched from its module when it is first used, and a real BLAS is
opened before MLX is imported on a Linux CPU (see `dspark.blas`). Two variables are set for MLX on CUDA (`dspark.cuda_switches`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dspark.cuda_switches import set_switches

__version__ = "0.1.0"

set_switches()

if TYPE_CHECKING:
    from dspark.assemble import bind as bind
    from dspark.caps import AbstractCap as AbstractCap
    from dspark.caps import AdaptiveCap as AdaptiveCap
    from dspark.caps import ClipCap as ClipCap
    from dspark.caps import FixedCap as FixedCap
    from dspark.caps import ParkCap as ParkCap
    from dspark.engine import Chat as Chat
    from dspark.engine import Engine as Engine
    from dspark.errors import DsparkError as DsparkError
    from dspark.errors import RecipeError as RecipeError
    from dspark.errors import UserError as UserError
    from dspark.pipeline import Pipeline as Pipeline
    from dspark.pipeline import chain as chain
    from dspark.recipe import Recipe as Recipe
    from dspark.recipe import dump as dump
    from dspark.recipe import load as load
    from dspark.records import Commit as Commit
    from dspark.records import RoundEvent as RoundEvent
    from dspark.rows import Result as Result
    from dspark.session import Session as Session
    from dspark.session import SessionOptions as SessionOptions
    from dspark.stages.accept import Greedy as Greedy
    from dspark.stages.accept import Rejection as Rejection
    from dspark.stages.accept import SampleMatch as SampleMatch
    from dspark.stages.accept import Sampling as Sampling
    from dspark.stages.base import AbstractDraft as AbstractDraft
    from dspark.stages.draft import DFlash as DFlash
    from dspark.stages.draft import DFlash2 as DFlash2
    from dspark.stages.draft import DSpark as DSpark
    from dspark.stages.draft import FirstOf as FirstOf
    from dspark.stages.draft import Lookup as Lookup
    from dspark.stages.draft import NoDraft as NoDraft
    from dspark.stages.draft import first_of as first_of
    from dspark.stages.prefill import Prefill as Prefill
    from dspark.stages.registry import register_cap as register_cap
    from dspark.stages.registry import register_draft as register_draft
    from dspark.stages.rollback import Checkpoint as Checkpoint
    from dspark.stages.rollback import KvTrim as KvTrim
    from dspark.stages.rollback import RecurrenceReplay as RecurrenceReplay
    from dspark.stages.rollback import rollback_auto as rollback_auto
    from dspark.stages.verify import Verify as Verify
    from dspark.stages.warp import logit_bias as logit_bias
    from dspark.stages.warp import min_p as min_p
    from dspark.stages.warp import repetition_penalty as repetition_penalty
    from dspark.stages.warp import temperature as temperature
    from dspark.stages.warp import top_k as top_k
    from dspark.stages.warp import top_p as top_p
    from dspark.stages.warp import warps as warps
    from dspark.telemetry.sinks import JsonLines as JsonLines
    from dspark.telemetry.sinks import tee as tee

# A test holds this table to the imports above, which type checkers and editors read.
_HOMES = {
    "assemble": "bind",
    "caps": "AbstractCap AdaptiveCap ClipCap FixedCap ParkCap",
    "engine": "Chat Engine",
    "errors": "DsparkError RecipeError UserError",
    "pipeline": "Pipeline chain",
    "recipe": "Recipe dump load",
    "records": "Commit RoundEvent",
    "rows": "Result",
    "session": "Session SessionOptions",
    "stages.accept": "Greedy Rejection SampleMatch Sampling",
    "stages.base": "AbstractDraft",
    "stages.draft": "DFlash DFlash2 DSpark FirstOf Lookup NoDraft first_of",
    "stages.prefill": "Prefill",
    "stages.registry": "register_cap register_draft",
    "stages.rollback": "Checkpoint KvTrim RecurrenceReplay rollback_auto",
    "stages.verify": "Verify",
    "stages.warp": "logit_bias min_p repetition_penalty temperature top_k top_p warps",
    "telemetry.sinks": "JsonLines tee",
}
_HOME_OF = {name: f"dspark.{home}" for home, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOME_OF)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'dspark' has no attribute {name!r}")
    from dspark.blas import open_blas

    open_blas()
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
