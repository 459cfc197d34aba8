"""Tiny checkpoints for the loaders' tests, written by transformers and by the `gguf` library."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 264  # 256 bytes, two special tokens, and six embeddings more than the tokenizer needs
SHAPES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def llama(**settings: Any) -> LlamaConfig:
    return LlamaConfig(**SHAPES | settings)


def mistral(**settings: Any) -> MistralConfig:
    return MistralConfig(**SHAPES | {"sliding_window": None} | settings)


def qwen2(**settings: Any) -> Qwen2Config:
    return Qwen2Config(**SHAPES | settings)


def qwen3(**settings: Any) -> Qwen3Config:
    return Qwen3Config(**SHAPES | {"head_dim": 16} | settings)


def gpt2(**settings: Any) -> GPT2Config:
    shapes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2Config(**shapes | {"bos_token_id": 256, "eos_token_id": 257} | settings)


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model whose every tensor is random, also those that start as zeros and ones: biases and norms."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return model


def save(folder: Path, model: PreTrainedModel, **options: Any) -> Path:
    """Write config.json, safetensors and tokenizer.json."""
    model.save_pretrained(folder, **options)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE without merges: one token a byte, `<s>` 256 and `</s>` 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change settings of config.json; a value of `...` takes the setting out."""
    file = folder / "config.json"
    settings = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in settings.items() if value is not ...}))
