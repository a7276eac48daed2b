"""From a description to an engine: load the target, put the recipe's and the checkpoint's options together, bind."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx

from dspark import engine
from dspark.buffers.quantize import KVBits
from dspark.cache import cache_dir
from dspark.checkpoints.load import Loaded, load_model
from dspark.checkpoints.progress import Report
from dspark.checkpoints.room import Demand
from dspark.checkpoints.sources import cached
from dspark.checkpoints.weigh_drafter import packing, weigh_drafter
from dspark.engine import Chat, Engine
from dspark.errors import DsparkError, InputError, did_you_mean
from dspark.models.target import Target
from dspark.pipeline import Pipeline
from dspark.stages.accept import Sampling

if TYPE_CHECKING:
    from dspark.recipe.document import ChatTable, Recipe

CALIBRATION = ("stored", "auto", "off")
SAMPLING = frozenset(field.name for field in attrs.fields(Sampling) if field.init)


def bind(
    thing: Recipe | Pipeline,
    target: Any = None,
    tokenizer: Any = None,
    *,
    progress: Report | None = None,
    probe: bool = True,
    calibration: str = "stored",
) -> Engine:
    """Give a recipe or a pipeline its target and get an engine.

    target: a source (repository, folder, GGUF file), a model that mlx_lm loaded (with its `tokenizer`), a `Loaded`, or an
    object that behaves as `Target`; a recipe names one itself. progress: told of downloads; probe: prove the planned
    rollback by a few forwards; calibration: "stored" takes what was measured on this machine before, if anything was, "auto"
    measures where nothing was (some seconds, once), "off" does neither. Raises SourceError, CheckpointError, BindError or
    InputError, one sentence each.
    """
    if calibration not in CALIBRATION:
        raise InputError(
            f"calibration is {calibration!r}; allowed: {', '.join(CALIBRATION)}{did_you_mean(calibration, CALIBRATION)}"
        )
    engine = _bound(thing, target, tokenizer, progress, probe)
    if calibration == "off":
        return engine
    from dspark.calibrate import apply

    if calibration == "stored" or not apply.wanted(engine):
        return apply.with_stored(engine)
    from dspark.calibrate.calibrator import calibrate

    recipe = None if isinstance(thing, Pipeline) or target is not None else thing
    found = calibrate(engine, apply.label_of(recipe, engine), asked=apply.asked_of(recipe))
    return attrs.evolve(apply.apply(engine, found.calibration, found.path), notes=(*engine.notes, *found.notes))


def _bound(thing: Recipe | Pipeline, target: Any, tokenizer: Any, progress: Report | None, probe: bool) -> Engine:
    if isinstance(thing, str):
        raise InputError(f"bind takes a recipe or a pipeline, not the name {thing!r}: dspark.load({thing!r}).bind()")
    if not isinstance(thing, Pipeline):
        return assemble(thing, target=target, tokenizer=tokenizer, progress=progress, probe=probe)
    if target is None:
        raise InputError("a pipeline names no target: bind(pipeline, 'user/repository'), or a folder, file or model")
    held = _hold(load_model(target, progress=progress) if isinstance(target, str) else target, tokenizer)
    return engine.bind(
        thing,
        held.target,
        held.tokenizer,
        stop_tokens=held.stop_tokens,
        notes=held.notes,
        kernels=_kernels(held.target, thing, probe),
        probe=probe,
        remember=_proofs(),
    )


def assemble(
    recipe: Recipe,
    *,
    target: Any = None,
    tokenizer: Any = None,
    progress: Report | None = None,
    probe: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Engine:
    """What `recipe.bind` does before calibration; `bind` says what the arguments mean. say: told what is compiled and measured
    for faster kernels."""
    if target is None or isinstance(target, str):
        target = _load(recipe, target, progress)
    held, sampling = _hold(target, tokenizer), None
    if isinstance(recipe.accept, str):
        sampling = recipe.sampling.over(held.sampling)
    pipeline = recipe.pipeline(held.sampling)
    kernels = None if recipe.kernels.mode == "stock" else _kernels(held.target, pipeline, probe, say)
    bound = engine.bind(
        pipeline,
        held.target,
        held.tokenizer,
        sampling=sampling,
        accept_kind=recipe.accept if isinstance(recipe.accept, str) else "auto",
        stop_tokens=held.stop_tokens,
        context_length=recipe.target.max_context,
        notes=held.notes,
        chat=chat_of(recipe.chat),
        seed=recipe.sampling.seed,
        kv=_kv(recipe),
        kernels=kernels,
        probe=probe,
        remember=_proofs(),
    )
    if kernels is not None:
        for head in bound.pipeline.draft.heads:
            kernels.enable_head(head, head.config.block_size, probe=probe)
    return bound


def _kernels(target: Any, pipeline: Pipeline, probe: bool, say: Callable[[str], None] = lambda text: None) -> Any:
    """Faster kernels for the widths that this pipeline verifies, as far as this machine found them right and faster."""
    if not hasattr(target, "model"):
        return None
    from dspark.kernels import launches
    from dspark.kernels.enable import enable

    longest = pipeline.draft.longest
    launched = launches.enable(target, probe=probe, say=say) if isinstance(target, Target) else None
    rows = 16 if longest is None else longest + 1
    kernels = enable(target.model, rows, probe=probe, say=say, launches=launched)
    if kernels is not None:
        weakref.finalize(target, kernels.close)
    return kernels


def _proofs() -> Path:
    """Where proved rollback plans are remembered, by model and versions."""
    return cache_dir() / "proofs.json"


def chat_of(table: ChatTable) -> Chat:
    """A recipe's `[chat]` as an engine takes it: switches become variables of the chat template."""
    template = dict(table.template)
    if table.thinking is not None:
        template.setdefault("enable_thinking", table.thinking)
    if table.reasoning_effort is not None:
        template.setdefault("reasoning_effort", table.reasoning_effort)
    return Chat(system=table.system, raw=table.raw, template=template)


@attrs.frozen
class _Held:
    """A target that is in memory, and what came with it."""

    target: Any
    tokenizer: Any
    sampling: Sampling = attrs.field(factory=Sampling)
    stop_tokens: frozenset[int] | None = None
    notes: tuple[str, ...] = ()


def _hold(target: Any, tokenizer: Any) -> _Held:
    if isinstance(target, Loaded):
        defaults = target.generation_defaults
        return _Held(
            Target(target.model, target.config, target.name),
            tokenizer or target.tokenizer,
            Sampling(**{key: value for key, value in defaults.items() if key in SAMPLING}),
            frozenset(defaults["eos_token_ids"]),
            target.notes,
        )
    if hasattr(target, "make_caches"):
        return _Held(target, tokenizer)
    if not hasattr(target, "layers"):
        raise InputError(
            f"a {type(target).__name__} is no target: give a source, a model that mlx_lm loaded, or an object like Target"
        )
    # mlx-lm keeps the configuration that a model was built with.
    return _Held(Target(target, dict(vars(target.args)) if hasattr(target, "args") else {}), tokenizer)


def _load(recipe: Recipe, source: str | None, progress: Report | None) -> Loaded:
    table = recipe.target
    own = source is None
    source = source or table.source
    if source is None:
        name = recipe.path or "this recipe"
        raise InputError(f"{name} leaves the target open: name one, for example --target mlx-community/Qwen3-0.6B-4bit")
    return load_model(
        source,
        revision=table.revision if own else None,
        sha256=table.sha256 if own else None,
        adapter_path=table.adapter_path if own else None,
        dtype=table.dtype,
        progress=progress,
        demand=Demand(table.max_context, _kv(recipe), _drafter_nbytes(recipe.draft)),
    )


def _kv(recipe: Recipe) -> KVBits | None:
    table = recipe.target
    return None if table.kv_bits is None else KVBits(table.kv_bits, table.kv_group_size)


def _drafter_nbytes(draft: Any) -> int:
    """What the drafters of a recipe will take, as far as they are on this disk. What is wrong with one is said when it is
    loaded."""
    total = sum(_drafter_nbytes(branch) for branch in getattr(draft, "branches", ()))
    if source := getattr(draft, "drafter", None):
        itemsize = 4 if mx.default_device().type == mx.DeviceType.cpu else 2
        with contextlib.suppress(DsparkError, OSError, ValueError):
            if (path := cached(source, draft.revision)) is not None:
                bits, dense = packing(draft.bits, path, draft.group_size)
                total += weigh_drafter(path, bits, draft.group_size, itemsize, dense=dense)
    return total
