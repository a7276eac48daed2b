"""The exception types. Every one is a `DsparkError`, carries one sentence a user can act on, and knows its exit code."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class DsparkError(Exception):
    """Base of everything dspark raises on purpose. `exit_code` is what the command line ends with."""

    exit_code = 1


class UserError(DsparkError):
    """The request cannot be served as it was given: the message names what, where and the remedy."""

    exit_code = 2


class InputError(UserError):
    """A prompt, option or file of the user's is not usable (empty prompt, temperature NaN, not UTF-8, ...)."""


class SourceError(UserError):
    """Weights or a recipe cannot be had from where they were asked for (missing, gated, unreachable, damaged)."""


class CheckpointError(UserError):
    """A checkpoint was read and refused: wrong packaging, missing tensors, a shape that does not fit."""


class BindError(UserError):
    """A pipeline and a target do not fit each other: names the layer or stage, what was found and what would work."""


class ChainError(UserError):
    """Stages were chained in an order that their records do not allow."""


class RecipeError(UserError):
    """A recipe is not valid. `problems` lists every fault at once, each `key.path: problem; allowed ...`."""

    def __init__(self, path: str, problems: Iterable[str]):
        self.path, self.problems = str(path), tuple(problems)
        super().__init__("\n".join(f"{self.path}: {p}" for p in self.problems))


class StaleState(DsparkError):
    """A `State` was used after the buffers moved on; call `session.fork()` to keep two continuations."""


class PoisonedBuffers(DsparkError):
    """An error in a round left the caches in an unknown state; they refuse further use and say why."""


def did_you_mean(word: object, allowed: Iterable[object]) -> str:
    """`; did you mean 'x'?` for the nearest of `allowed`, or nothing."""
    match = get_close_matches(str(word), [str(a) for a in allowed], 1, 0.5)
    return f"; did you mean {match[0]!r}?" if match else ""
