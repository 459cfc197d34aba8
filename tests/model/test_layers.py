import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from drumline.model.config import RopeConfig
from drumline.model.layers import (
    causal_attention,
    feed_forward,
    normalise,
    project_qkv,
    rms_norm,
    rope_frequencies,
    rope_tables,
    rotate,
)
from tests.tiny import random_weights, tiny_config


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TestNorms:
    def test_rms_of_known_values(self):
        normed = rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), eps=0.0)
        assert normed.tolist() == pytest.approx([3 / math.sqrt(12.5), 8 / math.sqrt(12.5)])

    def test_rms_keeps_the_dtype_but_takes_statistics_in_float32(self):
        hidden = torch.full((1000,), 300.0, dtype=torch.bfloat16)
        normed = rms_norm(hidden, torch.ones(1000, dtype=torch.bfloat16), eps=1e-5)
        assert normed.dtype == torch.bfloat16
        assert normed.tolist() == [1.0] * 1000

    def test_layer_norm_is_torchs(self):
        config = tiny_config("gpt2")
        hidden, weight, bias = randn(4, 32), randn(32, seed=1), randn(32, seed=2)
        expected = functional.layer_norm(hidden, (32,), weight, bias, config.norm_eps)
        assert torch.equal(normalise(config, hidden, weight, bias), expected)


class TestCausalAttention:
    def test_two_new_tokens_over_five_cached_see_six_and_seven(self):
        query, key = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 7, 4)
        value = torch.arange(7.0).view(1, 1, 7, 1).expand(1, 1, 7, 4)  # equal scores: the output is a mean of positions
        mixed = causal_attention(query, key, value, query_offset=5)
        assert mixed[0, 0, :, 0].tolist() == pytest.approx([sum(range(6)) / 6, sum(range(7)) / 7])

    def test_keys_behind_the_last_visible_one_do_not_matter(self):
        query, key, value = randn(1, 2, 3, 4), randn(1, 2, 9, 4, seed=1), randn(1, 2, 9, 4, seed=2)
        before = causal_attention(query, key, value, 2)
        key[:, :, 5:], value[:, :, 5:] = 1e6, -1e6
        assert torch.equal(causal_attention(query, key, value, 2), before)

    @settings(deadline=None, max_examples=30)
    @given(time=st.integers(1, 6), cached=st.integers(0, 6), spare=st.integers(0, 3), group=st.sampled_from([1, 2, 3]))
    def test_equals_scaled_dot_product_attention(self, time: int, cached: int, spare: int, group: int):
        total = cached + time + spare
        query, key, value = randn(2, 2 * group, time, 8), randn(2, 2, total, 8, seed=1), randn(2, 2, total, 8, seed=2)
        visible = torch.tensor([[j <= cached + i for j in range(total)] for i in range(time)])
        expected = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)
        assert torch.allclose(causal_attention(query, key, value, cached), expected, atol=1e-6)

    @pytest.mark.parametrize(("time", "total", "offset"), [(3, 4, 2), (1, 1, 1), (1, 3, -1)])
    def test_keys_must_cover_the_queries(self, time: int, total: int, offset: int):
        with pytest.raises(ValueError, match=f"{time} queries at offset {offset} need {offset + time} keys"):
            causal_attention(randn(1, 1, time, 4), randn(1, 1, total, 4), randn(1, 1, total, 4), offset)


class TestProjections:
    def test_qkv_splits_and_grouped_shapes(self):
        config = tiny_config("mistral")
        layer = random_weights(config).layers[0]
        hidden = randn(5, 32)
        query, key, value = project_qkv(config, layer, hidden)
        assert query.shape == (5, 6, 10)
        assert key.shape == value.shape == (5, 2, 10)
        stacked = hidden @ layer.qkv.T
        assert torch.allclose(key.flatten(1), stacked[:, 60:80], atol=1e-6)
        assert torch.allclose(value.flatten(1), stacked[:, 80:], atol=1e-6)

    def test_query_and_key_are_normed_by_head_and_values_are_not(self):
        config = tiny_config("qwen3")
        layer = random_weights(config).layers[0]
        query, key, value = project_qkv(config, layer, randn(5, 32))
        assert torch.allclose((query / layer.query_norm).square().mean(-1), torch.ones(5, 4), atol=1e-3)
        assert torch.allclose((key / layer.key_norm).square().mean(-1), torch.ones(5, 2), atol=1e-3)
        assert not torch.allclose(value.square().mean(-1), torch.ones(5, 2), atol=1e-1)

    def test_swiglu(self):
        config = tiny_config("llama")
        layer = random_weights(config).layers[0]
        hidden = randn(3, 32)
        gate, up = hidden @ layer.up[:48].T, hidden @ layer.up[48:].T
        expected = (gate * torch.sigmoid(gate) * up) @ layer.down.T
        assert torch.allclose(feed_forward(config, layer, hidden), expected, atol=1e-5)

    @pytest.mark.parametrize(("family", "approximate"), [("gpt2", "tanh"), ("course", "none")])
    def test_gelu_with_biases(self, family: str, approximate: str):
        config = tiny_config(family)
        layer = random_weights(config).layers[0]
        hidden = randn(3, 32)
        up = functional.gelu(hidden @ layer.up.T + layer.up_bias, approximate=approximate)
        expected = up @ layer.down.T + layer.down_bias
        assert torch.allclose(feed_forward(config, layer, hidden), expected, atol=1e-5)


class TestRope:
    def test_position_zero_is_the_identity_and_norms_stay(self):
        cosine, sine = rope_tables(RopeConfig(), 8, 16, torch.device("cpu"))
        states = randn(16, 3, 8)
        turned = rotate(states, cosine, sine)
        assert torch.equal(turned[0], states[0])
        assert torch.allclose(turned.norm(dim=-1), states.norm(dim=-1), atol=1e-5)

    def test_scores_depend_on_the_distance_alone(self):
        cosine, sine = rope_tables(RopeConfig(), 8, 40, torch.device("cpu"))
        query, key = randn(1, 1, 8).expand(40, 1, 8), randn(1, 1, 8, seed=1).expand(40, 1, 8)
        scores = rotate(query, cosine, sine)[:, 0] @ rotate(key, cosine, sine)[:, 0].T
        for distance in (0, 1, 7):
            diagonal = scores.diagonal(-distance)
            assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4)

    def test_pairs_are_half_a_head_apart(self):
        cosine, sine = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])  # a quarter turn, and none
        assert rotate(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), cosine, sine).flatten().tolist() == [-3, 2, 1, 4]

    def test_plain_and_linear_frequencies(self):
        inverse, scale = rope_frequencies(RopeConfig(theta=100.0), 4)
        assert inverse.tolist() == pytest.approx([1.0, 0.1])
        assert scale == 1.0
        stretched, _ = rope_frequencies(RopeConfig(theta=100.0, scaling="linear", factor=4.0), 4)
        assert stretched.tolist() == pytest.approx([0.25, 0.025])

    def test_frequency_factors_divide(self):
        inverse, _ = rope_frequencies(RopeConfig(theta=100.0, frequency_factors=(1.0, 8.0)), 4)
        assert inverse.tolist() == pytest.approx([1.0, 0.0125])

    @pytest.mark.parametrize(
        ("rope", "parameters"),
        [
            (
                RopeConfig(500_000.0, "llama3", 8.0, 64, low_frequency_factor=1.0, high_frequency_factor=4.0),
                {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            ),
            (
                RopeConfig(10_000.0, "yarn", 4.0, 64),
                {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            ),
            (
                RopeConfig(
                    10_000.0, "yarn", 40.0, 64, beta_fast=16.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=1.0,
                    truncate=False,
                ),
                {
                    "rope_type": "yarn",
                    "factor": 40.0,
                    "original_max_position_embeddings": 64,
                    "beta_fast": 16.0,
                    "beta_slow": 2.0,
                    "mscale": 0.7,
                    "mscale_all_dim": 1.0,
                    "truncate": False,
                },
            ),
            (
                RopeConfig(10_000.0, "yarn", 4.0, 64, attention_factor=1.5),
                {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.5,
                },
            ),
        ],
        ids=["llama3", "yarn", "yarn with mscale", "yarn with a factor"],
    )  # fmt: skip
    def test_scaling_equals_transformers(self, rope: RopeConfig, parameters: dict):
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = LlamaConfig(
            hidden_size=64,
            num_attention_heads=4,
            head_dim=16,
            max_position_embeddings=int(64 * parameters["factor"]),
            rope_parameters={"rope_theta": rope.theta, **parameters},
        )
        expected, factor = ROPE_INIT_FUNCTIONS[rope.scaling](config, "cpu")
        inverse, scale = rope_frequencies(rope, 16)
        assert torch.allclose(inverse, expected, rtol=1e-6)
        assert scale == pytest.approx(factor)
        cosine, _ = rope_tables(rope, 16, 4, torch.device("cpu"))
        assert cosine[0].tolist() == pytest.approx([factor] * 8)
