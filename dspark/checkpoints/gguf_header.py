"""Read and check the header of a GGUF file, in Python, before anything else looks at it.

`mx.load` trusts every count and offset in the file and takes the process down with it when one is wrong; here each is
held against the file's size first, so that a damaged or crafted file ends in one sentence.

Layout (GGUF versions 2 and 3, little-endian): magic, version, tensor count, key count; the keys with their values; for
each tensor its name, dimensions (innermost first), type and offset; padding to the alignment; the data.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from dspark.errors import CheckpointError

VERSIONS = (2, 3)
MAX_COUNT = 1 << 20
MAX_NAME = 1 << 16
MAX_DIMS = 4

# name, weights in a block, bytes of a block; of these dspark reads SUPPORTED.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    30: ("BF16", 1, 2),
}  # fmt: skip
SUPPORTED = ("F32", "F16", "Q4_0", "Q4_1", "Q8_0")

# Value types of metadata: struct code and numpy type; strings (8) and arrays (9) apart.
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9


class TensorInfo(NamedTuple):
    """One tensor of the file. `shape` is outermost first; `offset` counts from the start of the file, in bytes."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class GgufHeader(NamedTuple):
    """What a GGUF file says about itself: plain Python values (numeric arrays as numpy), and its tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def float32_nbytes(self) -> int:
        return sum(t.size * 4 for t in self.tensors.values())


def read_header(path: Path) -> GgufHeader:
    """Read the header of `path`; raises `CheckpointError` with what is wrong and where. Reads no tensor data."""
    try:
        with open(path, "rb") as file:
            return _Reader(file, path).header()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Reader:
    """A cursor over the file that never reads past its end."""

    def __init__(self, file: BinaryIO, path: Path):
        self.file, self.path = file, path
        self.size = file.seek(0, 2)
        self.at = file.seek(0)

    def header(self) -> GgufHeader:
        n_tensors, n_keys = self.counts()
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self.string("a key", MAX_NAME)
            if key in metadata:
                raise self.fault(f"the key {key!r} stands in it twice")
            metadata[key] = self.value(self.scalar("<u4", f"the type of {key!r}"), key)
        raw = [self.tensor_info() for _ in range(n_tensors)]
        alignment = self.alignment(metadata)
        start = math.ceil(self.at / alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in raw:
            if info.name in tensors:
                raise self.fault(f"the tensor {info.name!r} stands in it twice")
            tensors[info.name] = self.placed(info, start, alignment)
        return GgufHeader(self.path, metadata, tensors)

    def counts(self) -> tuple[int, int]:
        magic = self.take(4, "the magic number")
        if magic != b"GGUF":
            raise self.fault(f"no GGUF file (it begins with {magic!r})")
        version = self.scalar("<u4", "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "big"), "little") in VERSIONS
            what = "it is big-endian" if swapped else f"its GGUF version is {version}"
            raise self.fault(f"{what}; versions 2 and 3, little-endian, can be read")
        n_tensors, n_keys = self.scalar("<u8", "the tensor count"), self.scalar("<u8", "the key count")
        for what, count in (("tensors", n_tensors), ("keys", n_keys)):
            if count > MAX_COUNT:
                raise self.fault(f"it claims {count} {what}; at most {MAX_COUNT} can be")
        return n_tensors, n_keys

    def alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise self.fault(f"general.alignment is {alignment!r}; it must be a power of two from 8 to 65536")
        return alignment

    def tensor_info(self) -> TensorInfo:
        name = self.string("a tensor's name", MAX_NAME)
        n_dims = self.scalar("<u4", f"the dimensions of {name!r}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.fault(f"the tensor {name!r} has {n_dims} dimensions; 1 to {MAX_DIMS} can be")
        shape = tuple(self.scalar("<u8", f"the dimensions of {name!r}") for _ in range(n_dims))[::-1]
        kind, offset = self.scalar("<u4", f"the type of {name!r}"), self.scalar("<u8", f"the offset of {name!r}")
        if not all(shape) or math.prod(shape) >= 1 << 48:
            raise self.fault(f"the tensor {name!r} has the impossible shape {shape}")
        if kind not in TYPES:
            raise self.fault(f"the tensor {name!r} is of type {kind}; {self.readable()}")
        type_name, block, block_nbytes = TYPES[kind]
        if shape[-1] % block:
            raise self.fault(f"the rows of {name!r} ({type_name}) have {shape[-1]} weights, no multiple of {block}")
        return TensorInfo(name, type_name, shape, offset, math.prod(shape) // block * block_nbytes)

    def placed(self, info: TensorInfo, start: int, alignment: int) -> TensorInfo:
        if info.offset % alignment:
            raise self.fault(f"the tensor {info.name!r} starts at {info.offset}, no multiple of {alignment}")
        end = start + info.offset + info.nbytes
        if end > self.size:
            raise self.fault(
                f"it ends after {self.size} bytes, but the tensor {info.name!r} reaches to {end}; fetch it again"
            )
        return info._replace(offset=start + info.offset)

    def value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self.string(f"the value of {key!r}")
        if kind == ARRAY:
            return self.array(key)
        if kind not in SCALARS:
            raise self.fault(f"the value of {key!r} has the unknown type {kind}")
        return self.scalar(SCALARS[kind], f"the value of {key!r}")

    def array(self, key: str) -> Any:
        what = f"the array {key!r}"
        kind, count = self.scalar("<u4", what), self.scalar("<u8", what)
        if kind == STRING:
            # Every string takes 8 bytes at least, so a larger count cannot be true.
            self.check(count * 8, what)
            return [self.string(what) for _ in range(count)]
        if kind not in SCALARS:
            raise self.fault(f"{what} holds the type {kind}; numbers and strings can be read")
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.scalar("<u8", what)
        if limit is not None and length > limit:
            raise self.fault(f"{what} claims {length} bytes; at most {limit} can be")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault(f"{what} is not UTF-8") from None

    def scalar(self, code: str, what: str) -> Any:
        dtype = _DTYPES[code]
        return dtype.unpack(self.take(dtype.size, what))[0]

    def take(self, count: int, what: str) -> bytes:
        self.check(count, what)
        self.at += count
        data = self.file.read(count)
        if len(data) < count:
            raise self.fault("it became shorter while it was read; fetch it again")
        return data

    def check(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise self.fault(f"it ends after {self.size} bytes, within {what}; fetch it again")

    def readable(self) -> str:
        return f"{', '.join(SUPPORTED)} can be read"

    def fault(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {text}")


_STRUCT = {"u1": "B", "i1": "b", "<u2": "<H", "<i2": "<h", "<u4": "<I", "<i4": "<i", "<f4": "<f", "?": "?"}
_STRUCT |= {"<u8": "<Q", "<i8": "<q", "<f8": "<d"}
_DTYPES = {code: struct.Struct(fmt) for code, fmt in _STRUCT.items()}
