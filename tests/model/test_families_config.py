"""Hugging Face settings to our description: the fields, both forms of RoPE settings, and what is refused by name."""

from typing import Any

import pytest

from drumline.model import gpt2, llama
from drumline.model.config import ModelConfig, RopeConfig
from drumline.model.errors import ModelLoadError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 100,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}


def of(architecture: str, **settings: Any) -> ModelConfig:
    return llama.read_config(LLAMA | {"architectures": [f"{architecture}ForCausalLM"]} | settings)


def rope(**settings: Any) -> RopeConfig:
    config = llama.read_config(LLAMA | settings)
    assert config.rope is not None
    return config.rope


def test_llama_as_it_stands() -> None:
    assert of("Llama") == ModelConfig(
        architecture="llama",
        vocab_size=100,
        layers=2,
        width=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn_width=48,
        window=64,
        norm="rms",
        norm_eps=1e-6,
        activation="silu",
        gated=True,
        positions="rope",
        rope=RopeConfig(theta=10_000.0),
    )


def test_each_family_has_its_biases_norms_and_head_width() -> None:
    assert (of("Qwen2").qkv_bias, of("Qwen2").output_bias, of("Qwen2").qk_norm) == (True, False, False)
    assert (of("Qwen3").qkv_bias, of("Qwen3").qk_norm, of("Qwen3").head_dim) == (False, True, 128)
    assert of("Mistral", sliding_window=None).architecture == "mistral"
    biased = of("Llama", attention_bias=True, mlp_bias=True)
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)
    assert of("Llama", head_dim=24).query_width == 96
    assert of("Llama", num_key_value_heads=None).kv_heads == 4
    assert of("Llama", tie_word_embeddings=True).tied_head


def test_gpt2_as_it_stands() -> None:
    assert gpt2.read_config(GPT2) == ModelConfig(
        architecture="gpt2",
        vocab_size=100,
        layers=2,
        width=32,
        heads=4,
        kv_heads=4,
        head_dim=8,
        ffn_width=128,
        window=64,
        norm="layer",
        norm_eps=1e-5,
        activation="gelu_tanh",
        gated=False,
        positions="learned",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied_head=True,
    )


@pytest.mark.parametrize(
    ("architecture", "settings", "expected"),
    [
        ("Llama", {"sliding_window": 16}, None),  # transformers ignores it there
        ("Mistral", {"sliding_window": 16}, 16),
        ("Mistral", {"sliding_window": None}, None),
        ("Mistral", {}, 4_096),
        ("Qwen2", {"sliding_window": 16}, None),
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": False}, None),
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, 16),
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, None),
        ("Qwen3", {"sliding_window": 16, "use_sliding_window": True}, None),
        (
            "Qwen3",
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            16,
        ),
        (
            "Qwen3",
            {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["full_attention"] * 2},
            None,
        ),
    ],
)
def test_a_sliding_window_counts_where_a_layer_uses_it(
    architecture: str, settings: dict[str, Any], expected: int | None
) -> None:
    assert of(architecture, **settings).sliding_window == expected


def test_rope_settings_of_transformers_4_and_5() -> None:
    linear = RopeConfig(theta=500.0, scaling="linear", factor=2.0)
    assert rope(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0}) == linear
    assert rope(rope_theta=500.0, rope_scaling={"rope_type": "linear", "factor": 2}) == linear
    assert rope(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}) == linear
    assert rope(rope_theta=500.0, rope_scaling=None) == RopeConfig(theta=500.0)
    assert rope(rope_parameters={"rope_type": "default", "rope_theta": 500.0}) == RopeConfig(theta=500.0)
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    llama3 = RopeConfig(
        theta=500.0,
        scaling="llama3",
        factor=8.0,
        original_window=32,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
    )
    assert rope(rope_theta=500.0, rope_scaling={"rope_type": "llama3"} | numbers) == llama3
    assert rope(rope_parameters={"rope_type": "llama3", "rope_theta": 500.0} | numbers) == llama3


def test_yarn_settings_and_their_defaults() -> None:
    assert rope(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}) == RopeConfig(
        scaling="yarn", factor=4.0, original_window=16, beta_fast=32.0, beta_slow=1.0, truncate=True
    )
    assert rope(rope_scaling={"type": "yarn", "original_max_position_embeddings": 16}).factor == 4.0
    assert rope(rope_scaling={"type": "yarn", "factor": 4.0}).original_window == 64
    beside = rope(
        original_max_position_embeddings=8,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    )
    assert beside.original_window == 8
    given = {
        "attention_factor": 0.9,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
    }
    assert rope(rope_parameters={"rope_type": "yarn", "factor": 4.0} | given) == RopeConfig(
        scaling="yarn", factor=4.0, original_window=64, **given
    )


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "proportional"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "high_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "frequency_factors": [1.0]}}, "1 RoPE frequency factors for 4"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"hidden_act": "relu"}, "relu"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_what_llama_refuses_is_named(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ModelLoadError, match=names):
        llama.read_config(LLAMA | settings)


def test_key_value_heads_have_no_common_default_outside_llama() -> None:
    settings = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert llama.read_config(settings).kv_heads == 4
    with pytest.raises(ModelLoadError, match="num_key_value_heads is missing"):
        llama.read_config(settings | {"architectures": ["Qwen2ForCausalLM"]})


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn = true"),
        ({"scale_attn_weights": False}, "scale_attn_weights = false"),
        ({"add_cross_attention": True}, "add_cross_attention = true"),
        ({"activation_function": "relu"}, "relu"),
        ({"n_head": 5}, "n_head 5"),
    ],
)
def test_what_gpt2_refuses_is_named(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ModelLoadError, match=names):
        gpt2.read_config(GPT2 | settings)
