"""Typed reading of a checkpoint's settings: a missing or misshapen one is a `ModelLoadError` that names it."""

import math
from collections.abc import Mapping
from typing import Any

from drumline.model.config import Activation
from drumline.model.errors import ModelLoadError

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class Settings:
    """A Hugging Face `config.json`, or a part of it. A null reads as missing; without a default a key is required."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, name: str) -> Any:
        """The raw value, None where there is none."""
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelLoadError(f"setting {name} must be a positive whole number, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ModelLoadError(f"setting {name} must be a number above zero, not {value!r}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A finite number of any sign, or None."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelLoadError(f"setting {name} must be a number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ModelLoadError(f"setting {name} must be true or false, not {value!r}")
        return value

    def activation(self, name: str, default: str) -> Activation:
        """One of the activations that the backends compute."""
        value = self._value(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise ModelLoadError(f"setting {name}: activation {value!r} is not served; known: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def part(self, name: str) -> "Settings | None":
        """The nested settings under `name`; None where they are absent, null or empty."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ModelLoadError(f"setting {name} must be an object, not {value!r}")
        return Settings(value) if value else None

    def names(self) -> tuple[str, ...]:
        """The keys that are present."""
        return tuple(self._values)

    def _value(self, name: str, default: object) -> object:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"setting {name} is missing")
        return value
