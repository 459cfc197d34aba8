"""A model's tensors under one set of names, whatever family or file they came from.

Linear weights are `[out, in]`, as `torch.nn.functional.linear` takes them. Projections that read the same input are
stacked along `out`: query, key, value in `qkv`; gate, up in `up` where the feed-forward is gated.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from torch import Tensor

Take = Callable[[str, tuple[int, ...]], Tensor]
"""Reads one tensor by its Hugging Face name as float32, checked to have that shape; raises `ModelLoadError`."""


@dataclass(frozen=True)
class LayerWeights:
    """One block. Biases and the query/key norms are None where the family has none."""

    attention_norm: Tensor  # [width]
    qkv: Tensor  # [query_width + 2 * kv_width, width]
    output: Tensor  # [width, query_width]
    mlp_norm: Tensor  # [width]
    up: Tensor  # [2 * ffn_width or ffn_width, width]
    down: Tensor  # [width, ffn_width]
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
    """All tensors of a model; `head` is `embedding` itself where they are tied."""

    embedding: Tensor  # [vocab_size, width]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [width]
    head: Tensor  # [vocab_size, width]
    position_embedding: Tensor | None = None  # [window, width]
    final_norm_bias: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Every distinct tensor once (a tied head is not counted twice)."""
        seen: set[int] = set()
        owners: tuple[Weights | LayerWeights, ...] = (self, *self.layers)
        for owner in owners:
            for item in fields(owner):
                tensor = getattr(owner, item.name)
                if isinstance(tensor, Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "Weights":
        """The same weights with `change` applied to each tensor; tied tensors stay tied."""
        done: dict[int, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in done:
                done[id(tensor)] = change(tensor)
            return done[id(tensor)]

        layers = tuple(replace(layer, **_mapped(layer, once)) for layer in self.layers)
        return replace(self, layers=layers, **_mapped(self, once))


def _mapped(owner: Weights | LayerWeights, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    named = ((item.name, getattr(owner, item.name)) for item in fields(owner))
    return {name: change(tensor) for name, tensor in named if isinstance(tensor, Tensor)}
