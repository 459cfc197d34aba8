"""A GGUF file opened through the `gguf` library: metadata as plain values, tensors mapped, damage as typed errors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField, ReaderTensor

from drumline.model.errors import ModelLoadError


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in the file: `shape` in elements, outermost first; `data` as the library maps it."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: npt.NDArray[Any]


@dataclass(frozen=True)
class GgufFile:
    """What `read_gguf` found, by name."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


class _Reader(GGUFReader):
    """Slices of a memory map carry its class along, which takes half of the time of a file with a vocabulary: read
    plain ones."""

    @property  # type: ignore[override]
    def data(self) -> npt.NDArray[Any]:
        """The file's bytes."""
        return self._data

    @data.setter
    def data(self, mapped: npt.NDArray[Any]) -> None:
        self._data = mapped.view(np.ndarray)


def read_gguf(path: Path) -> GgufFile:
    """Open `path`; raises `ModelLoadError` for whatever is not a whole GGUF file."""
    try:
        reader = _Reader(path)
        metadata = {name: _value(field) for name, field in reader.fields.items()}
    except Exception as error:  # the library meets damage with whatever numpy and its own lookups raise
        raise ModelLoadError(
            f"not a whole GGUF file: it ends too early or is damaged ({type(error).__name__}: {error})"
        ) from error
    return GgufFile(metadata, {tensor.name: _stored(tensor) for tensor in reader.tensors})


def _value(field: ReaderField) -> Any:
    """A metadata value. A float32 reads as the shortest decimal that means it: 1e-5 is 1e-5."""
    if field.types[0] == GGUFValueType.FLOAT32:
        return float(str(np.float32(field.contents())))
    return field.contents()


def _stored(tensor: ReaderTensor) -> StoredTensor:
    shape = tuple(int(length) for length in reversed(tensor.shape))
    if 0 in shape:
        raise ModelLoadError(f"tensor {tensor.name} is empty: its dimensions are {list(shape)}")
    return StoredTensor(tensor.name, tensor.tensor_type, shape, tensor.data)
