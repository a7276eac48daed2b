"""Read the packed vectors of tests/parity, and write a set's drafter to disk as it is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

FOLDER = Path(__file__).parent / "parity"
ROUNDS = (1, 2, 3)


class VectorSet(NamedTuple):
    """config: config.json; weights, target, arrays: by published name; index: what else the set says; gguf: its bytes."""

    config: dict[str, Any]
    weights: dict[str, np.ndarray]
    target: dict[str, np.ndarray]
    arrays: dict[str, np.ndarray]
    index: dict[str, Any]
    gguf: bytes | None = None

    def round(self, r: int) -> dict[str, np.ndarray]:
        """The arrays of one round, without its prefix."""
        return {name[3:]: array for name, array in self.arrays.items() if name.startswith(f"r{r}_")}

    def write(self, folder: Path, config: Any = None, weights: dict[str, np.ndarray] | None = None) -> Path:
        """A folder with config.json and model.safetensors; `config` and `weights` replace the set's own."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config if config is None else config))
        arrays = self.weights if weights is None else weights
        mx.save_safetensors(str(folder / "model.safetensors"), {k: mx.array(v) for k, v in arrays.items()})
        return folder


def read_set(name: str) -> VectorSet:
    with np.load(FOLDER / f"{name}.npz") as file:
        index, planes = json.loads(bytes(file["index"])), file["planes"]
        gguf = bytes(np.ascontiguousarray(file["gguf"].T)) if "gguf" in file else None
    words = np.ascontiguousarray(planes.T).view("<u4")[:, 0]
    found = {key: _unpack(words, *entry) for key, entry in index["arrays"].items()}
    part = lambda p: {key[2:]: array for key, array in found.items() if key.startswith(p)}
    own = VectorSet(index["config"], part("w:"), part("t:"), part("f:"), index, gguf)
    if "like" not in index:
        return own
    base = read_set(index["like"])
    merged = [{**old, **new} for old, new in zip(base[1:4], own[1:4], strict=True)]
    return VectorSet(own.config, *merged, index)


def _unpack(words: np.ndarray, at: int, shape: list[int], grid: float) -> np.ndarray:
    part = words[at : at + int(np.prod(shape, dtype=np.int64))]
    if grid == -1:
        return part.view(np.float32).reshape(shape)
    whole = (part >> 1).astype(np.int64) ^ -(part & 1).astype(np.int64)
    return whole.reshape(shape) if grid == 0 else (whole * grid).astype(np.float32).reshape(shape)
