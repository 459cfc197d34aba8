"""The exact backend: int8 products in whole numbers, everything else in fused kernels, each token's bits its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import torch

from drumline.model.backends.arrays import describe, layer_vectors, make_buffers, quantised, slot, stacked
from drumline.model.backends.products import PanelStack, choose_product, multiply_rate
from drumline.model.batch import Segment, StepBatch, StepOutput
from drumline.model.kernels.attention import attend, quantise_mixed
from drumline.model.kernels.attention_tiles import QUERIES
from drumline.model.kernels.compile import use_threads
from drumline.model.kernels.feed_forward import feed
from drumline.model.kernels.layers import FEW, Buffers, Floats, Panels, Store, Whole, Work, run_layers
from drumline.model.kernels.norm import normalise
from drumline.model.kernels.rope import write
from drumline.model.kernels.store import TiledKV, padded
from drumline.model.language_model import LanguageModel
from drumline.model.openmp import LOCK


class CpuBackend:
    """Interprets an int8 model's description with kernels in which no token's numbers depend on another request's.

    A step's linear layers, norms and activations run over all its tokens packed, its attention over each row's own
    length. Works on a `TiledKV`. Raises `NoExactProduct` on a machine that has none.
    """

    name = "cpu"
    exact = True

    def __init__(self, model: LanguageModel) -> None:
        self.timings: dict[str, float] | None = None
        """Set to a dict to have each step add the seconds of its phases; costs a call from Python for each phase."""
        self._model, self._config, weights = model, model.config, model.weights
        self._product = choose_product()
        self._shape, self._vectors = describe(model.config, weights), layer_vectors(model)
        self._qkv, self._output, self._up, self._down = (
            self._product.stack(slot(weights, name, multiplied=name == "down" and not model.config.gated))
            for name in ("qkv", "output", "up", "down")
        )
        head = quantised(weights.head)
        self._head, self._head_rotation = self._product.stack([head]), head.rotation
        self._final_norm = stacked([weights.final_norm], model.config.width)[0]
        self._final_norm_bias = stacked([weights.final_norm_bias], model.config.width)[0]
        self._buffers: Buffers | None = None
        self._logits = np.zeros((0, padded(model.config.vocab_size)), np.float32)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: TiledKV) -> StepOutput:
        """One pass over all layers; each token attends to its own row up to itself."""
        logits = self.logits_at(batch, kv, batch.wanted())
        cells = sum(s.length * (s.position + s.end + 1) // 2 for s in batch.segments)
        return StepOutput(torch.from_numpy(logits), real_cells=cells, padded_cells=cells)

    def logits_at(self, batch: StepBatch, kv: TiledKV, wanted: Sequence[int]) -> Floats:
        """Compute a batch; the logits `[wanted, vocab]` of the packed tokens at these indices, valid until the next.

        Raises `ValueError` for a segment outside the store or the window: kernels write where they are told.
        """
        for segment in batch.segments:
            _check(segment, kv.keys.shape[1], self._model.window)
        with LOCK:
            threads = use_threads()
            tokens = batch.tokens
            buffers = self._room_for(tokens, threads, kv)
            with self._timed("embedding"):
                work = self._prepare(batch, buffers)
            store = Store(kv.keys, kv.values, kv.key_scales, kv.value_scales, kv.scaled)
            if self.timings is None and isinstance(self._qkv, PanelStack):
                run_layers(tokens, threads, self._shape, self._vectors, self._panels(), buffers, work, store)
            else:
                for layer in range(self._config.layers):
                    self._run_layer(layer, tokens, threads, buffers, work, store)
            return self._head_logits(np.asarray(wanted, np.int64), threads, buffers)

    def product_rate(self) -> float:
        """Multiply-adds a second of this machine's exact product on a large shape, measured now."""
        with LOCK:
            use_threads()
            multiply, count = multiply_rate(self._product)
            multiply()
            started = perf_counter()
            multiply()
            return count / (perf_counter() - started)

    @property
    def arithmetic(self) -> str:
        """The backend and its exact product."""
        return f"{self.name} {self._product.name}"

    def _panels(self) -> Panels:
        stacks = (self._qkv, self._output, self._up, self._down)
        arrays: list[Any] = [a for s in stacks if isinstance(s, PanelStack) for a in (s.panels, s.scales)]
        return Panels(*arrays)

    def _room_for(self, tokens: int, threads: int, kv: TiledKV) -> Buffers:
        buffers = self._buffers
        fits = buffers is not None and len(buffers.hidden) >= tokens and len(buffers.scratch) >= threads
        if buffers is None or not fits or buffers.staging.dtype != kv.keys.dtype:
            room = max(16, 1 << (tokens - 1).bit_length())
            buffers = self._buffers = make_buffers(
                self._config, self._model.window, room, threads, self._product.code_type, kv.keys.dtype
            )
        return buffers

    def _prepare(self, batch: StepBatch, buffers: Buffers) -> Work:
        """Embed the tokens, and list what each is and which tasks attention has."""
        ids, rows, positions = batch.packed()
        weights, width = self._model.weights, self._config.width
        hidden = buffers.hidden[: len(ids), :width]
        hidden[:] = weights.embedding.numpy()[ids]
        if weights.position_embedding is not None:
            hidden += weights.position_embedding.numpy()[positions]
        tasks = attention_tasks(batch.segments, self._config.kv_heads, max(1, QUERIES // self._config.group))
        longest_first = np.argsort(-tasks[:, 2] * (tasks[:, 4] + tasks[:, 2]), kind="stable")
        return Work(np.asarray(rows), np.asarray(positions), tasks, longest_first)

    def _run_layer(self, layer: int, tokens: int, threads: int, b: Buffers, work: Work, store: Store) -> None:
        """What `run_layers` does for one layer, kernel by kernel: for other products, and to be timed."""
        s, v, few = self._shape, self._vectors, 1 if tokens <= FEW else threads
        kv = (store.keys[layer], store.values[layer], store.key_scales[layer], store.value_scales[layer], store.scaled)
        with self._timed("norm"):
            normalise(
                tokens, few, layer > 0, b.hidden, b.update, v.down_bias[max(layer - 1, 0)], v.attention_norm[layer],
                v.attention_norm_bias[layer], s.eps, s.width, s.centred, s.qkv_rotation, b.scratch, b.codes, b.scales,
            )  # fmt: skip
        with self._timed("linear"):
            self._qkv.multiply(layer, tokens, b.codes, b.scales, b.qkv)
        with self._timed("rope"):
            write(
                tokens, few, b.qkv, v.qkv_bias[layer], s.heads, s.kv_heads, s.head_dim, s.query_scale,
                v.query_norm[layer], v.key_norm[layer], s.eps, s.head_normed, s.rotary, v.cosine, v.sine, work.rows,
                work.positions, b.scratch, b.staging, b.queries, *kv,
            )  # fmt: skip
        with self._timed("attention"):
            attend(threads, work.tasks, work.order, s.head_dim, b.queries, *kv, b.scores, b.mixed)
            quantise_mixed(tokens, few, b.mixed, s.head_dim, s.output_rotation, b.scratch, b.mixed_codes, b.scales)
        with self._timed("linear"):
            self._output.multiply(layer, tokens, b.mixed_codes, b.scales, b.update)
        with self._timed("norm"):
            normalise(
                tokens, few, True, b.hidden, b.update, v.output_bias[layer], v.mlp_norm[layer],
                v.mlp_norm_bias[layer], s.eps, s.width, s.centred, s.up_rotation, b.scratch, b.codes, b.scales,
            )  # fmt: skip
        with self._timed("linear"):
            self._up.multiply(layer, tokens, b.codes, b.scales, b.up)
        with self._timed("feed_forward"):
            feed(
                tokens, few, b.up, v.up_bias[layer], s.ffn_width, s.gated, s.activation, v.down_multiplier[layer],
                s.down_rotation, b.scratch, b.ffn_codes, b.scales,
            )  # fmt: skip
        with self._timed("linear"):
            self._down.multiply(layer, tokens, b.ffn_codes, b.scales, b.update)

    def _head_logits(self, wanted: Whole, threads: int, b: Buffers) -> Floats:
        """Final norm and head over the wanted tokens alone."""
        lines, s = len(wanted), self._shape
        if len(self._logits) < lines:
            self._logits = np.zeros((1 << (lines - 1).bit_length(), self._logits.shape[1]), np.float32)
        hidden, update = b.last_hidden[:lines], b.last_update[:lines]
        np.take(b.hidden, wanted, axis=0, out=hidden, mode="clip")
        np.take(b.update, wanted, axis=0, out=update, mode="clip")
        with self._timed("head"):
            normalise(
                lines, threads, True, hidden, update, self._vectors.down_bias[-1], self._final_norm,
                self._final_norm_bias, s.eps, s.width, s.centred, self._head_rotation, b.scratch, b.codes, b.scales,
            )  # fmt: skip
            self._head.multiply(0, lines, b.codes, b.scales, self._logits)
        return self._logits[:lines, : self._config.vocab_size]

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        timings = self.timings
        if timings is None:
            yield
            return
        started = perf_counter()
        yield
        timings[phase] = timings.get(phase, 0.0) + perf_counter() - started


def _check(segment: Segment, rows: int, window: int) -> None:
    if not 0 <= segment.row < rows:
        raise ValueError(f"row {segment.row} is outside the store's {rows} rows")
    if segment.position < 0 or not segment.position < segment.end <= window:
        raise ValueError(f"tokens {segment.position} … {segment.end - 1} are outside the window of {window}")


def attention_tasks(segments: Sequence[Segment], kv_heads: int, block: int) -> Whole:
    """int64 `[tasks, 5]`: K/V head, first token in the batch, tokens (at most `block`), row, position of the first."""
    pieces, start = [], 0
    for segment in segments:
        pieces += [
            (start + done, min(block, segment.length - done), segment.row, segment.position + done)
            for done in range(0, segment.length, block)
        ]
        start += segment.length
    tasks = np.empty((kv_heads * len(pieces), 5), np.int64)
    tasks[:, 0] = np.repeat(np.arange(kv_heads), len(pieces))
    tasks[:, 1:] = np.tile(np.asarray(pieces, np.int64), (kv_heads, 1))
    return tasks
