"""Load a target: find its files, see that it fits, build it with mlx-lm, and hold its weights as this machine needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_flatten

from dspark.checkpoints.dtypes import hold
from dspark.checkpoints.hub import CONFIG_PATTERNS
from dspark.checkpoints.layout import by_columns
from dspark.checkpoints.loaders import Loader, first_lines, pick_loader
from dspark.checkpoints.progress import Report
from dspark.checkpoints.room import Demand, Needs, check, needs_of
from dspark.checkpoints.sources import LocalFiles, resolve
from dspark.errors import CheckpointError, DsparkError
from dspark.models.target import context_limit, text_config
from dspark.platform import DtypePlan, backend, memory_available, memory_total, open_blas, plan_dtype


@attrs.frozen(eq=False)
class Loaded:
    """A target in memory.

    `model` is mlx-lm's own module, `tokenizer` its `TokenizerWrapper`, `config` what config.json says (for GGUF what it
    would say). `generation_defaults` holds what the checkpoint asks for (temperature, top_p, top_k, min_p,
    repetition_penalty, as far as given) and always `eos_token_ids`, a tuple. `notes` are sentences to be said once.
    `nbytes` is what the weights take in memory; `dtype` the format of the activations.
    """

    model: Any = attrs.field(repr=False)
    tokenizer: Any = attrs.field(repr=False)
    config: dict[str, Any] = attrs.field(repr=False)
    name: str
    files: LocalFiles
    generation_defaults: dict[str, Any]
    notes: tuple[str, ...]
    nbytes: int
    dtype: str


def load_model(
    source: str,
    *,
    revision: str | None = None,
    sha256: str | None = None,
    adapter_path: str | Path | None = None,
    dtype: str | None = None,
    progress: Report | None = None,
    demand: Demand | None = None,
) -> Loaded:
    """Load the target that `source` names (see `sources.resolve`).

    `dtype` None follows the platform: float32 on a CPU, as stored on a GPU. `adapter_path` is a folder with mlx-lm's
    adapters. `demand`: what must fit beside the weights. Raises `SourceError` when it cannot be had, `CheckpointError` when
    it is damaged, of a family that is not known, wants code to be run or cannot fit, and `InputError` for a dtype that makes
    no sense here or a context that cannot fit. Nothing but headers is read until that is known.
    """
    files, loader = _find(source, revision, sha256, progress)
    plan, notes = _plan(files, loader, dtype, demand or Demand())
    model, tokenizer, config = loader.load(files)
    if adapter_path is not None:
        _adapt(model, Path(adapter_path))
    hold(model, plan._replace(dtype=plan.dtype or loader.stored_dtype))
    by_columns(model)
    mx.eval(model.parameters())
    defaults, more = loader.defaults(files, tokenizer.eos_token_ids)
    notes += more
    if files.kind == "lmstudio":
        notes = (f"{files.name} is LM Studio's copy ({files.path})", *notes)
    arrays: list[Any] = [array for _, array in tree_flatten(model.parameters())]
    return Loaded(
        model, tokenizer, config, files.name, files, defaults, notes,
        nbytes=sum(array.nbytes for array in arrays), dtype=_activations(arrays),
    )  # fmt: skip


def describe(
    source: str,
    *,
    revision: str | None = None,
    sha256: str | None = None,
    dtype: str | None = None,
    demand: Demand | None = None,
) -> str:
    """The memory sentence of a target without loading its weights; they must be on this disk or are fetched."""
    files, loader = _find(source, revision, sha256, None)
    needs = _needs(files, loader, _plan_for(loader, files, dtype), demand or Demand())
    return needs.sentence(files.name, memory_total(), memory_available())


def _find(source: str, revision: str | None, sha256: str | None, progress: Report | None) -> tuple[LocalFiles, Loader]:
    """Files and loader; of a hub repository only the small files are fetched before its family is known to be ours."""
    files = resolve(source, revision, sha256=sha256, patterns=CONFIG_PATTERNS, progress=progress)
    loader = pick_loader(files)
    if files.kind == "hub" and not files.is_gguf:
        files = resolve(source, files.revision, progress=progress)
    return files, loader


def _plan_for(loader: Loader, files: LocalFiles, dtype: str | None) -> DtypePlan:
    sizes = loader.sizes(files)
    return plan_dtype(
        dtype,
        packed=sizes.packed_nbytes > 0,
        float32_nbytes=sizes.float32_nbytes,
        kind=backend(),
        blas=open_blas(),
        free=memory_available(),
    )


def _plan(files: LocalFiles, loader: Loader, dtype: str | None, demand: Demand) -> tuple[DtypePlan, tuple[str, ...]]:
    plan = _plan_for(loader, files, dtype)
    tight = check(files.name, _needs(files, loader, plan, demand), demand, memory_total(), memory_available())
    return plan, plan.notes + ((tight,) if tight else ())


def _needs(files: LocalFiles, loader: Loader, plan: DtypePlan, demand: Demand) -> Needs:
    held = plan._replace(dtype=plan.dtype or loader.stored_dtype)
    return needs_of(loader.sizes(files), held, loader.config, context_limit(text_config(loader.config)), demand)


def _adapt(model: Any, folder: Path) -> None:
    from mlx_lm.utils import load_adapters

    for name in ("adapter_config.json", "adapters.safetensors"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: holds no {name}, so it is no folder of mlx-lm's adapters")
    try:
        load_adapters(model, str(folder))
        model.eval()
    except DsparkError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder}: these adapters do not fit the model: {first_lines(error)}") from error


def _activations(arrays: list[Any]) -> str:
    """The format that most floating weights have, which activations follow."""
    names = [str(a.dtype).removeprefix("mlx.core.") for a in arrays if mx.issubdtype(a.dtype, mx.floating)]
    return max(set(names), key=names.count) if names else "float32"
