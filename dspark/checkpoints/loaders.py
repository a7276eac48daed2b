"""Which library builds a target from its files. `pick_loader` is the place to add another one."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import attrs

from dspark.checkpoints.defaults import generation_defaults, gguf_defaults
from dspark.checkpoints.gguf import load_gguf
from dspark.checkpoints.gguf_config import read_config
from dspark.checkpoints.gguf_header import GgufHeader, read_header
from dspark.checkpoints.gguf_tokenizer import build_tokenizer
from dspark.checkpoints.sources import LocalFiles
from dspark.checkpoints.vlm import MlxVlmLoader, knows_mlx_vlm
from dspark.checkpoints.weigh import Sizes, weigh_folder, weigh_gguf
from dspark.errors import CheckpointError, DsparkError, did_you_mean


class Loader(Protocol):
    """Knows one packaging of targets. Nothing but the config (or header) is read before `load`."""

    @property
    def config(self) -> dict[str, Any]:
        """What config.json says, or for GGUF what it would say."""
        ...

    @property
    def stored_dtype(self) -> str | None:
        """The format to hold on a GPU where the file mixes several; None leaves every array as it is."""
        ...

    def sizes(self, files: LocalFiles) -> Sizes: ...

    def load(self, files: LocalFiles) -> tuple[Any, Any, dict[str, Any]]:
        """The model (its arrays possibly not evaluated yet), an mlx-lm `TokenizerWrapper`, and the config in full."""
        ...

    def defaults(self, files: LocalFiles, end_ids: Iterable[int]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What the checkpoint asks for when it is sampled, and notes; see `defaults.py`."""
        ...


def pick_loader(files: LocalFiles) -> Loader:
    """The loader for these files; raises `CheckpointError` when no library here knows the model's family."""
    if files.is_gguf:
        header = read_header(files.path)
        return GgufLoader(read_config(header), header)
    config = read_folder_config(files.path)
    refuse_code(files, config)
    if not knows_mlx_lm(config) and knows_mlx_vlm(config):
        return MlxVlmLoader(config)
    require_mlx_lm_family(files, config)
    return MlxLmLoader(config)


@attrs.frozen
class MlxLmLoader:
    """A folder as mlx-lm reads it: config.json, model*.safetensors and the tokenizer's files."""

    config: dict[str, Any]
    stored_dtype = None

    def sizes(self, files: LocalFiles) -> Sizes:
        return weigh_folder(files.path, self.config)

    def load(self, files: LocalFiles) -> tuple[Any, Any, dict[str, Any]]:
        from mlx_lm.utils import load_model, load_tokenizer

        try:
            model, config = load_model(files.path, lazy=True)
        except DsparkError:
            raise
        except Exception as error:
            raise CheckpointError(f"{files.name}: mlx-lm cannot load it: {first_lines(error)}") from error
        try:
            ids = config.get("eos_token_id")
            tokenizer = load_tokenizer(files.path, {"trust_remote_code": False}, eos_token_ids=ids)
        except Exception as error:
            raise CheckpointError(f"{files.name}: its tokenizer cannot be loaded: {first_lines(error)}") from error
        return model, tokenizer, config

    def defaults(self, files: LocalFiles, end_ids: Iterable[int]) -> tuple[dict[str, Any], tuple[str, ...]]:
        return generation_defaults(files.path, end_ids)


@attrs.frozen
class GgufLoader:
    """A GGUF file, held as mlx-lm's model of the same family."""

    config: dict[str, Any]
    header: GgufHeader

    @property
    def stored_dtype(self) -> str | None:
        # GGUF keeps norms in float32 beside float16 scales; mixed, every product on a GPU would run in float32.
        return None if all(info.type == "F32" for info in self.header.tensors.values()) else "float16"

    def sizes(self, files: LocalFiles) -> Sizes:
        return weigh_gguf(self.header)

    def load(self, files: LocalFiles) -> tuple[Any, Any, dict[str, Any]]:
        tokenizer = build_tokenizer(self.header)
        if len(tokenizer) > self.config["vocab_size"]:
            raise CheckpointError(
                f"{files.path}: it has {len(tokenizer)} tokens, but embeds only {self.config['vocab_size']}"
            )
        model, config = load_gguf(self.header)
        return model, tokenizer, config

    def defaults(self, files: LocalFiles, end_ids: Iterable[int]) -> tuple[dict[str, Any], tuple[str, ...]]:
        return gguf_defaults(self.header, end_ids)


def read_folder_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; raises `CheckpointError` unless it is an object that names a model_type."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: is not valid JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{file}: names no model_type, so it is no language model's config")
    return config


def refuse_code(files: LocalFiles, config: dict[str, Any]) -> None:
    """Raise `CheckpointError` when the checkpoint wants a Python file of its own to be run."""
    if (file := config.get("model_file")) is not None:
        raise CheckpointError(
            f"{files.name}: its config.json asks to run {file!r} of its own (model_file); dspark never runs code from "
            "a checkpoint"
        )


def knows_mlx_lm(config: dict[str, Any]) -> bool:
    """Whether the installed mlx-lm has this model_type; its module is not imported."""
    from mlx_lm.utils import MODEL_REMAPPING

    name = str(MODEL_REMAPPING.get(config["model_type"], config["model_type"]))
    return bool(re.fullmatch(r"\w[\w-]*", name)) and importlib.util.find_spec(f"mlx_lm.models.{name}") is not None


def require_mlx_lm_family(files: LocalFiles, config: dict[str, Any]) -> None:
    """Raise `CheckpointError` unless mlx-lm has this model_type; its module is not imported."""
    from mlx_lm import models

    kind = config["model_type"]
    if not knows_mlx_lm(config):
        families = [module.name for module in pkgutil.iter_modules(models.__path__)]
        raise CheckpointError(
            f"{files.name}: its model_type {kind!r} is none that the installed mlx-lm knows"
            f"{did_you_mean(kind, families)}; a newer mlx-lm may know it (pip install -U mlx-lm)"
        )


def first_lines(error: BaseException, limit: int = 300) -> str:
    """An exception's text in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
