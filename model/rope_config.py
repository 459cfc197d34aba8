"""RoPE settings of a Hugging Face configuration, in the forms of transformers 4 and 5.

transformers 4 writes `rope_theta` and `rope_scaling` (whose kind is `rope_type`, or `type` in older files);
transformers 5 writes one `rope_parameters`.
"""

from collections.abc import Callable

from drumline.model.config import RopeConfig
from drumline.model.errors import ModelLoadError
from drumline.model.settings import Settings


def read_rope(hf: Settings, head_dim: int) -> RopeConfig:
    """The rotary embedding that `hf` asks for, over heads of `head_dim`.

    Raises `ModelLoadError` for a kind that is not served (dynamic, longrope, per-layer, partial rotation).
    """
    scaling = hf.part("rope_scaling") or hf.part("rope_parameters") or Settings({})
    if any(isinstance(scaling.get(name), dict) for name in scaling.names()):
        raise ModelLoadError("rope_parameters that differ by layer are not served")
    for source in (scaling, hf):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelLoadError("partial_rotary_factor other than 1 is not served")
    if head_dim % 2:
        raise ModelLoadError(f"RoPE needs an even head width, not head_dim {head_dim}")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _READERS:
        raise ModelLoadError(f"RoPE scaling {kind!r} is not served; known: {', '.join(_READERS)}")
    theta = scaling.number("rope_theta", hf.number("rope_theta", 10_000.0))
    factors = scaling.get("frequency_factors")
    if factors is not None and len(factors) != head_dim // 2:
        raise ModelLoadError(f"{len(factors)} RoPE frequency factors for {head_dim // 2} frequencies")
    if factors is not None and not all(factor > 0 for factor in factors):
        raise ModelLoadError("RoPE frequency factors must be above zero")
    return _READERS[kind](theta, scaling, hf)


def _default(theta: float, scaling: Settings, hf: Settings) -> RopeConfig:
    return RopeConfig(theta=theta, frequency_factors=_frequency_factors(scaling))


def _linear(theta: float, scaling: Settings, hf: Settings) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        scaling="linear",
        factor=scaling.number("factor"),
        frequency_factors=_frequency_factors(scaling),
    )


def _llama3(theta: float, scaling: Settings, hf: Settings) -> RopeConfig:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise ModelLoadError(f"high_freq_factor {high} must be above low_freq_factor {low}")
    return RopeConfig(
        theta=theta,
        scaling="llama3",
        factor=scaling.number("factor"),
        original_window=_original_window(scaling, hf),
        low_frequency_factor=low,
        high_frequency_factor=high,
    )


def _yarn(theta: float, scaling: Settings, hf: Settings) -> RopeConfig:
    original = _original_window(scaling, hf)
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=scaling.number("factor", hf.integer("max_position_embeddings") / original),
        original_window=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=scaling.optional_number("attention_factor"),
        mscale=scaling.optional_number("mscale"),
        mscale_all_dim=scaling.optional_number("mscale_all_dim"),
        truncate=scaling.flag("truncate", True),
        frequency_factors=_frequency_factors(scaling),
    )


def _original_window(scaling: Settings, hf: Settings) -> int:
    """The window before the extension; as in transformers, a value beside the RoPE settings wins over one inside."""
    inside = scaling.integer("original_max_position_embeddings", hf.integer("max_position_embeddings"))
    return hf.integer("original_max_position_embeddings", inside)


def _frequency_factors(scaling: Settings) -> tuple[float, ...] | None:
    """The divisors a GGUF file ships (our loader puts them here); no Hugging Face configuration has them."""
    factors = scaling.get("frequency_factors")
    return None if factors is None else tuple(factors)


_READERS: dict[str, Callable[[float, Settings, Settings], RopeConfig]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
