"""A model's tensors under one set of names, whatever family or file they came from.

Linear weights are `[out, in]`, as `torch.nn.functional.linear` takes them, or quantised. Projections that read the
same input are stacked along `out`: query, key, value in `qkv`; gate, up in `up` where the feed-forward is gated.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

Take = Callable[[str, tuple[int, ...]], Tensor]
"""Reads one tensor by its Hugging Face name as float32, checked to have that shape; raises `ModelLoadError`."""


@dataclass(frozen=True)
class QuantisedWeight:
    """A linear weight in int8, one scale an output channel, which multiplies int8 activations, one scale a token.

    What it computes of a token x (a bias is added after it): x ← x · multiplier; then the orthonormal Hadamard
    transform of each block of `rotation` values; s ← max|x| / 127, q ← rint(x / s), ties to even; the product
    q · codesᵀ in whole numbers, which is exact in any order; that · scales · s. `codes` are −127 … 127, of a weight
    whose input channels were transformed the other way (`model/quantise.py`), so only rounding remains.
    Sources: Xiao et al. 2022 (SmoothQuant), Ashkboos et al. 2024 (QuaRot).
    """

    codes: Tensor  # int8 [out, in]
    scales: Tensor  # float32 [out]
    rotation: int = 1  # a power of two that divides `in`; 1: none
    multiplier: Tensor | None = None  # float32 [in]; None: ones

    @property
    def shape(self) -> tuple[int, ...]:
        """`(out, in)`, as a tensor's."""
        return tuple(self.codes.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in (self.codes, self.scales, self.multiplier) if tensor is not None)


LinearWeight = Tensor | QuantisedWeight
"""What a linear slot holds; `layers.linear` interprets both."""


@dataclass(frozen=True)
class LayerWeights:
    """One block. Biases and the query/key norms are None where the family has none."""

    attention_norm: Tensor  # [width]
    qkv: LinearWeight  # [query_width + 2 * kv_width, width]
    output: LinearWeight  # [width, query_width]
    mlp_norm: Tensor  # [width]
    up: LinearWeight  # [2 * ffn_width or ffn_width, width]
    down: LinearWeight  # [width, ffn_width]
    attention_norm_bias: Tensor | None = None
    qkv_bias: Tensor | None = None
    query_norm: Tensor | None = None  # [head_dim]
    key_norm: Tensor | None = None  # [head_dim]
    output_bias: Tensor | None = None
    mlp_norm_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True)
class Weights:
    """All tensors of a model; `head` is `embedding` itself where they are tied, unless it is quantised."""

    embedding: Tensor  # [vocab_size, width]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [width]
    head: LinearWeight  # [vocab_size, width]
    position_embedding: Tensor | None = None  # [window, width]
    final_norm_bias: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Every distinct tensor once (a tied head is not counted twice), those inside quantised weights too."""
        seen: set[int] = set()
        owners: list[object] = [self, *self.layers]
        for owner in owners:
            for value in _values(owner).values():
                if isinstance(value, QuantisedWeight):
                    owners.append(value)
                elif isinstance(value, Tensor) and id(value) not in seen:
                    seen.add(id(value))
                    yield value

    def map(self, change: Callable[[Tensor], Tensor]) -> "Weights":
        """The same weights with `change` applied to each tensor, int8 codes included; tied tensors stay tied."""
        done: dict[int, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in done:
                done[id(tensor)] = change(tensor)
            return done[id(tensor)]

        layers = tuple(replace(layer, **_mapped(layer, once)) for layer in self.layers)
        return replace(self, layers=layers, **_mapped(self, once))


def _values(owner: Any) -> dict[str, Any]:
    return {item.name: getattr(owner, item.name) for item in fields(owner)}


def _mapped(owner: Any, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, value in _values(owner).items():
        if isinstance(value, Tensor):
            changed[name] = change(value)
        elif isinstance(value, QuantisedWeight):
            changed[name] = replace(value, **_mapped(value, change))
    return changed
