"""A drafter's files, their headers read and checked, nothing loaded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import attrs

from dspark.checkpoints.gguf_header import GgufHeader, read_header
from dspark.errors import CheckpointError, SourceError

# Bytes of an element, by the name that safetensors gives its type.
ITEM_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
MAX_HEADER = 100_000_000
MAX_CONFIG = 16_000_000


class Tensor(NamedTuple):
    """One stored tensor: its type as the file spells it, its shape outermost first, the file it is in."""

    dtype: str
    shape: tuple[int, ...]
    file: Path


@attrs.frozen
class Source:
    """A drafter as it lies on disk. `config` is config.json (empty for a GGUF, whose keys are in `gguf.metadata`)."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    gguf: GgufHeader | None = None

    @property
    def config_file(self) -> str:
        """The file that messages about keys name."""
        return str(self.path if self.gguf else self.path / "config.json")


def open_source(path: Path) -> Source:
    """Read the headers of a folder or a GGUF file. Raises SourceError or CheckpointError, one sentence, for what is amiss."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise SourceError(f"{path}: a drafter is a folder with config.json and safetensors, or a .gguf file")
        return _gguf(path)
    if not path.is_dir():
        raise SourceError(f"{path}: no such folder or file")
    if not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _gguf(files[0])
        if files:
            raise SourceError(f"{path}: it holds {len(files)} GGUF files; name the one to use, such as {files[0].name}")
        raise SourceError(f"{path}: there is no config.json in it, so it is no drafter's folder")
    return Source(path, read_json(path / "config.json"), _safetensors(path))


def _gguf(path: Path) -> Source:
    header = read_header(path)
    return Source(path, {}, {t.name: Tensor(t.type, t.shape, path) for t in header.tensors.values()}, header)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that may be anything."""
    try:
        if path.stat().st_size > MAX_CONFIG:
            raise CheckpointError(f"{path}: it is larger than {MAX_CONFIG} bytes, which no such file is")
        value = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{path}: not valid JSON ({reason}); fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: it holds a JSON {type(value).__name__}, not an object; fetch it again")
    return value


def _safetensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        for name, tensor in read_safetensors_header(file).items():
            if name in tensors:
                raise CheckpointError(f"{file}: the tensor {name!r} stands in {tensors[name].file.name} already")
            tensors[name] = tensor
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _indexed(index)
    whole = folder / "model.safetensors"
    files = [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
    if files:
        return files
    others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if others:
        raise CheckpointError(
            f"{folder}: its weights are in {others[0]}; only safetensors are read, so convert them first"
        )
    raise SourceError(f"{folder}: there are no safetensors in it; fetch the whole repository")


def _indexed(index: Path) -> list[Path]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise CheckpointError(f"{index}: weight_map is no table of file names; fetch it again")
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {name!r} is no safetensors file of this folder")
        if not (index.parent / name).is_file():
            raise SourceError(f"{index.parent}: {name} is missing, though {index.name} names it; fetch it too")
    return [index.parent / name for name in names]


def read_safetensors_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, every offset held against the file's size (`mx.load` trusts them)."""
    try:
        with open(file, "rb") as handle:
            return _header(handle, file)
    except OSError as error:
        raise SourceError(f"{file}: cannot be read: {error.strerror or error}") from None


def _header(handle: BinaryIO, file: Path) -> dict[str, Tensor]:
    size = handle.seek(0, 2)
    handle.seek(0)
    length = int.from_bytes(handle.read(8), "little")
    if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
        raise CheckpointError(f"{file}: no safetensors file, or cut short ({size} bytes); fetch it again")
    try:
        entries = json.loads(handle.read(length).decode("utf-8"))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file}: its header is not valid JSON; fetch it again") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: its header is no table; fetch it again")
    entries.pop("__metadata__", None)
    return {name: _tensor(name, entry, size - 8 - length, file) for name, entry in entries.items()}


def _tensor(name: str, entry: Any, data: int, file: Path) -> Tensor:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, span = entry.get("dtype"), _wholes(entry.get("shape")), _wholes(entry.get("data_offsets"))
    if shape is None or span is None or len(span) != 2 or not isinstance(dtype, str):
        raise CheckpointError(f"{file}: the entry of {name!r} is malformed; fetch it again")
    if dtype not in ITEM_SIZES:
        raise CheckpointError(f"{file}: the tensor {name!r} has the type {dtype!r}, which cannot be read")
    if not span[0] <= span[1] <= data or span[1] - span[0] != math.prod(shape) * ITEM_SIZES[dtype]:
        raise CheckpointError(f"{file}: the tensor {name!r} does not lie within the file; fetch it again")
    return Tensor(dtype, shape, file)


def _wholes(values: Any) -> tuple[int, ...] | None:
    good = isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 48 for v in values)
    return tuple(values) if good else None
