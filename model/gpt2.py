"""The GPT-2 family: LayerNorm, learned positions, biases everywhere, a head tied to the embedding.

Source: Radford et al. 2019, in the configuration that transformers writes.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from drumline.model.config import ModelConfig
from drumline.model.errors import ModelLoadError
from drumline.model.settings import Settings
from drumline.model.weights import LayerWeights, Take, Weights

_OPTIONS = {  # options we do not compute, and the value at which they change nothing
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The description of a Hugging Face GPT-2 configuration; raises `ModelLoadError` naming the setting."""
    settings = Settings(hf)
    for option, ordinary in _OPTIONS.items():
        if settings.flag(option, ordinary) != ordinary:
            raise ModelLoadError(f"setting {option} = {str(not ordinary).lower()} is not served")
    width, heads = settings.integer("n_embd"), settings.integer("n_head")
    if width % heads:
        raise ModelLoadError(f"n_embd {width} is not a multiple of n_head {heads}")
    return ModelConfig(
        architecture="gpt2",
        vocab_size=settings.integer("vocab_size"),
        layers=settings.integer("n_layer"),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn_width=settings.integer("n_inner", 4 * width),
        window=settings.integer("n_positions"),
        norm="layer",
        norm_eps=settings.number("layer_norm_epsilon", 1e-5),
        activation=settings.activation("activation_function", "gelu_new"),
        gated=False,
        positions="learned",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied_head=settings.flag("tie_word_embeddings", True),
    )


def build_weights(take: Take, config: ModelConfig) -> Weights:
    """Every tensor of the model, float32, under our names; `take` raises `ModelLoadError` for a wrong one."""
    embedding = take("transformer.wte.weight", (config.vocab_size, config.width))
    return Weights(
        embedding=embedding,
        position_embedding=take("transformer.wpe.weight", (config.window, config.width)),
        layers=tuple(_layer(take, config, f"transformer.h.{index}") for index in range(config.layers)),
        final_norm=take("transformer.ln_f.weight", (config.width,)),
        final_norm_bias=take("transformer.ln_f.bias", (config.width,)),
        head=embedding if config.tied_head else take("lm_head.weight", (config.vocab_size, config.width)),
    )


def _layer(take: Take, config: ModelConfig, prefix: str) -> LayerWeights:
    width, ffn = config.width, config.ffn_width

    def conv1d(name: str, inputs: int, outputs: int) -> Tensor:
        """GPT-2 stores its linear weights `[in, out]`."""
        return take(f"{prefix}.{name}.weight", (inputs, outputs)).T.contiguous()

    def vector(name: str, size: int) -> Tensor:
        return take(f"{prefix}.{name}", (size,))

    return LayerWeights(
        attention_norm=vector("ln_1.weight", width),
        attention_norm_bias=vector("ln_1.bias", width),
        qkv=conv1d("attn.c_attn", width, 3 * width),
        qkv_bias=vector("attn.c_attn.bias", 3 * width),
        output=conv1d("attn.c_proj", width, width),
        output_bias=vector("attn.c_proj.bias", width),
        mlp_norm=vector("ln_2.weight", width),
        mlp_norm_bias=vector("ln_2.bias", width),
        up=conv1d("mlp.c_fc", width, ffn),
        up_bias=vector("mlp.c_fc.bias", ffn),
        down=conv1d("mlp.c_proj", ffn, width),
        down_bias=vector("mlp.c_proj.bias", width),
    )
