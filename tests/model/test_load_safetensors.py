"""Folders of Hugging Face checkpoints: where each tensor goes, and what is refused, by name."""

import functools
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drumline import ModelLoadError, load_model
from drumline.model.weights import LayerWeights
from tests import checkpoints

load_float32 = functools.partial(load_model, precision="float32")

LLAMA_LAYER = "model.layers.1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.save(tmp_path / "tiny", checkpoints.random_model(checkpoints.llama(tie_word_embeddings=True)))


def assert_refused(folder: Path, *parts: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_float32(folder)
    for part in (str(folder), *parts):
        assert part in str(caught.value)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_llama_tensors_stand_where_they_belong(tmp_path: Path) -> None:
    config = checkpoints.llama(attention_bias=True, mlp_bias=True)
    theirs = checkpoints.random_model(config)
    state = theirs.state_dict()
    model = load_float32(checkpoints.save(tmp_path, theirs))

    def attention(kind: str) -> torch.Tensor:
        return torch.cat([state[f"{LLAMA_LAYER}.self_attn.{part}_proj.{kind}"] for part in "qkv"])

    def mlp(kind: str) -> torch.Tensor:
        return torch.cat([state[f"{LLAMA_LAYER}.mlp.{part}_proj.{kind}"] for part in ("gate", "up")])

    expected = LayerWeights(
        attention_norm=state[f"{LLAMA_LAYER}.input_layernorm.weight"],
        qkv=attention("weight"),
        qkv_bias=attention("bias"),
        output=state[f"{LLAMA_LAYER}.self_attn.o_proj.weight"],
        output_bias=state[f"{LLAMA_LAYER}.self_attn.o_proj.bias"],
        mlp_norm=state[f"{LLAMA_LAYER}.post_attention_layernorm.weight"],
        up=mlp("weight"),
        up_bias=mlp("bias"),
        down=state[f"{LLAMA_LAYER}.mlp.down_proj.weight"],
        down_bias=state[f"{LLAMA_LAYER}.mlp.down_proj.bias"],
    )
    assert_equal_layers(model.weights.layers[1], expected)
    assert torch.equal(model.weights.embedding, state["model.embed_tokens.weight"])
    assert torch.equal(model.weights.final_norm, state["model.norm.weight"])
    assert torch.equal(model.weights.head, state["lm_head.weight"])
    assert not torch.equal(model.weights.head, model.weights.embedding)


def test_gpt2_linear_weights_are_turned_round(tmp_path: Path) -> None:
    theirs = checkpoints.random_model(checkpoints.gpt2())
    state = theirs.state_dict()
    model = load_float32(checkpoints.save(tmp_path, theirs))
    layer, prefix = model.weights.layers[1], "transformer.h.1"
    expected = LayerWeights(
        attention_norm=state[f"{prefix}.ln_1.weight"],
        attention_norm_bias=state[f"{prefix}.ln_1.bias"],
        qkv=state[f"{prefix}.attn.c_attn.weight"].T,
        qkv_bias=state[f"{prefix}.attn.c_attn.bias"],
        output=state[f"{prefix}.attn.c_proj.weight"].T,
        output_bias=state[f"{prefix}.attn.c_proj.bias"],
        mlp_norm=state[f"{prefix}.ln_2.weight"],
        mlp_norm_bias=state[f"{prefix}.ln_2.bias"],
        up=state[f"{prefix}.mlp.c_fc.weight"].T,
        up_bias=state[f"{prefix}.mlp.c_fc.bias"],
        down=state[f"{prefix}.mlp.c_proj.weight"].T,
        down_bias=state[f"{prefix}.mlp.c_proj.bias"],
    )
    assert_equal_layers(layer, expected)
    assert layer.qkv.is_contiguous()
    assert model.weights.position_embedding is not None
    assert torch.equal(model.weights.position_embedding, state["transformer.wpe.weight"])
    assert model.weights.head is model.weights.embedding


def assert_equal_layers(actual: LayerWeights, expected: LayerWeights) -> None:
    for name, tensor in vars(expected).items():
        found = getattr(actual, name)
        assert (found is None) == (tensor is None), name
        assert tensor is None or torch.equal(found, tensor), name


def test_a_gpt2_checkpoint_without_prefixes_reads_alike(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path, checkpoints.random_model(checkpoints.gpt2()))
    prefixed = load_float32(folder)
    stored = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # the causal mask that OpenAI's checkpoint stores
    save_file(bare, folder / "model.safetensors")
    for ours, theirs in zip(load_float32(folder).weights.tensors(), prefixed.weights.tensors(), strict=True):
        assert torch.equal(ours, theirs)


def test_shards_read_as_one_file(tmp_path: Path) -> None:
    theirs = checkpoints.random_model(checkpoints.qwen3())
    whole = load_float32(checkpoints.save(tmp_path / "whole", theirs))
    folder = checkpoints.save(tmp_path / "sharded", theirs, max_shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    sharded = load_float32(folder)
    for ours, expected in zip(sharded.weights.tensors(), whole.weights.tensors(), strict=True):
        assert torch.equal(ours, expected)
    assert sharded.fingerprint != whole.fingerprint
    shards[1].unlink()
    assert_refused(folder, shards[1].name, "missing")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_as_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = checkpoints.random_model(checkpoints.llama()).to(dtype)
    model = load_float32(checkpoints.save(tmp_path, theirs))
    assert model.weights.embedding.dtype == torch.float32
    assert torch.equal(model.weights.embedding, theirs.state_dict()["model.embed_tokens.weight"].float())
    assert torch.equal(model.weights.layers[0].qkv[:32], theirs.model.layers[0].self_attn.q_proj.weight.float())


def test_tokenizer_and_chat_template_come_along(folder: Path) -> None:
    assert load_float32(folder).chat_template is None
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}{{ eos_token }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = load_float32(folder)
    assert model.chat_template is not None
    assert model.tokenizer.bos_id == 256
    assert model.tokenizer.eos_ids == (257,)
    assert model.chat_template.encode([{"role": "user", "content": "hi"}]) == [256, 257]
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    template = load_float32(folder).chat_template
    assert template is not None
    assert template.encode([{"role": "user", "content": "hi"}]) == [257]
    (folder / "chat_template.jinja").write_text("{{ bos_token }}")
    template = load_float32(folder).chat_template
    assert template is not None
    assert template.encode([{"role": "user", "content": "hi"}]) == [256]


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert_refused(folder, "model.layers.1.mlp.up_proj.weight", "missing")


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    assert_refused(folder, "model.norm.weight", "[31]", "[32]")


def test_an_unknown_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
    assert_refused(folder, "model.layers.0.self_attn.q_proj.bias", "unknown to llama")


def test_constants_and_a_tied_head_may_be_stored_too(folder: Path) -> None:
    rewrite(
        folder,
        lambda tensors: tensors.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
            }
        ),
    )
    assert load_float32(folder).config.tied_head


def test_whole_numbers_are_no_weights(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    assert_refused(folder, "model.norm.weight", "I8")


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    assert file.stat().st_size > keep
    file.write_bytes(file.read_bytes()[:keep])
    assert_refused(folder, "model.safetensors")


def test_a_damaged_header_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 20) + b"{" * 20)
    assert_refused(folder, "model.safetensors")


def test_pickled_weights_are_never_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert_refused(folder, "pickled weights", "never read")
    (folder / "pytorch_model.bin").unlink()
    assert_refused(folder, "model.safetensors")


def test_an_index_may_not_leave_its_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../model.safetensors"}}))
    assert_refused(folder, "model.safetensors.index.json", "outside")
    index.write_text(json.dumps({"weight_map": ["model.safetensors"]}))
    assert_refused(folder, "weight_map")


def test_a_bad_config_is_named(folder: Path) -> None:
    checkpoints.edit_config(folder, hidden_size=...)
    assert_refused(folder, "hidden_size", "missing")
    checkpoints.edit_config(folder, hidden_size="32")
    assert_refused(folder, "hidden_size", "'32'")
    (folder / "config.json").write_text("{not json")
    assert_refused(folder, "config.json", "JSON")
    (folder / "config.json").write_text("[]")
    assert_refused(folder, "config.json", "object")
    (folder / "config.json").unlink()
    assert_refused(folder, "config.json", "missing")


def test_an_unknown_architecture_is_named(folder: Path) -> None:
    checkpoints.edit_config(folder, architectures=["MambaForCausalLM"])
    assert_refused(folder, "MambaForCausalLM", "LlamaForCausalLM")
    checkpoints.edit_config(folder, architectures=..., model_type="rwkv")
    assert_refused(folder, "rwkv")
    checkpoints.edit_config(folder, architectures=[["LlamaForCausalLM"]])
    assert_refused(folder, "architecture")


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert_refused(folder, "tokenizer.json")


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.embed_tokens.weight": torch.ones(250, 32)}))
    checkpoints.edit_config(folder, vocab_size=250, bos_token_id=None, eos_token_id=None)
    (folder / "generation_config.json").unlink()
    assert_refused(folder, "258 tokens", "250")
