"""Which number formats a model is served in: of weights and activations, and of keys and values."""

import logging
from dataclasses import dataclass
from typing import Literal

import torch

from drumline.model.errors import ModelLoadError

Precision = Literal["int8", "bfloat16", "float32"]

_LOG = logging.getLogger("drumline")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_KV_DTYPES = {**_DTYPES, "int8": torch.int8}
_NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")
"""What torch calls the CPU features that multiply bfloat16 (x86's, then Arm's); without one float32 is faster."""


@dataclass(frozen=True)
class NumberFormats:
    """`precision` of linear layers, `dtype` of all other weights and of activations, `kv_dtype` of keys and values."""

    precision: Precision
    dtype: torch.dtype
    kv_dtype: torch.dtype


def number_formats(precision: str, kv_dtype: str | None, device: torch.device) -> NumberFormats:
    """What `load_model`'s options ask for on this device.

    Raises `ModelLoadError` for an unknown name, and for int8 keys and values in another precision than int8.
    """
    if precision not in ("auto", "int8", *_DTYPES):
        raise ModelLoadError(f"precision {precision!r} is unknown; known: auto, int8, {', '.join(_DTYPES)}")
    if kv_dtype is not None and kv_dtype not in _KV_DTYPES:
        raise ModelLoadError(f"kv_dtype {kv_dtype!r} is unknown; known: {', '.join(_KV_DTYPES)}")
    chosen = _automatic(device) if precision == "auto" else precision
    if kv_dtype == "int8" and chosen != "int8":
        raise ModelLoadError(f"kv_dtype int8 needs precision int8, not {chosen}")
    if chosen == "int8":
        return NumberFormats("int8", torch.float32, _KV_DTYPES[kv_dtype or "bfloat16"])
    plain: Precision = "bfloat16" if chosen == "bfloat16" else "float32"
    return NumberFormats(plain, _DTYPES[plain], _KV_DTYPES[kv_dtype or plain])


def _automatic(device: torch.device) -> Precision:
    """The fastest precision that the device serves well; on a CPU that is int8, which is exact as well."""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    from drumline.model.backends.products import NoExactProduct, choose_product  # brings numba: only where it is asked

    try:
        if choose_product().fast:
            return "int8"
        reason = "this CPU has no fast exact product of whole numbers; precision int8 would be exact, but slower"
    except NoExactProduct as error:
        reason = f"int8 is not exact on this CPU ({error})"
    features = torch.cpu.get_capabilities()
    fallback: Precision = "bfloat16" if any(features.get(name) for name in _NATIVE_BFLOAT16) else "float32"
    _LOG.warning("precision auto is %s: %s", fallback, reason)
    return fallback
