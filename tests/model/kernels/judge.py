"""Float64 references of what several kernels share, and how their results are compared."""

from typing import Any

import numpy as np
import torch

from drumline.model.kernels.store import padded
from drumline.model.layers import hadamard


def wider(array: np.ndarray, length: int, fill: float = np.nan) -> np.ndarray:
    """float32, the last dimension filled up to `length`: with NaN, unless the kernel may count on zeros there."""
    missing = [(0, 0)] * (array.ndim - 1) + [(0, length - array.shape[-1])]
    return np.ascontiguousarray(np.pad(array.astype(np.float32), missing, constant_values=fill))


def zeros_behind(array: np.ndarray) -> np.ndarray:
    return wider(array, padded(array.shape[-1]), 0.0)


def rotated(x: np.ndarray, width: int) -> np.ndarray:
    return hadamard(torch.from_numpy(np.asarray(x, np.float64)), width).numpy()


def assert_codes(
    codes: np.ndarray, scales: np.ndarray, wanted: np.ndarray, error: float = 2e-5, floor: float = 0.0
) -> None:
    """Codes `[lines, ≥ n]` and scales `[lines]` are the rounding of `wanted` `[lines, n]` (float64).

    `error` bounds what float32 may have done to a value, as a share of the line's largest. Of a line whose values are
    all below `floor` (a GELU's tail, right only in absolute terms) no more is asked than that it stays there.
    """
    n, small = wanted.shape[-1], np.abs(wanted).max(-1) < floor
    assert (np.abs(scales[small]) * 127 <= 2 * floor).all()
    codes, scales, wanted = codes[~small], scales[~small], wanted[~small]
    tops = np.abs(wanted).max(-1)
    np.testing.assert_allclose(scales, tops / 127, rtol=error, atol=1e-37)
    whole = codes.astype(np.int64)
    assert np.array_equal(whole, codes), "codes are whole numbers"
    assert np.abs(whole).max(initial=0) <= 127
    assert not whole[..., n:].any(), "nothing behind the end"
    exact = wanted / np.where(tops > 0, tops / 127, 1)[..., None]
    undecided = np.abs(np.abs(exact - np.floor(exact)) - 0.5) <= 127 * error
    nearest = np.rint(exact)
    assert np.array_equal(whole[..., :n][~undecided], nearest[~undecided]), "each code is the nearest"
    assert np.abs(whole[..., :n] - exact).max(initial=0) <= 0.5 + 127 * error


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).bfloat16().view(torch.uint16).numpy()


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16).double().numpy()


def same_bits(x: Any, y: Any) -> bool:
    """Equal to the bit, NaN payloads and signs of zero included."""
    x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()
