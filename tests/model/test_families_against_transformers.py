"""Logits of every family against transformers on the same random weights: at most 2e-4 apart."""

import functools
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from drumline import load_model
from drumline.model.language_model import LanguageModel
from drumline.model.reference import uncached_logits
from drumline.model.registry import packaged_model
from tests import checkpoints

load_float32 = functools.partial(load_model, precision="float32")

BOUND = 2e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
SMOLLM2 = {  # as published for SmolLM2-135M-Instruct
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8_192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "tie_word_embeddings": True,
}
CONFIGS = {
    "llama": checkpoints.llama(),
    "llama, tied": checkpoints.llama(tie_word_embeddings=True),
    "llama, biases": checkpoints.llama(attention_bias=True, mlp_bias=True),
    "llama, head_dim": checkpoints.llama(head_dim=24),
    "llama, gelu": checkpoints.llama(hidden_act="gelu"),
    "llama, theta": checkpoints.llama(rope_parameters={"rope_type": "default", "rope_theta": 50.0}),
    "llama, linear": checkpoints.llama(rope_parameters={"rope_type": "linear", "rope_theta": 50.0, "factor": 2.5}),
    "llama, llama3": checkpoints.llama(rope_parameters=LLAMA3),
    "llama, yarn": checkpoints.llama(rope_parameters=YARN),
    "llama, yarn not truncated": checkpoints.llama(rope_parameters=YARN | {"truncate": False, "beta_fast": 8.0}),
    "llama, yarn factor": checkpoints.llama(rope_parameters=YARN | {"attention_factor": 0.8}),
    "llama, yarn mscale": checkpoints.llama(rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}),
    "mistral": checkpoints.mistral(),
    "mistral, wide sliding window": checkpoints.mistral(sliding_window=64),
    "qwen2": checkpoints.qwen2(),
    "qwen2, tied": checkpoints.qwen2(tie_word_embeddings=True),
    "qwen3": checkpoints.qwen3(),
    "qwen3, tied, biases": checkpoints.qwen3(tie_word_embeddings=True, attention_bias=True),
    "gpt2": checkpoints.gpt2(),
    "gpt2, exact gelu, narrow": checkpoints.gpt2(activation_function="gelu", n_inner=40),
    "gpt2, untied": checkpoints.gpt2(tie_word_embeddings=False),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_equal_those_of_transformers(config: PreTrainedConfig, tmp_path: Path) -> None:
    theirs = checkpoints.random_model(config)
    ours = load_float32(checkpoints.save(tmp_path, theirs))
    ids = torch.randint(0, checkpoints.VOCABULARY, (64,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    actual = uncached_logits(ours, ids.tolist())
    assert actual.shape == (64, checkpoints.VOCABULARY)
    assert expected.std() > 0.1
    assert (actual - expected).abs().max() <= BOUND


def test_logits_of_smollm2_equal_those_of_transformers(smollm2: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packaged_model()
    assert path is not None
    # transformers makes this map anew for each module, which takes longer than all the rest.
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    # What from_pretrained(gguf_file=...) does, but for the package accelerate, which that insists on.
    config = LlamaConfig(**SMOLLM2)
    with no_init_weights():
        theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=theirs)["tensors"]
    assert theirs.load_state_dict(tensors, strict=False).missing_keys == ["lm_head.weight"]
    theirs.tie_weights()
    ids = smollm2.tokenizer.encode("The capital of France is")
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    actual = uncached_logits(smollm2, ids)
    assert (actual - expected).abs().max() <= BOUND
    assert smollm2.tokenizer.token_bytes(int(actual[-1].argmax())) == b" Paris"
