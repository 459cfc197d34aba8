"""GGUF files: metadata to Hugging Face settings, tensors to Hugging Face names, quantised blocks to float32.

Dequantising is the `gguf` library's; what its metadata means is llama.cpp's conversion scripts read backwards.
"""

import math
import re
from collections.abc import Mapping
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
from drumline.model.settings import Settings
from drumline.model.tokenizer import Tokenizer
from drumline.model.weights import Take

_SERVED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # also SmolLM2 and Mistral
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_UNSERVED = (  # settings that change the arithmetic in ways no family here computes
    "expert_count",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.temperature_length",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "rope.dimension_sections",
    "rope.scaling.yarn_log_multiplier",
)
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
    of_model = {
        name.partition(".")[2]: value for name, value in metadata.items() if name.startswith(f"{architecture}.")
    }
    for name in _UNSERVED:
        if of_model.get(name):
            raise ModelLoadError(f"GGUF metadata {architecture}.{name} = {of_model[name]} is not served")
    values = Settings(of_model)
    shared = {
        "architectures": [_ARCHITECTURES[architecture]],
        "vocab_size": tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else None,
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if architecture == "gpt2":
        return shared | {
            "n_positions": values.integer("context_length"),
            "n_embd": values.integer("embedding_length"),
            "n_layer": values.integer("block_count"),
            "n_head": values.integer("attention.head_count"),
            "n_inner": values.integer("feed_forward_length"),
            "layer_norm_epsilon": values.number("attention.layer_norm_epsilon"),
        }
    heads, width = values.integer("attention.head_count"), values.integer("embedding_length")
    head_dim = values.integer("attention.key_length", width // heads)
    if values.integer("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError("attention.value_length other than attention.key_length is not served")
    return (
        shared
        | {
            "hidden_size": width,
            "intermediate_size": values.integer("feed_forward_length"),
            "num_hidden_layers": values.integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": values.integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": values.integer("context_length"),
            "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
            "attention_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_output.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "partial_rotary_factor": values.integer("rope.dimension_count", head_dim) / head_dim,
            "rope_parameters": _rope(values, tensors),
        }
        | _sliding_window(architecture, values)
    )


def _sliding_window(architecture: str, values: Settings) -> dict[str, Any]:
    if not values.get("attention.sliding_window"):
        return {}
    sliding = {"sliding_window": values.integer("attention.sliding_window"), "max_window_layers": 0}
    if architecture == "llama":
        return sliding | {"architectures": ["MistralForCausalLM"]}
    return sliding | {"use_sliding_window": True}


def _rope(values: Settings, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    factor = values.get("rope.scaling.factor") or values.get("rope.scale_linear")
    # Files older than rope.scaling.type give a factor alone, and mean linear.
    kind = values.get("rope.scaling.type") or ("none" if factor in (None, 1.0) else "linear")
    parameters: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": values.get("rope.freq_base"),
        "factor": factor,
        "original_max_position_embeddings": values.get("rope.scaling.original_context_length"),
    }
    if kind == "yarn":
        parameters |= _yarn(values)
    if _ROPE_FACTORS in tensors:
        # llama.cpp applies llama3 scaling when it converts, and stores only what the frequencies are divided by.
        parameters["frequency_factors"] = _dequantized(tensors[_ROPE_FACTORS]).flatten().tolist()
    return parameters


def _yarn(values: Settings) -> dict[str, Any]:
    if values.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise ModelLoadError("rope.scaling.yarn_ext_factor other than 1 is not served")
    factor = values.number("rope.scaling.factor")
    scale = values.number("rope.scaling.attn_factor", values.number("rope.scaling.yarn_attn_factor", 1.0))
    return {
        "beta_fast": values.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": values.get("rope.scaling.yarn_beta_slow"),
        # llama.cpp multiplies the paper's factor by it; in a Hugging Face configuration the number replaces that.
        "attention_factor": None if scale == 1.0 else scale * (0.1 * math.log(max(factor, 1.0)) + 1.0),
    }


def _gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` is `blk.3.attn_q.weight`."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)", stem)
    return f"blk.{layer[1]}.{_NAMES[layer[2]]}.{kind}" if layer else f"{_NAMES[stem]}.{kind}"


def _take(
    architecture: str, settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor], unread: set[str]
) -> Take:
    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        stored_name = _gguf_name(name)
        if stored_name not in tensors:
            raise ModelLoadError(f"tensor {stored_name} ({name}) is missing")
        stored = tensors[stored_name]
        # GPT-2's linear weights are [in, out] in Hugging Face checkpoints alone.
        transposed = architecture == "gpt2" and ".c_" in name
        check_shape(stored_name, stored.shape, shape[::-1] if transposed else shape)
        unread.discard(stored_name)
        tensor = _dequantized(stored)
        if architecture == "llama" and ".q_proj." in name:
            return _rotary_halves(tensor, settings["num_attention_heads"])
        if architecture == "llama" and ".k_proj." in name:
            return _rotary_halves(tensor, settings["num_key_value_heads"])
        return tensor.T if transposed and tensor.dim() == 2 else tensor

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
