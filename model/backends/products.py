"""Integer products that are exact on this CPU, and the check that says which one is.

Each takes codes −127 … 127 of tokens and int8 weights and gives float32(Σ codes · weights) · the output's scale · the
token's. The sum is a whole number, so neither the number of tokens nor any order of additions can change a bit of it.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from drumline.model.errors import DrumlineError
from drumline.model.kernels.compile import use_threads
from drumline.model.kernels.layers import Codes, Floats
from drumline.model.kernels.product import pack_panels, product
from drumline.model.kernels.store import padded
from drumline.model.layers import EXACT_IN_FLOAT32
from drumline.model.openmp import LOCK
from drumline.model.weights import QuantisedWeight

BLOCK = EXACT_IN_FLOAT32
"""Inputs of one float32 product."""
_ROWS_TRIED = (1, 2, 3, 5, 7, 8, 16, 31, 33, 64)


class NoExactProduct(DrumlineError):
    """No integer product of this machine passed its check; the message says what each one did."""


class Stack(Protocol):
    """One linear weight of all layers, laid out for a product."""

    def multiply(self, layer: int, tokens: int, codes: Codes, token_scales: Floats, out: Floats) -> None:
        """The first `tokens` lines of `codes` `[≥ tokens, padded inputs]`, each times its scale, into `out`."""


class Product(Protocol):
    """A way to multiply."""

    @property
    def name(self) -> str:
        """How it is called in logs and reports."""

    @property
    def code_type(self) -> type[np.generic]:
        """What the codes are to be written as: uint8 stands for code + 128."""

    @property
    def fast(self) -> bool:
        """Whether it beats float32 products: only then is int8 what `auto` means."""

    def stack(self, weights: Sequence[QuantisedWeight]) -> Stack:
        """Lay out the same slot of every layer."""


class PanelStack:
    """Weights as panels `[layers, bytes]`, which `kernels.layers.run_layers` takes whole."""

    def __init__(self, weights: Sequence[QuantisedWeight]) -> None:
        outputs, inputs = weights[0].shape
        self.panels = np.empty((len(weights), padded(outputs) * padded(inputs)), np.int8)
        self.scales = np.stack([_padded_scales(weight) for weight in weights])
        for panels, weight in zip(self.panels, weights, strict=True):
            pack_panels(_padded_codes(weight), panels)

    def multiply(self, layer: int, tokens: int, codes: Codes, token_scales: Floats, out: Floats) -> None:
        """See `Stack`."""
        product(tokens, codes, token_scales, self.panels[layer], self.scales[layer], out)


class PanelProduct:
    """Our own kernel: int16 pairs, on any x86 CPU with AVX2."""

    name, code_type, fast = "avx2", np.int16, True

    def stack(self, weights: Sequence[QuantisedWeight]) -> PanelStack:
        """See `Product`."""
        if not torch.cpu._is_avx2_supported():
            raise RuntimeError("the CPU has no AVX2")
        return PanelStack(weights)


class _OneDnnStack:
    def __init__(self, weights: Sequence[QuantisedWeight]) -> None:
        self._layers = []
        for weight in weights:
            codes, scales = torch.from_numpy(_padded_codes(weight)), torch.from_numpy(_padded_scales(weight))
            packed = torch.ops.onednn.qlinear_prepack(codes, [16, codes.shape[1]])
            self._layers.append((packed, scales, torch.zeros(len(scales), dtype=torch.int32)))

    def multiply(self, layer: int, tokens: int, codes: Codes, token_scales: Floats, out: Floats) -> None:
        packed, scales, zeros = self._layers[layer]
        result = torch.ops.onednn.qlinear_pointwise(
            torch.from_numpy(codes[:tokens]),
            1.0,
            128,
            packed,
            scales,
            zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        _scale_into(out, result, token_scales, tokens)


class OneDnnProduct:
    """torch's own u8 · s8 operator: as fast as the CPU goes with VNNI, saturated sums without."""

    name, code_type = "onednn", np.uint8

    @property
    def fast(self) -> bool:
        """Elsewhere the operator has a reference path, which is exact but slow."""
        features = torch.cpu.get_capabilities()
        return any(features.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8"))

    def stack(self, weights: Sequence[QuantisedWeight]) -> Stack:
        """See `Product`."""
        return _OneDnnStack(weights)


class _FloatStack:
    def __init__(self, weights: Sequence[QuantisedWeight]) -> None:
        self._layers = [
            (
                _blocks(torch.from_numpy(_padded_codes(weight)).float()),
                torch.from_numpy(_padded_scales(weight)),
            )
            for weight in weights
        ]

    def multiply(self, layer: int, tokens: int, codes: Codes, token_scales: Floats, out: Floats) -> None:
        blocks, scales = self._layers[layer]
        pieces = _blocks(torch.from_numpy(codes[:tokens]))
        sums: Tensor | None = None
        for piece, block in zip(pieces, blocks, strict=True):
            part = functional.linear(piece, block)
            sums = part if len(blocks) == 1 else part.int() if sums is None else sums + part.int()
        assert sums is not None
        _scale_into(out, sums.float() * scales, token_scales, tokens)


class FloatProduct:
    """float32 products of whole numbers, in blocks too short for rounding: exact on any CPU, four times the memory."""

    name, code_type, fast = "float32", np.float32, False

    def stack(self, weights: Sequence[QuantisedWeight]) -> Stack:
        """See `Product`."""
        return _FloatStack(weights)


def _blocks(matrix: Tensor) -> list[Tensor]:
    return [matrix[:, start : start + BLOCK] for start in range(0, matrix.shape[1], BLOCK)]


def _scale_into(out: Floats, sums: Tensor, token_scales: Floats, tokens: int) -> None:
    torch.mul(sums, torch.from_numpy(token_scales[:tokens, None]), out=torch.from_numpy(out[:tokens]))


def _padded_codes(weight: QuantisedWeight) -> NDArray[np.int8]:
    outputs, inputs = weight.shape
    codes: NDArray[np.int8] = weight.codes.numpy()
    if outputs % 16 == 0 and inputs % 16 == 0:
        return codes
    return np.pad(codes, ((0, padded(outputs) - outputs), (0, padded(inputs) - inputs)))


def _padded_scales(weight: QuantisedWeight) -> Floats:
    return np.pad(weight.scales.numpy(), (0, padded(len(weight.scales)) - len(weight.scales)))


PRODUCTS: tuple[Product, ...] = (OneDnnProduct(), PanelProduct(), FloatProduct())
"""The fastest first; of those that are only exact, the last."""


@cache
def choose_product() -> Product:
    """The fastest product that is exact on this machine; raises `NoExactProduct` with every reason."""
    reasons, exact = [], []
    for candidate in PRODUCTS:
        with LOCK:
            use_threads()
            reason = why_not_exact(candidate)
        if reason is None and candidate.fast:
            return candidate
        if reason is None:
            exact.append(candidate)
        reasons.append(f"{candidate.name}: {reason}")
    if exact:
        return exact[-1]
    raise NoExactProduct("; ".join(reasons))


def why_not_exact(candidate: Product) -> str | None:
    """What is wrong with a product, or None: compared with int64 on extreme and random values, for many row counts."""
    generator = np.random.default_rng(0)
    for outputs, inputs in ((48, 64), (32, 1_536), (16, 2_064)):
        extreme = np.where(generator.random((outputs, inputs)) < 0.5, -127, 127).astype(np.int8)
        extreme[0], extreme[1] = 127, -127
        weights = (extreme, generator.integers(-127, 128, (outputs, inputs)).astype(np.int8))
        codes = generator.integers(-127, 128, (max(_ROWS_TRIED), inputs))
        codes[0], codes[1], codes[2] = 127, -127, extreme[2]
        # Large and of no pattern: what float32 adds beyond 2^24 is rounded, and seldom back to the right number.
        weights[1][0], codes[3] = generator.integers(100, 128, inputs), generator.integers(100, 128, inputs)
        try:
            reason = _compare(candidate, weights, codes, generator)
        except Exception as error:  # an operator that this build of torch lacks, a kernel that cannot be compiled
            return f"{type(error).__name__}: {error}".splitlines()[0]
        if reason is not None:
            return reason
    return None


def _compare(
    candidate: Product, weights: Sequence[NDArray[np.int8]], codes: NDArray[np.int64], generator: np.random.Generator
) -> str | None:
    """Sums against int64 (all scales 1), then, with random scales, each row count against all rows at once."""
    outputs, zero_point = len(weights[0]), 128 if candidate.code_type == np.uint8 else 0
    scales = generator.uniform(0.001, 0.01, outputs).astype(np.float32)
    token_scales = generator.uniform(0.01, 0.1, len(codes)).astype(np.float32)
    given = (codes + zero_point).astype(candidate.code_type)
    for scale, token_scale in ((np.ones_like(scales), np.ones_like(token_scales)), (scales, token_scales)):
        stack = candidate.stack([QuantisedWeight(torch.from_numpy(w), torch.from_numpy(scale)) for w in weights])
        for layer, weight in enumerate(weights):
            sums = codes @ weight.astype(np.int64).T
            exact = (sums * scale.astype(np.float64) * token_scale[:, None]).astype(np.float32)
            everything = _multiplied(stack, layer, given, token_scale, outputs)
            if not np.allclose(everything, exact, rtol=1e-6, atol=0):
                return f"{len(codes)} × {weight.shape[1]} times {outputs} outputs is not exact"
            expected = exact if scale is not scales else everything
            for rows in _ROWS_TRIED:
                out = _multiplied(stack, layer, given[:rows], token_scale, outputs)
                if not np.array_equal(out, expected[:rows]):
                    return f"{rows} × {weight.shape[1]} times {outputs} outputs is not exact"
    return None


def _multiplied(stack: Stack, layer: int, codes: Codes, token_scales: Floats, outputs: int) -> Floats:
    out = np.full((len(codes), padded(outputs)), np.nan, np.float32)
    stack.multiply(layer, len(codes), codes, token_scales, out)
    return out[:, :outputs]


def multiply_rate(candidate: Product, tokens: int = 256, inputs: int = 1_024, outputs: int = 4_096) -> tuple[Any, int]:
    """A call that multiplies once on random numbers, and the multiply-adds it takes: for measuring a machine's rate."""
    generator = np.random.default_rng(0)
    weight = torch.from_numpy(generator.integers(-127, 128, (outputs, inputs)).astype(np.int8))
    stack = candidate.stack([QuantisedWeight(weight, torch.ones(outputs))])
    codes = generator.integers(0, 128, (tokens, inputs)).astype(candidate.code_type)
    out = np.empty((tokens, outputs), np.float32)
    return lambda: stack.multiply(0, tokens, codes, np.ones(tokens, np.float32), out), tokens * inputs * outputs
