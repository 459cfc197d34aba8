"""GGUF files: metadata to Hugging Face settings, tensors to Hugging Face names, quantised blocks to float32.

Dequantising is the `gguf` library's; what its metadata means is llama.cpp's conversion scripts read backwards.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gguf.quants import dequantize
from torch import Tensor

from drumline.model.chat import ChatTemplate
from drumline.model.checkpoint import Checkpoint, check_shape
from drumline.model.errors import ModelLoadError
from drumline.model.gguf_reader import StoredTensor, read_gguf
from drumline.model.gguf_tokenizer import tokenizer_from_gguf
from drumline.model.tokenizer import Tokenizer

_SERVED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # also SmolLM2 and Mistral
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_ROPE_FACTORS = "rope_freqs.weight"
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def load_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file; raises `ModelLoadError` for what is damaged or not served, naming it."""
    file = read_gguf(path)
    metadata, tensors = file.metadata, file.tensors
    architecture = str(metadata.get("general.architecture"))
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelLoadError(f"GGUF architecture {architecture!r} is not served; known: {known}")
    if metadata.get("split.count", 1) not in (0, 1):
        raise ModelLoadError("a GGUF model split over several files is not served; merge them with gguf-split --merge")
    unread = set(tensors) - {_ROPE_FACTORS}
    settings = _settings(architecture, metadata, tensors)
    return Checkpoint(
        settings=settings,
        take=_take(architecture, settings, tensors, unread),
        unread=unread,
        files=(path,),
        open_tokenizer=lambda: _open_tokenizer(metadata),
    )


def _settings(architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The Hugging Face settings that the metadata stands for."""

    def value(key: str) -> Any:
        return metadata.get(f"{architecture}.{key}")

    if value("expert_count"):
        raise ModelLoadError("a mixture of experts (expert_count) is not served")
    shared = {
        "architectures": [_ARCHITECTURES[architecture]],
        "vocab_size": tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else None,
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if architecture == "gpt2":
        return shared | {
            "n_positions": value("context_length"),
            "n_embd": value("embedding_length"),
            "n_layer": value("block_count"),
            "n_head": value("attention.head_count"),
            "n_inner": value("feed_forward_length"),
            "layer_norm_epsilon": value("attention.layer_norm_epsilon"),
        }
    heads, width = value("attention.head_count"), value("embedding_length")
    rotated = value("rope.dimension_count")
    head_dim = value("attention.key_length") or (width // heads if heads and width else None)
    if value("attention.value_length") not in (None, head_dim):
        raise ModelLoadError("attention.value_length other than attention.key_length is not served")
    return shared | {
        "hidden_size": width,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "partial_rotary_factor": rotated / head_dim if rotated and head_dim else None,
        "rope_parameters": _rope(value, tensors),
    }


def _rope(value: Callable[[str], Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    kind = value("rope.scaling.type") or "none"
    factor = value("rope.scaling.factor") or value("rope.scale_linear")
    if kind == "none" and value("rope.scaling.type") is None and factor not in (None, 1.0):
        kind = "linear"  # files older than rope.scaling.type
    parameters: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": value("rope.freq_base"),
        "factor": factor,
        "original_max_position_embeddings": value("rope.scaling.original_context_length"),
    }
    if kind == "yarn":
        parameters |= _yarn(value, factor)
    if _ROPE_FACTORS in tensors:
        # llama.cpp applies llama3 scaling when it converts, and stores only what the frequencies are divided by.
        parameters["frequency_factors"] = _dequantized(tensors[_ROPE_FACTORS]).tolist()
    return parameters


def _yarn(value: Callable[[str], Any], factor: float | None) -> dict[str, Any]:
    if value("rope.scaling.yarn_log_multiplier") is not None:
        raise ModelLoadError("rope.scaling.yarn_log_multiplier is not served")
    scale = value("rope.scaling.attn_factor") or value("rope.scaling.yarn_attn_factor")
    yarn: dict[str, Any] = {
        "beta_fast": value("rope.scaling.yarn_beta_fast"),
        "beta_slow": value("rope.scaling.yarn_beta_slow"),
    }
    if scale is not None and factor is not None:
        # llama.cpp multiplies the paper's factor; in a Hugging Face configuration the number replaces it.
        yarn["attention_factor"] = scale * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return yarn


def _gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` is `blk.3.attn_q.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)[-4:] if stem.startswith("model.") else ("", *stem.split(".", 3)[1:])
    return f"blk.{index}.{_NAMES[part]}.{kind}"


def _take(
    architecture: str, settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor], unread: set[str]
) -> Callable[[str, tuple[int, ...]], Tensor]:
    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        stored_name = _gguf_name(name)
        if stored_name not in tensors:
            raise ModelLoadError(f"tensor {stored_name} ({name}) is missing")
        stored = tensors[stored_name]
        # GPT-2's linear weights are [in, out] in Hugging Face checkpoints alone.
        transposed = architecture == "gpt2" and ".c_" in name and len(shape) == 2
        check_shape(stored_name, stored.shape, shape[::-1] if transposed else shape)
        unread.discard(stored_name)
        tensor = _dequantized(stored)
        if transposed:
            return tensor.T
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = settings["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            return _rotary_halves(tensor, heads or settings["num_attention_heads"])
        return tensor

    return take


def _rotary_halves(tensor: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of a head's rows: it puts the two halves that rotate together side by side."""
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _dequantized(stored: StoredTensor) -> Tensor:
    """The tensor as float32 in memory of its own."""
    if stored.kind.name not in _SERVED_TYPES:
        raise ModelLoadError(f"tensor {stored.name} has type {stored.kind.name}; served: {', '.join(_SERVED_TYPES)}")
    values = dequantize(stored.data, stored.kind)
    return torch.from_numpy(values if values.flags.writeable else values.copy())  # F32 is a view of the file


def _open_tokenizer(metadata: Mapping[str, Any]) -> tuple[Tokenizer, ChatTemplate | None]:
    tokenizer = tokenizer_from_gguf(metadata)
    return tokenizer, _chat_template(metadata, tokenizer)


def _chat_template(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if not source:
        return None
    tokens = metadata["tokenizer.ggml.tokens"]

    def text(key: str) -> str:
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        return "" if token_id is None else str(tokens[token_id])

    return ChatTemplate(source, tokenizer, text("bos_token_id"), text("eos_token_id"))
