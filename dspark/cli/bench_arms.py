"""The arms of `dspark bench`, made of a bound recipe; those that cannot be had are left out, with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dspark.bench.arms import Arm, MlxLmArm, SessionArm, plain
from dspark.bench.folders import drafting_of, export_drafter, export_target, held_dtype, published_target
from dspark.bench.measure import Question
from dspark.bench.peers import PeerArm, PeerError, PeerTask
from dspark.bench.prompts import PromptSet
from dspark.bench.report import OURS
from dspark.checkpoints.sources import LocalFiles, resolve
from dspark.cli.bench_options import STOCK
from dspark.errors import InputError, UserError
from dspark.explain import drafter_nbytes
from dspark.platform import backend
from dspark.prompt import check_context
from dspark.stages.draft.block import DRAFTER_PATTERNS


def questions_of(engine: Any, sets: Sequence[PromptSet], max_tokens: int) -> list[Question]:
    """Every prompt as token ids. Raises InputError, naming set and place, for one that the target cannot take."""
    found = []
    for prompts in sets:
        for place, text in enumerate(prompts.prompts, 1):
            try:
                ids = engine.encode(text)
                room = check_context(ids, engine.context_length, max_tokens)
            except InputError as error:
                raise InputError(f"prompt {place} of {prompts.name}: {error}") from None
            if room < max_tokens:
                raise InputError(
                    f"prompt {place} of {prompts.name}: its {len(ids)} tokens leave room for {room} of the context of "
                    f"{engine.context_length}; take --max-tokens {room} or less, or other --prompts"
                )
            found.append(Question(prompts.name, place, ids))
    return found


def make_arms(
    recipe: Any,
    engine: Any,
    against: Sequence[str],
    python_of: Mapping[str, str],
    folder: Path,
    stack: contextlib.ExitStack,
    told: Callable[[str], None],
) -> tuple[list[Arm], dict[str, str]]:
    """(arms, ours first; for each that is left out, why). Peers end with `stack`."""
    from importlib.metadata import version

    from dspark import __version__

    spare = drafter_nbytes(engine.pipeline.draft)
    arms: list[Arm] = [SessionArm(OURS, f"dspark {__version__}, this recipe", engine)]
    weights, dropped = Weights(recipe, engine, folder), {}
    for name in against:
        told(f"loading {name}")
        if name == "plain":
            arms.append(SessionArm(name, "the target alone, through the same rounds", plain(engine), spare))
        elif name == "mlx-lm":
            about = f"mlx-lm {version('mlx-lm')}, stream_generate on the same model object"
            arms.append(MlxLmArm(name, about, engine, spare))
        else:
            peer = name.removesuffix(STOCK)
            try:
                arm = PeerArm(name, peer, python_of[peer], weights.task(name.endswith(STOCK)))
            except (PeerError, UserError) as error:
                dropped[name] = str(error).removeprefix(f"{name}: ")
                continue
            stack.callback(arm.close)
            arms.append(arm)
    return arms, dropped


class Weights:
    """The folders that peers load, made when the first one is asked for."""

    def __init__(self, recipe: Any, engine: Any, folder: Path):
        self._recipe, self._engine, self._folder = recipe, engine, folder
        self._drafting = drafting_of(engine.pipeline.draft)

    def task(self, stock: bool) -> PeerTask:
        """What a peer loads: the same weights in the same format, or (`stock`) what is published, as it comes."""
        kv, drafting = self._engine.kv, self._drafting
        if stock:
            target, drafter = self._published, None if self._drafter is None else self._drafter.path
        else:
            target, drafter = self._same_target, self._same_drafter
        return PeerTask(
            target,
            drafter,
            drafting.mode,
            None if stock or drafting.drafter is None else drafting.drafter.bits,
            None if kv is None else kv.bits,
            64 if kv is None else kv.group_size,
            same_blas=not stock,
        )

    @cached_property
    def _files(self) -> LocalFiles:
        table = self._recipe.target
        if table.source is None:
            raise InputError("the recipe names no source of a target that another program could load")
        return resolve(table.source, table.revision, sha256=table.sha256)

    @cached_property
    def _published(self) -> Path:
        return published_target(self._files, self._folder / "published", self._engine.stop_tokens)

    @cached_property
    def _same_target(self) -> Path:
        """The published folder where it is held as it is stored, else one that is written out."""
        table = self._recipe.target
        if table.adapter_path is not None:
            raise InputError("adapters are not handed to other programs; drop target.adapter_path to compare with them")
        as_stored = table.dtype in (None, "stored") and backend() != "cpu" and not self._files.is_gguf
        return self._files.path if as_stored else export_target(self._engine, self._folder / "target")

    @cached_property
    def _drafter(self) -> LocalFiles | None:
        options = self._drafting.drafter
        return None if options is None else resolve(options.drafter, options.revision, patterns=DRAFTER_PATTERNS)

    @cached_property
    def _same_drafter(self) -> Path | None:
        """On a CPU in the target's format: packed or not, 16 bits are emulated there."""
        if self._drafter is None:
            return None
        if self._drafter.is_gguf:
            raise InputError("its drafter is a GGUF file, which other programs are not given")
        if backend() != "cpu":
            return self._drafter.path
        return export_drafter(self._drafter, self._folder / "drafter", held_dtype(self._engine))


def same_format(arm: Any, engine: Any) -> str | None:
    """A note where a peer computes in another format than the recipe."""
    own, its = held_dtype(engine), getattr(arm, "dtype", None)
    return f"{arm.name} computes in {its}, dspark in {own}" if its not in (None, own) else None
