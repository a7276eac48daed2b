"""Targets that mlx-lm does not know and mlx-vlm does: the language part of a vision checkpoint. Text only."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from dspark.checkpoints.defaults import generation_defaults
from dspark.checkpoints.sources import LocalFiles
from dspark.checkpoints.weigh import Sizes, weigh_folder
from dspark.errors import CheckpointError


def knows_mlx_vlm(config: dict[str, Any]) -> bool:
    """Whether the installed mlx-vlm has a language model of this model_type. No model's module is imported."""
    package = importlib.util.find_spec("mlx_vlm")
    if package is None or not package.submodule_search_locations:
        return False
    from mlx_vlm.utils import MODEL_REMAPPING

    name = str(MODEL_REMAPPING.get(config["model_type"], config["model_type"]))
    folder = Path(next(iter(package.submodule_search_locations))) / "models" / name
    return re.fullmatch(r"\w+", name) is not None and (folder / "language.py").is_file()


@attrs.frozen
class MlxVlmLoader:
    """A folder as mlx-vlm reads it, of which the language model alone is kept: the vision weights are never read."""

    config: dict[str, Any]
    stored_dtype = None

    def sizes(self, files: LocalFiles) -> Sizes:
        return weigh_folder(files.path, self.config)

    def load(self, files: LocalFiles) -> tuple[Any, Any, dict[str, Any]]:
        from mlx_lm.utils import load_tokenizer
        from mlx_vlm.utils import load_model

        try:
            model = load_model(files.path, lazy=True)
        except Exception as error:
            raise CheckpointError(f"{files.name}: mlx-vlm cannot load it: {_one_line(error)}") from error
        if "language_model" not in model or not hasattr(model.language_model, "layers"):
            raise CheckpointError(f"{files.name}: mlx-vlm has no language model with layers for it")
        try:
            ids = self.config.get("eos_token_id")
            tokenizer = load_tokenizer(files.path, {"trust_remote_code": False}, eos_token_ids=ids)
        except Exception as error:
            raise CheckpointError(f"{files.name}: its tokenizer cannot be loaded: {_one_line(error)}") from error
        return model.language_model, tokenizer, self.config

    def defaults(self, files: LocalFiles, end_ids: Iterable[int]) -> tuple[dict[str, Any], tuple[str, ...]]:
        return generation_defaults(files.path, end_ids)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
