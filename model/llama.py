"""The Llama family: RMSNorm, RoPE, grouped-query attention, a gated feed-forward. Llama, Mistral, Qwen2, Qwen3.

Sources: Touvron et al. 2023 (Llama), Jiang et al. 2023 (Mistral), and the configurations that transformers writes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drumline.model.config import ModelConfig
from drumline.model.errors import ModelLoadError
from drumline.model.rope_config import read_rope
from drumline.model.settings import Settings
from drumline.model.weights import LayerWeights, Take, Weights

_NAMES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_MISTRAL_SLIDING_WINDOW = 4_096  # what transformers assumes where a Mistral configuration says nothing


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The description of a Hugging Face configuration of this family; raises `ModelLoadError` naming the setting."""
    settings = Settings(hf)
    name = _NAMES[hf["architectures"][0]]
    width, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    # A null means as many as query heads; a missing key means that for Llama, elsewhere another fixed number.
    kv_heads = settings.integer(
        "num_key_value_heads", heads if name == "llama" or "num_key_value_heads" in hf else None
    )
    if heads % kv_heads:
        raise ModelLoadError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = settings.integer("head_dim", 128 if name == "qwen3" else width // heads)
    attention_bias = name in ("llama", "qwen3") and settings.flag("attention_bias", False)
    return ModelConfig(
        architecture=name,
        vocab_size=settings.integer("vocab_size"),
        layers=settings.integer("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_width=settings.integer("intermediate_size"),
        window=settings.integer("max_position_embeddings"),
        norm="rms",
        norm_eps=settings.number("rms_norm_eps"),
        activation=settings.activation("hidden_act", "silu"),
        gated=True,
        positions="rope",
        rope=read_rope(settings, head_dim),
        qkv_bias=name == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=name == "llama" and settings.flag("mlp_bias", False),
        qk_norm=name == "qwen3",
        tied_head=settings.flag("tie_word_embeddings", False),
        sliding_window=_sliding_window(name, hf, settings),
    )


def _sliding_window(name: str, hf: Mapping[str, Any], settings: Settings) -> int | None:
    """The sliding window of those layers that have one; None where every layer sees the whole context."""
    if name == "llama":
        return None
    if name == "mistral":
        value = hf.get("sliding_window", _MISTRAL_SLIDING_WINDOW)
        return None if value is None else settings.integer("sliding_window", value)
    if not settings.flag("use_sliding_window", False):
        return None
    layer_types = settings.get("layer_types")
    if layer_types is not None:
        active = "sliding_attention" in layer_types
    else:
        first = settings.get("max_window_layers")
        active = (28 if first is None else first) < settings.integer("num_hidden_layers")
    return settings.integer("sliding_window", _MISTRAL_SLIDING_WINDOW) if active else None


def build_weights(take: Take, config: ModelConfig) -> Weights:
    """Every tensor of the model, float32, under our names; `take` raises `ModelLoadError` for a wrong one."""
    embedding = take("model.embed_tokens.weight", (config.vocab_size, config.width))
    return Weights(
        embedding=embedding,
        layers=tuple(_layer(take, config, f"model.layers.{index}") for index in range(config.layers)),
        final_norm=take("model.norm.weight", (config.width,)),
        head=embedding if config.tied_head else take("lm_head.weight", (config.vocab_size, config.width)),
    )


def _layer(take: Take, config: ModelConfig, prefix: str) -> LayerWeights:
    width, ffn, queries, keys = config.width, config.ffn_width, config.query_width, config.kv_width

    def tensor(name: str, *shape: int) -> Tensor:
        return take(f"{prefix}.{name}", shape)

    def stacked(kind: str, rows: dict[str, int]) -> Tensor:
        inputs = (width,) if kind == "weight" else ()
        return torch.cat([tensor(f"{name}.{kind}", size, *inputs) for name, size in rows.items()])

    attention = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    mlp = {"mlp.gate_proj": ffn, "mlp.up_proj": ffn}
    return LayerWeights(
        attention_norm=tensor("input_layernorm.weight", width),
        qkv=stacked("weight", attention),
        qkv_bias=stacked("bias", attention) if config.qkv_bias else None,
        query_norm=tensor("self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
        key_norm=tensor("self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
        output=tensor("self_attn.o_proj.weight", width, queries),
        output_bias=tensor("self_attn.o_proj.bias", width) if config.output_bias else None,
        mlp_norm=tensor("post_attention_layernorm.weight", width),
        up=stacked("weight", mlp),
        up_bias=stacked("bias", mlp) if config.mlp_bias else None,
        down=tensor("mlp.down_proj.weight", width, ffn),
        down_bias=tensor("mlp.down_proj.bias", width) if config.mlp_bias else None,
    )
