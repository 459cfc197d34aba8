"""The header of a GGUF file: metadata, and where each tensor's blocks lie in the mapped file.

Written from the specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3). The
`gguf` library's own reader takes seconds over a vocabulary, and does not notice where a damaged file ends.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from drumline.model.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in the file: `shape` in elements, outermost first; `data` uint8 `[..., bytes of a row]`."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GgufFile:
    """What `read_gguf` found, by name."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of `path` and map its tensors; raises `ModelLoadError` for whatever is not a whole GGUF file."""
    try:
        with path.open("rb") as stream:
            cursor = _Cursor(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelLoadError(f"not a GGUF file: {error}") from error
    if bytes(cursor.raw(4)) != _MAGIC:
        raise ModelLoadError("not a GGUF file: it does not begin with the letters GGUF")
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ModelLoadError(f"GGUF version {version} is not served (little-endian 2 and 3 are)")
    tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        name = cursor.string()
        metadata[name] = cursor.value(name)
    headers = [_tensor_header(cursor) for _ in range(tensor_count)]
    start = _aligned(cursor.position, metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    tensors = {name: _stored(cursor, name, kind, shape, start + offset) for name, kind, shape, offset in headers}
    if len(tensors) != tensor_count:
        raise ModelLoadError("not a whole GGUF file: a tensor's name occurs twice")
    return GgufFile(metadata, tensors)


class _Cursor:
    """Reads forward through the mapped file, and never past its end."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.position = 0

    def raw(self, size: int) -> memoryview:
        """The next `size` bytes."""
        begin, self.position = self.position, self.position + size
        if self.position > len(self.buffer):
            raise ModelLoadError(f"not a whole GGUF file: it ends at byte {len(self.buffer)}, inside its header")
        return memoryview(self.buffer)[begin : self.position]

    def scalar(self, form: str) -> Any:
        """One little-endian number of a `struct` format."""
        return struct.unpack("<" + form, self.raw(struct.calcsize("<" + form)))[0]

    def string(self) -> str:
        """A length and that many bytes of UTF-8."""
        try:
            return str(self.raw(self.scalar("Q")), "utf-8")
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"not a whole GGUF file: a string is not UTF-8 ({error.reason})") from error

    def value(self, name: str) -> Any:
        """A typed metadata value. A float32 reads as the shortest decimal that means it: 1e-5 is 1e-5."""
        kind = self._kind(name)
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.FLOAT32:
            return float(str(np.float32(self.scalar("f"))))
        if kind != GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[kind])
        kind, count = self._kind(name), self.scalar("Q")
        if kind == GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        if kind == GGUFValueType.ARRAY:
            raise ModelLoadError(f"GGUF metadata {name}: arrays of arrays are not served")
        element = np.dtype(_SCALARS[kind]).newbyteorder("<")
        return np.frombuffer(self.raw(count * element.itemsize), element).tolist()

    def _kind(self, name: str) -> GGUFValueType:
        number = self.scalar("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise ModelLoadError(f"not a whole GGUF file: metadata {name} has an unknown type {number}") from None


def _tensor_header(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Name, type number, shape (the file counts the innermost dimension first) and offset into the data."""
    name, dimensions = cursor.string(), cursor.scalar("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ModelLoadError(f"tensor {name} has {dimensions} dimensions; GGUF knows 1 to {_MAX_DIMENSIONS}")
    shape = tuple(cursor.scalar("Q") for _ in range(dimensions))
    return name, cursor.scalar("I"), shape[::-1], cursor.scalar("Q")


def _aligned(position: int, alignment: object) -> int:
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelLoadError(f"GGUF metadata general.alignment must be a positive whole number, not {alignment!r}")
    return -(-position // alignment) * alignment


def _stored(cursor: _Cursor, name: str, number: int, shape: tuple[int, ...], begin: int) -> StoredTensor:
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ModelLoadError(f"tensor {name} has an unknown type {number}") from None
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_size:
        raise ModelLoadError(
            f"tensor {name}: rows of {shape[-1]} are no multiple of {kind.name}'s block of {block_size}"
        )
    row_bytes = shape[-1] // block_size * block_bytes
    size = math.prod(shape[:-1]) * row_bytes
    if begin + size > len(cursor.buffer):
        raise ModelLoadError(f"not a whole GGUF file: it ends at byte {len(cursor.buffer)}, inside tensor {name}")
    data = np.frombuffer(cursor.buffer, np.uint8, size, begin).reshape(*shape[:-1], row_bytes)
    return StoredTensor(name, kind, shape, data)
