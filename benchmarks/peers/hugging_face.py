"""A Hugging Face folder of our own loaded weights, so that transformers and vLLM compute the very same model."""

import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from drumline.model.config import ModelConfig
from drumline.model.errors import ModelLoadError
from drumline.model.registry import load_model
from drumline.model.weights import LayerWeights, LinearWeight, Weights


def hugging_face_folder(model: Path, scratch: Path) -> Path:
    """The folder that peers load: `model` itself where it is one, else what is written for that GGUF under `scratch`.

    A folder that is there already is taken again. Raises `ModelLoadError` for a GGUF of another family than Llama, or
    with RoPE scaling: give the folder then.
    """
    if model.is_dir():
        return model
    folder = scratch / f"{model.stem}-float32"
    if folder.exists():
        return folder
    loaded = load_model(model, precision="float32")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    twin = LlamaForCausalLM(_config(loaded.config, loaded.tokenizer.bos_id, loaded.tokenizer.eos_ids))
    twin.load_state_dict(_state(loaded.weights, loaded.config), strict=not loaded.config.tied_head)
    twin.save_pretrained(partial)
    AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(partial)
    return partial.rename(folder)


def _config(config: ModelConfig, bos_id: int | None, eos_ids: tuple[int, ...]) -> LlamaConfig:
    rope = config.rope
    if config.architecture != "llama" or rope is None or rope.scaling != "none" or rope.frequency_factors:
        raise ModelLoadError(f"{config.architecture} from a GGUF has no Hugging Face twin here; give a model folder")
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.ffn_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.window,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        attention_bias=config.qkv_bias,
        mlp_bias=config.mlp_bias,
        tie_word_embeddings=config.tied_head,
        bos_token_id=bos_id,
        eos_token_id=eos_ids[0] if eos_ids else None,
    )


def _state(weights: Weights, config: ModelConfig) -> dict[str, torch.Tensor]:
    state = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not config.tied_head:
        state["lm_head.weight"] = _plain(weights.head)
    for index, layer in enumerate(weights.layers):
        state |= {f"model.layers.{index}.{name}": tensor for name, tensor in _layer(layer, config).items()}
    return state


def _layer(layer: LayerWeights, config: ModelConfig) -> dict[str, torch.Tensor]:
    widths = [config.query_width, config.kv_width, config.kv_width]
    query, key, value = torch.split(_plain(layer.qkv), widths)
    gate, up = _plain(layer.up).chunk(2)
    tensors = {
        "input_layernorm.weight": layer.attention_norm,
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": key,
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": _plain(layer.output),
        "post_attention_layernorm.weight": layer.mlp_norm,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": _plain(layer.down),
    }
    if layer.qkv_bias is not None:
        biases = torch.split(layer.qkv_bias, widths)
        tensors |= dict(zip((f"self_attn.{part}_proj.bias" for part in "qkv"), biases, strict=True))
    if layer.output_bias is not None:
        tensors["self_attn.o_proj.bias"] = layer.output_bias
    if layer.up_bias is not None and layer.down_bias is not None:
        gate_bias, up_bias = layer.up_bias.chunk(2)
        tensors |= {"mlp.gate_proj.bias": gate_bias, "mlp.up_proj.bias": up_bias, "mlp.down_proj.bias": layer.down_bias}
    return tensors


def _plain(weight: LinearWeight) -> torch.Tensor:
    """A weight of a model that was loaded in float32."""
    assert isinstance(weight, torch.Tensor)
    return weight
