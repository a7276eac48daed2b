"""Read a drafter's tensors into arrays under the parameters' names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dspark.checkpoints.dialects.source import Source
from dspark.checkpoints.dialects.weights import Weight, Weights
from dspark.errors import CheckpointError
from dspark.models.heads.config import HeadConfig
from dspark.models.heads.nvfp4 import Nvfp4Linear

Fetch = Callable[[str], mx.array]


def load_arrays(source: Source, weights: Weights, dtype: mx.Dtype) -> tuple[dict[str, mx.array], dict[str, nn.Module]]:
    """Plain parameters in `dtype` by name, and the modules that stand for packed ones by path. Lazy, but for a GGUF."""
    fetch = _gguf(source) if source.gguf else _safetensors(source)
    arrays: dict[str, mx.array] = {}
    packed: dict[str, nn.Module] = {}
    for name, weight in weights.items():
        if weight.encoding == "plain":
            array = fetch(weight.stored[""])
            arrays[name] = array if name == "d2t" else array.astype(dtype)
        else:
            path = name.removesuffix(".weight")
            packed[path] = _nvfp4(weight, fetch) if weight.encoding == "nvfp4" else _mlx(path, weight, fetch, dtype)
    return arrays, packed


def target_ids(source: Source, config: HeadConfig, offsets: mx.array | None) -> mx.array | None:
    """The target's token for each row of a reduced lm_head: its place plus d2t. Checked against the vocabulary."""
    if offsets is None:
        return None
    ids = np.arange(offsets.size) + np.array(offsets, dtype=np.int64).reshape(-1)
    if config.draft_vocab_size is None:
        if ids.size != config.vocab_size or (ids != np.arange(ids.size)).any():
            raise CheckpointError(
                f"{source.path}: d2t moves rows of a whole vocabulary; fetch the whole checkpoint again"
            )
        return None
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(np.unique(ids)) < ids.size:
        raise CheckpointError(
            f"{source.path}: d2t leads outside the {config.vocab_size} tokens or twice to one; fetch the checkpoint again"
        )
    return mx.array(ids.astype(np.int32))


def _safetensors(source: Source) -> Fetch:
    files: dict[Path, Any] = {}

    def fetch(name: str) -> mx.array:
        file = source.tensors[name].file
        if file not in files:
            try:
                files[file] = mx.load(str(file))
            except (RuntimeError, ValueError) as error:
                raise CheckpointError(f"{file}: cannot be loaded ({error}); fetch it again") from None
        return files[file][name]

    return fetch


def _gguf(source: Source) -> Fetch:
    """Floats of a GGUF file, whose header has been checked; packed ones were refused before."""
    assert source.gguf is not None
    infos, path = source.gguf.tensors, source.path

    def fetch(name: str) -> mx.array:
        info = infos[name]
        kind = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[info.type]
        array = np.fromfile(path, kind, count=info.size, offset=info.offset)
        if array.size < info.size:
            raise CheckpointError(f"{path}: it became shorter while {name!r} was read; fetch it again")
        array = mx.array(array.reshape(info.shape))
        return array.view(mx.bfloat16) if info.type == "BF16" else array

    return fetch


def _nvfp4(weight: Weight, fetch: Fetch) -> Nvfp4Linear:
    """modelopt's bytes as MLX reads them: nibbles in words, scales as they are."""
    nibbles = fetch(weight.stored[""]).view(mx.uint32)
    scales = fetch(weight.stored["scales"]).view(mx.uint8)
    return Nvfp4Linear(nibbles, scales, fetch(weight.stored["scale_2"]).astype(mx.float32).reshape(()))


def _mlx(path: str, weight: Weight, fetch: Fetch, dtype: mx.Dtype) -> nn.Module:
    rows, columns = weight.shape
    table = path.endswith(("embed_tokens", "markov_w1"))
    size, bits = weight.group_size, weight.bits
    module: Any
    if table:
        module = nn.QuantizedEmbedding(1, columns, size, bits)
        module.num_embeddings = rows
    else:
        module = nn.QuantizedLinear(columns, 1, False, size, bits)
    module.weight = fetch(weight.stored[""])
    module.scales, module.biases = (fetch(weight.stored[r]).astype(dtype) for r in ("scales", "biases"))
    return module
