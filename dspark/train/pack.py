"""The small copy of a finished drafter: large weights packed and, where the recipe asks for it, a reduced vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import attrs
import mlx.core as mx
import numpy as np

from dspark.checkpoints.dialects import open_source, recognise
from dspark.errors import InputError
from dspark.train.conversations import unpack_rows
from dspark.train.dataset import frequent
from dspark.train.recipe import TrainRecipe
from dspark.train.save import packed, published_config, reduced


def pack_drafter(recipe: TrainRecipe, bits: int, stops: Sequence[int] = ()) -> Path:
    """Write the copy beside the drafter, named after the bits; its folder.

    With `small_vocab` under [output] it drafts only `stops` and the most frequent tokens of the data, whose folder has to be
    there; it is then in speculators' layout and borrows the target's rows. Raises InputError for what is missing.
    """
    folder = recipe.output_folder
    if bits not in (2, 3, 4, 5, 6, 8):
        raise InputError(f"--pack {bits}: allowed are 2, 3, 4, 5, 6, 8 bits")
    if not (folder / "model.safetensors").is_file():
        raise InputError(f"{folder}: there is no finished drafter to pack; train it first")
    made = folder.with_name(f"{folder.name}-{bits}bit")
    arrays: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if recipe.output.small_vocab is not None:
        whole = recognise(source := open_source(folder)).read(source).config
        ids = _frequent_tokens(recipe, recipe.output.small_vocab, whole.vocab_size, stops)
        small = attrs.evolve(whole, draft_vocab_size=len(ids))
        arrays, config = (
            reduced(arrays, ids),
            published_config(small, config["num_target_layers"], str(recipe.target.source)),
        )
    arrays, config["quantization"] = packed(arrays, bits)
    made.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(made / "model.safetensors"), arrays, metadata={"format": "mlx"})
    (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in ("run.toml", "train.toml"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, made / name)
    return made


def _frequent_tokens(recipe: TrainRecipe, count: int, vocab_size: int, stops: Sequence[int]) -> np.ndarray:
    """The most frequent tokens of the training answers, ascending; `stops` are among them."""
    files = sorted(recipe.data_folder.glob("train-*.npz"))
    if not files:
        raise InputError(f"{recipe.data_folder}: no training data there, and small_vocab counts its tokens; restore it")
    if count >= vocab_size:
        raise InputError(f"{recipe.path}: small_vocab is {count} and the whole vocabulary has {vocab_size}; take fewer")
    rows = [row for file in files for row in unpack_rows(np.load(file))]
    return frequent(rows, count, vocab_size, stops)
