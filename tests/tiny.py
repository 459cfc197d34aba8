"""Tiny seeded random models of every family, over a tokenizer whose tokens are bytes."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import torch

from drumline.model.config import ModelConfig, RopeConfig
from drumline.model.language_model import LanguageModel
from drumline.model.quantise import quantise
from drumline.model.weights import LayerWeights, Weights

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "course")
_SPECIAL = ("<bos>", "<eos>", "<pad>")


class ByteTokenizer:
    """BOS 0, EOS 1, PAD 2, then the 256 bytes."""

    vocab_size = 256 + len(_SPECIAL)
    bos_id: int | None = 0
    eos_ids: tuple[int, ...] = (1,)
    adds_bos = False
    strips_leading_space = False
    special_tokens = _SPECIAL

    def encode(self, text: str) -> list[int]:
        return [byte + len(_SPECIAL) for byte in text.encode()]

    def encode_template(self, text: str, restore: Mapping[int, str] | None = None) -> list[int]:
        return self.encode(text.translate(restore or {}))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id - len(_SPECIAL)]) if token_id >= len(_SPECIAL) else b""


_BASE = ModelConfig(
    architecture="llama",
    vocab_size=ByteTokenizer.vocab_size,
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_width=48,
    window=32,
    norm="rms",
    norm_eps=1e-5,
    activation="silu",
    gated=True,
    positions="rope",
    rope=RopeConfig(),
    tied_head=True,
)
_LEARNED = replace(
    _BASE, kv_heads=4, norm="layer", activation="gelu_tanh", gated=False, positions="learned", rope=None,
    qkv_bias=True, output_bias=True, mlp_bias=True,
)  # fmt: skip
_CONFIGS = {
    "llama": _BASE,
    "mistral": replace(_BASE, architecture="mistral", tied_head=False, heads=6, head_dim=10),
    "qwen2": replace(_BASE, architecture="qwen2", qkv_bias=True, kv_heads=1),
    "qwen3": replace(_BASE, architecture="qwen3", qk_norm=True, head_dim=16),
    "gpt2": replace(_LEARNED, architecture="gpt2"),
    "course": replace(_LEARNED, architecture="course", activation="gelu", tied_head=False),
}


def tiny_config(family: str = "llama", window: int = 32) -> ModelConfig:
    return replace(_CONFIGS[family], window=window)


def tiny_model(family: str = "llama", window: int = 32, seed: int = 0, precision: str = "float32") -> LanguageModel:
    """A random model whose logits are spread enough for greedy choices to be clear.

    In int8 it is quantised from the same float32 weights, with keys and values in bfloat16.
    """
    config = tiny_config(family, window)
    weights = random_weights(config, seed)
    return LanguageModel(
        name=f"tiny-{family}",
        config=config,
        weights=quantise(weights, config) if precision == "int8" else weights,
        tokenizer=ByteTokenizer(),
        chat_template=None,
        precision=precision,
        device=torch.device("cpu"),
        window=window,
        kv_dtype=torch.bfloat16 if precision == "int8" else torch.float32,
        fingerprint=hashlib.sha256(f"{config}{seed}".encode()).hexdigest(),
        slides=family == "course",
    )


def random_weights(config: ModelConfig, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float | None = None) -> torch.Tensor:
        scale = 1.5 / shape[-1] ** 0.5 if scale is None else scale
        return torch.randn(shape, generator=generator) * scale

    def gain(width: int) -> torch.Tensor:
        return 1 + normal(width, scale=0.1)

    def bias(width: int, present: bool) -> torch.Tensor | None:
        return normal(width, scale=0.1) if present else None

    layer_norm = config.norm == "layer"
    up_width = config.ffn_width * (2 if config.gated else 1)
    layers = tuple(
        LayerWeights(
            attention_norm=gain(config.width),
            qkv=normal(config.query_width + 2 * config.kv_width, config.width),
            output=normal(config.width, config.query_width),
            mlp_norm=gain(config.width),
            up=normal(up_width, config.width),
            down=normal(config.width, config.ffn_width),
            attention_norm_bias=bias(config.width, layer_norm),
            qkv_bias=bias(config.query_width + 2 * config.kv_width, config.qkv_bias),
            query_norm=gain(config.head_dim) if config.qk_norm else None,
            key_norm=gain(config.head_dim) if config.qk_norm else None,
            output_bias=bias(config.width, config.output_bias),
            mlp_norm_bias=bias(config.width, layer_norm),
            up_bias=bias(up_width, config.mlp_bias),
            down_bias=bias(config.width, config.mlp_bias),
        )
        for _ in range(config.layers)
    )
    embedding = normal(config.vocab_size, config.width, scale=0.5)
    return Weights(
        embedding=embedding,
        layers=layers,
        final_norm=gain(config.width),
        head=embedding if config.tied_head else normal(config.vocab_size, config.width),
        position_embedding=normal(config.window, config.width, scale=0.3) if config.positions == "learned" else None,
        final_norm_bias=bias(config.width, layer_norm),
    )
