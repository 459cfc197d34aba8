"""The portable backend: linear layers on packed tokens, attention on padded rows with an explicit mask."""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from drumline.model.batch import KVStore, Segment, StepBatch, StepOutput
from drumline.model.language_model import LanguageModel
from drumline.model.layers import feed_forward, linear, normalise, project_qkv, rope_tables, rotate
from drumline.model.openmp import LOCK


@dataclass(frozen=True)
class PaddedRows:
    """Rows that attend together: their queries and keys padded to rectangles, and the mask that hides the padding.

    Decoding rows form one group, prompt chunks another, so a long chunk does not pad every decoding row to its length.
    """

    rows: range | Tensor
    """Pool rows, one per line of the rectangle. A range may hold rows that do not step: reading it costs no copy."""
    tokens: Tensor
    """Where the group's tokens stand in the packed batch."""
    slots: Tensor
    """Where they stand in the rectangle, as line · queries + column."""
    visible: Tensor
    """Bool `[rows, queries, keys]`: which keys a query may see. Padding sees key 0 alone, so softmax stays finite."""
    real_cells: int
    """Query-key pairs that a computation without padding would have had."""

    @property
    def padded_cells(self) -> int:
        """Query-key pairs in the rectangle."""
        return self.visible.numel()


@dataclass(frozen=True)
class PaddedOutput(StepOutput):
    """A step's logits, and the rectangles that attention used."""

    groups: tuple[PaddedRows, ...]


class TorchBackend:
    """Interprets a model's description with torch operators, on any device and dtype.

    Its float products round differently for different batch sizes: the same request gives the same tokens only up to
    near-ties, so it is not exact, whatever the model's precision.
    """

    name = arithmetic = "torch"
    exact = False

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._config = model.config
        self._device = model.device
        rope = model.config.rope
        self._rope = rope and rope_tables(rope, model.config.head_dim, model.window, model.device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: KVStore) -> PaddedOutput:
        """One pass over all layers; each token attends to its own row up to itself."""
        with LOCK if self._device.type == "cpu" else nullcontext():
            return self._forward(batch, kv)

    def _forward(self, batch: StepBatch, kv: KVStore) -> PaddedOutput:
        config, weights = self._config, self._model.weights
        ids, rows, positions = torch.tensor(batch.packed(), device=self._device)
        groups = self._groups(batch)
        masks = [self._additive_mask(group) for group in groups]
        hidden = weights.embedding[ids]
        if weights.position_embedding is not None:
            hidden = hidden + weights.position_embedding[positions]
        rope = self._rope and (self._rope[0][positions], self._rope[1][positions])
        for index, layer in enumerate(weights.layers):
            normed = normalise(config, hidden, layer.attention_norm, layer.attention_norm_bias)
            query, key, value = project_qkv(config, layer, normed)
            if rope:
                query, key = rotate(query, *rope), rotate(key, *rope)
            kv.write(index, rows, positions, key, value)
            mixed = torch.empty_like(query)
            for group, mask in zip(groups, masks, strict=True):
                keys, values = kv.read(index, group.rows, mask.shape[-1])
                attend = self._attend if _sound(group, key, value) else self._attend_around
                mixed[group.tokens] = attend(query[group.tokens], keys, values, group, mask)
            hidden = hidden + linear(mixed.flatten(-2), layer.output, layer.output_bias)
            normed = normalise(config, hidden, layer.mlp_norm, layer.mlp_norm_bias)
            hidden = hidden + feed_forward(config, layer, normed)
        last = hidden[torch.tensor(batch.wanted(), dtype=torch.int64, device=self._device)]
        last = normalise(config, last, weights.final_norm, weights.final_norm_bias)
        return PaddedOutput(
            linear(last, weights.head).float().cpu(),
            real_cells=sum(group.real_cells for group in groups),
            padded_cells=sum(group.padded_cells for group in groups),
            groups=groups,
        )

    def _groups(self, batch: StepBatch) -> tuple[PaddedRows, ...]:
        start = 0
        decoding: list[tuple[Segment, int]] = []
        prompts: list[tuple[Segment, int]] = []
        for segment in batch.segments:
            (decoding if segment.length == 1 else prompts).append((segment, start))
            start += segment.length
        groups = []
        if decoding:
            used = [segment.row for segment, _ in decoding]
            groups.append(self._pad(decoding, range(min(used), max(used) + 1)))
        if prompts:
            groups.append(self._pad(prompts, [segment.row for segment, _ in prompts]))
        return tuple(groups)

    def _pad(self, members: list[tuple[Segment, int]], rows: range | list[int]) -> PaddedRows:
        queries = max(segment.length for segment, _ in members)
        keys = max(segment.end for segment, _ in members)
        line_of = {row: line for line, row in enumerate(rows)}
        last_visible = torch.zeros(len(rows), queries, dtype=torch.int64)
        tokens: list[int] = []
        slots: list[int] = []
        real = 0
        for segment, start in members:
            line = line_of[segment.row]
            last_visible[line, : segment.length] = torch.arange(segment.position, segment.end)
            tokens.extend(range(start, start + segment.length))
            slots.extend(range(line * queries, line * queries + segment.length))
            real += sum(range(segment.position + 1, segment.end + 1))
        visible = torch.arange(keys) <= last_visible[:, :, None]
        return PaddedRows(
            rows=rows if isinstance(rows, range) else torch.tensor(rows, device=self._device),
            tokens=torch.tensor(tokens, device=self._device),
            slots=torch.tensor(slots, device=self._device),
            visible=visible.to(self._device),
            real_cells=real,
        )

    def _additive_mask(self, group: PaddedRows) -> Tensor:
        """`[rows, 1, group · queries, keys]`: the query heads of one K/V head are folded into the query axis."""
        mask = torch.zeros(group.visible.shape, dtype=self._model.dtype, device=self._device)
        mask.masked_fill_(~group.visible, float("-inf"))
        return mask.repeat(1, self._config.group, 1)[:, None]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, group: PaddedRows, mask: Tensor) -> Tensor:
        """Attention of `[tokens, heads, head_dim]` over `[rows, kv_heads, keys, head_dim]`, through the rectangle."""
        rows, queries, _ = group.visible.shape
        heads, kv_heads, width = self._config.heads, self._config.kv_heads, self._config.head_dim
        rectangle = query.new_zeros(rows * queries, heads, width)
        rectangle[group.slots] = query
        folded = rectangle.view(rows, queries, kv_heads, -1, width).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mixed = functional.scaled_dot_product_attention(
            folded, key.to(query.dtype), value.to(query.dtype), attn_mask=mask
        )
        unfolded = mixed.view(rows, kv_heads, -1, queries, width).permute(0, 3, 1, 2, 4)
        return unfolded.reshape(rows * queries, heads, width)[group.slots]

    def _attend_around(self, query: Tensor, key: Tensor, value: Tensor, group: PaddedRows, mask: Tensor) -> Tensor:
        """The same where some keys or values are not finite: they reach the tokens that see them, and none before.

        In the products they would: zero times NaN is NaN. And what stands before them may be another row's prefix.
        """
        broken = ~(key.isfinite() & value.isfinite()).all(-1).all(1)
        hidden = broken[:, None, :, None]
        mixed = self._attend(query, key.masked_fill(hidden, 0), value.masked_fill(hidden, 0), group, mask)
        mixed[(group.visible & broken[:, None]).any(-1).flatten()[group.slots]] = math.nan
        return mixed


def _sound(group: PaddedRows, key: Tensor, value: Tensor) -> bool:
    """Whether no token of a group can see a key or value of this step, `[tokens, kv_heads, head_dim]`, that is not
    finite, and stand before it; nothing stands behind the token of a decoding row."""
    if group.visible.shape[1] == 1:
        return True
    return bool(key[group.tokens].isfinite().all() and value[group.tokens].isfinite().all())
