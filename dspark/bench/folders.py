"""The same target and the same drafter for programs that read folders: as they were published, or written out as they are held."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from dspark.checkpoints.sources import LocalFiles
from dspark.engine import Engine
from dspark.errors import InputError
from dspark.platform import size_text
from dspark.stages.draft.block import AbstractBlock, BlockDraft
from dspark.stages.draft.lookup import Lookup

PACKED = ("quantization", "quantization_config")


class Drafting(NamedTuple):
    """What a recipe drafts with, in the words of other programs. mode: baseline, lookup, dspark or dflash; drafter: the
    options of the first drafter that loads weights; lookup: whether one looks up too."""

    mode: str
    drafter: AbstractBlock | None
    lookup: bool


def drafting_of(draft: Any) -> Drafting:
    """Of a pipeline's draft stage, bound or not."""
    stages = list(_flat(draft))
    lookup = any(isinstance(stage, Lookup) for stage in stages)
    drafter = next((stage for stage in stages if isinstance(stage, AbstractBlock)), None)
    if drafter is None:
        return Drafting("lookup" if lookup else "baseline", None, lookup)
    return Drafting("dspark" if drafter.kind == "dspark" else "dflash", drafter, lookup)


def _flat(draft: Any) -> Any:
    branches = getattr(draft, "branches", ())
    if not branches:
        yield draft.options if isinstance(draft, BlockDraft) else draft
    for branch in branches:
        yield from _flat(branch)


def export_target(engine: Engine, folder: Path) -> Path:
    """The engine's model as an mlx folder: config.json, weights as they are held now, tokenizer. Raises InputError where the
    model cannot be written. Costs its bytes on the disk."""
    from mlx_lm.utils import save_model

    folder.mkdir(parents=True)
    model, tokenizer = engine.target.model, engine.tokenizer
    needed, free = sum(array.nbytes for _, array in tree_flatten(model.parameters())), shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"{folder.parent}: {size_text(free)} free, and the target takes {size_text(needed)} when it is written out for "
            "other programs; free some space, or name another folder with TMPDIR"
        )
    if any("lora" in name for name, _ in model.named_modules()):
        raise InputError("adapters are not handed to other programs; drop adapter_path to compare with them")
    held = _held_dtype(model)
    config = dict(engine.target.config) | {"torch_dtype": held, "eos_token_id": sorted(engine.stop_tokens)}
    if not any(hasattr(module, "scales") for _, module in model.named_modules()):
        for key in PACKED:
            config.pop(key, None)
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    getattr(tokenizer, "_tokenizer", tokenizer).save_pretrained(folder)
    return folder


def published_target(files: LocalFiles, folder: Path, stop_tokens: frozenset[int]) -> Path:
    """The target's folder as it was published; of a GGUF file, an mlx folder with its weights packed as they are stored."""
    if not files.is_gguf:
        return files.path
    from mlx_lm.utils import save_model

    from dspark.checkpoints.loaders import pick_loader

    folder.mkdir(parents=True)
    model, tokenizer, config = pick_loader(files).load(files)
    save_model(folder, model)
    text = json.dumps(config | {"eos_token_id": sorted(stop_tokens)}, indent=2)
    (folder / "config.json").write_text(text, encoding="utf-8")
    tokenizer._tokenizer.save_pretrained(folder)
    return folder


def export_drafter(files: LocalFiles, folder: Path, dtype: str) -> Path:
    """A drafter's folder in the layout it was published in, floating tensors in `dtype`."""
    folder.mkdir(parents=True)
    for file in files.path.iterdir():
        if file.suffix == ".safetensors":
            loaded: Any = mx.load(str(file), return_metadata=True)
            arrays, metadata = loaded
            cast = {name: _cast(array, dtype) for name, array in arrays.items()}
            mx.save_safetensors(str(folder / file.name), cast, metadata={"format": "pt", **metadata})
        elif file.suffix == ".json" and file.name == "config.json":
            config = json.loads(file.read_text(encoding="utf-8"))
            (folder / file.name).write_text(json.dumps(config | {"torch_dtype": dtype}), encoding="utf-8")
        elif file.suffix == ".json" and not file.name.endswith(".index.json"):
            shutil.copy(file, folder / file.name)
    return folder


def held_dtype(engine: Engine) -> str:
    """The format that most floating numbers of the target are held in."""
    return _held_dtype(engine.target.model)


def _cast(array: mx.array, dtype: str) -> mx.array:
    return array.astype(getattr(mx, dtype)) if mx.issubdtype(array.dtype, mx.floating) else array


def _held_dtype(model: Any) -> str:
    sizes: dict[str, int] = {}
    for _, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).removeprefix("mlx.core.")
            sizes[name] = sizes.get(name, 0) + array.nbytes
    return max(sizes, key=lambda name: sizes[name]) if sizes else "float32"
