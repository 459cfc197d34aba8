"""Tiny checkpoints for the loaders' tests, written by transformers and by the `gguf` library."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFWriter
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


def gguf_tensors(model: PreTrainedModel) -> dict[str, npt.NDArray[np.float32]]:
    """A transformers model's tensors as llama.cpp's conversion names and arranges them."""
    config, kind = model.config, model.config.model_type
    tensors = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if kind == "gpt2" and re.search(r"\.c_\w+\.weight", name):
            values = values.T
        if kind in ("llama", "mistral") and (heads := re.search(r"\.([qk])_proj\.", name)):
            count = config.num_attention_heads if heads[1] == "q" else config.num_key_value_heads
            values = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        tensors[gguf_name(name)] = values.contiguous().numpy()
    return tensors


@cache
def gguf_name(name: str) -> str:
    """The name llama.cpp gives a tensor, from the tables of the `gguf` library."""
    kind = gguf.MODEL_ARCH.GPT2 if name.startswith("transformer.") else gguf.MODEL_ARCH.QWEN3
    found = gguf.get_tensor_name_map(kind, 4).get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None
    return str(found)


def gguf_settings(model: PreTrainedModel) -> dict[str, Any]:
    """The metadata that llama.cpp's conversion writes for a model."""
    config = model.config
    if config.model_type == "gpt2":
        return {
            "context_length": config.n_positions,
            "embedding_length": config.n_embd,
            "block_count": config.n_layer,
            "feed_forward_length": 4 * config.n_embd,
            "attention.head_count": config.n_head,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }


def write_gguf(
    path: Path,
    architecture: str,
    settings: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[Any]],
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write a GGUF file; `kinds` names the type of tensors that are already blocks of bytes."""
    writer = GGUFWriter(path, architecture)
    for name, value in settings.items():
        key = name if name.startswith(("general.", "split.", "tokenizer.")) else f"{architecture}.{name}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, "<s>", "</s>", "ab", *(f"[PAD{index}]" for index in range(259, VOCABULARY))])
    writer.add_token_types([1] * 256 + [3] * 2 + [1] + [5] * (VOCABULARY - 259))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template("{{ bos_token }}{{ eos_token }}")
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
