"""GGUF files that the `gguf` library writes: names, permuted rows, block types, RoPE scaling, and damage."""

import functools
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import PreTrainedConfig

from drumline import ModelLoadError, load_model
from drumline.model.config import ModelConfig, RopeConfig
from drumline.model.registry import packaged_model
from tests import checkpoints

load_float32 = functools.partial(load_model, precision="float32")

Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", checkpoints.llama())


def write(path: Path, config: PreTrainedConfig, **settings: Any) -> Path:
    model = checkpoints.random_model(config)
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    tensors = checkpoints.gguf_tensors(model)
    return checkpoints.write_gguf(path, architecture, checkpoints.gguf_settings(model) | settings, tensors)


def assert_refused(path: Path, *parts: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_float32(path)
    for part in (str(path), *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        checkpoints.llama(),
        checkpoints.llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=24),
        checkpoints.mistral(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        checkpoints.qwen2(tie_word_embeddings=True),
        checkpoints.qwen3(attention_bias=True),
        checkpoints.gpt2(),
    ],
    ids=["llama", "llama, tied, biases", "mistral", "qwen2", "qwen3", "gpt2"],
)
def test_a_gguf_file_reads_as_the_checkpoint_it_was_made_of(config: PreTrainedConfig, tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path / "folder", checkpoints.random_model(config))
    expected, actual = load_float32(folder), load_float32(write(tmp_path / "tiny.gguf", config))
    assert described(actual.config) == described(expected.config)
    for ours, theirs in zip(actual.weights.tensors(), expected.weights.tensors(), strict=True):
        assert torch.equal(ours, theirs)
    assert (actual.weights.head is actual.weights.embedding) == config.tie_word_embeddings
    assert actual.name == "tiny"


def described(config: ModelConfig) -> dict[str, Any]:
    """The configuration without the name: GGUF calls Mistral llama."""
    return vars(config) | {"architecture": ""}


def test_tokenizer_and_chat_template_come_along(whole: Path) -> None:
    model = load_float32(whole)
    assert model.tokenizer.encode("cab") == [model.tokenizer.encode("c")[0], 258]
    assert (model.tokenizer.bos_id, model.tokenizer.eos_ids) == (256, (257,))
    assert model.chat_template is not None
    assert model.chat_template.encode([{"role": "user", "content": "hi"}]) == [256, 257]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantised_tensors_are_what_the_library_makes_of_them(kind: str, tmp_path: Path) -> None:
    model = checkpoints.random_model(checkpoints.llama(intermediate_size=64))
    numbered = GGMLQuantizationType[kind]
    tensors: dict[str, Array] = dict(checkpoints.gguf_tensors(model))
    matrices = [name for name, values in tensors.items() if values.ndim == 2]
    tensors |= {name: quantize(tensors[name], numbered) for name in matrices}
    path = checkpoints.write_gguf(
        tmp_path / "tiny.gguf", "llama", checkpoints.gguf_settings(model), tensors, dict.fromkeys(matrices, numbered)
    )
    ours = load_float32(path).weights.layers[1]
    theirs = model.model.layers[1]

    def rounded(*linears: torch.nn.Linear) -> torch.Tensor:
        rows = [quantize(linear.weight.detach().numpy(), numbered) for linear in linears]
        return torch.from_numpy(np.concatenate([dequantize(row, numbered) for row in rows]))

    attention, mlp = theirs.self_attn, theirs.mlp
    assert torch.equal(ours.qkv, rounded(attention.q_proj, attention.k_proj, attention.v_proj))
    assert torch.equal(ours.output, rounded(attention.o_proj))
    assert torch.equal(ours.up, rounded(mlp.gate_proj, mlp.up_proj))
    assert torch.equal(ours.down, rounded(mlp.down_proj))
    assert not torch.equal(ours.down, mlp.down_proj.weight)


BLOCKS = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144), "Q6_K": (256, 210)}
SCALES_AT = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_read_by_their_formula(kind: str, tmp_path: Path) -> None:
    model = checkpoints.random_model(checkpoints.llama(hidden_size=256, num_hidden_layers=1))
    elements, size = BLOCKS[kind]
    generator = np.random.default_rng(5)
    blocks = generator.integers(0, 256, (checkpoints.VOCABULARY, 256 // elements, size), np.uint8)
    for at in SCALES_AT[kind]:
        scales = generator.uniform(0.001, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    tensors: dict[str, Array] = dict(checkpoints.gguf_tensors(model))
    tensors["token_embd.weight"] = blocks.reshape(checkpoints.VOCABULARY, -1)
    numbered = GGMLQuantizationType[kind]
    path = checkpoints.write_gguf(
        tmp_path / "tiny.gguf",
        "llama",
        checkpoints.gguf_settings(model),
        tensors,
        {"token_embd.weight": numbered},
    )
    embedding = load_float32(path).weights.embedding
    assert torch.equal(embedding, torch.from_numpy(dequantize(tensors["token_embd.weight"], numbered)))
    for row in (0, checkpoints.VOCABULARY - 1):
        expected = [value for block in blocks[row] for value in by_hand(kind, block.tobytes())]
        assert embedding[row].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


def by_hand(kind: str, block: bytes) -> list[float]:
    """A block's values one by one, as ggml's quants.c describes them."""
    scales = [struct.unpack("<e", block[at : at + 2])[0] for at in SCALES_AT[kind]]
    if kind == "Q8_0":
        return [scales[0] * number for number in struct.unpack("<32b", block[2:])]
    if kind == "Q4_0":
        return [scales[0] * (number - 8) for number in nibbles(block[2:])]
    if kind == "Q4_1":
        return [scales[0] * number + scales[1] for number in nibbles(block[4:])]
    return q4_k(*scales, block[4:16], block[16:]) if kind == "Q4_K" else q6_k(*scales, block)


def nibbles(packed: bytes) -> list[int]:
    return [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]


def q4_k(scale: float, minimum: float, packed: bytes, quants: bytes) -> list[float]:
    values = []
    for part in range(8):
        if part < 4:
            step, low = packed[part] & 63, packed[part + 4] & 63
        else:
            step = packed[part + 4] & 15 | packed[part - 4] >> 6 << 4
            low = packed[part + 4] >> 4 | packed[part] >> 6 << 4
        numbers = nibbles(quants[part // 2 * 32 :][:32])[part % 2 * 32 :][:32]
        values += [scale * step * number - minimum * low for number in numbers]
    return values


def q6_k(scale: float, block: bytes) -> list[float]:
    lower, upper, steps = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    values = []
    for index in range(256):
        half, quarter, lane = index // 128, index % 128 // 32, index % 32
        four = lower[half * 64 + quarter % 2 * 32 + lane] >> (quarter // 2 * 4) & 15
        two = upper[half * 32 + lane] >> (quarter * 2) & 3
        values.append(scale * steps[index // 16] * ((four | two << 4) - 32))
    return values


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 1.0}, RopeConfig()),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, RopeConfig(scaling="linear", factor=2.0)),
        ({"rope.scale_linear": 4.0}, RopeConfig(scaling="linear", factor=4.0)),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            RopeConfig(scaling="yarn", factor=4.0, original_window=16, beta_fast=16.0),
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5},
            RopeConfig(scaling="yarn", factor=4.0, original_window=64, attention_factor=0.5693147180559945),
        ),
    ],
)
def test_rope_scaling_of_the_metadata(settings: dict[str, Any], expected: RopeConfig, tmp_path: Path) -> None:
    assert load_float32(write(tmp_path / "tiny.gguf", checkpoints.llama(), **settings)).config.rope == expected


def test_rope_factors_are_kept_as_divisors(tmp_path: Path) -> None:
    model = checkpoints.random_model(checkpoints.llama())
    factors = np.array([1.0, 1.5, 4.0, 8.0], np.float32)
    tensors = checkpoints.gguf_tensors(model) | {"rope_freqs.weight": factors}
    path = checkpoints.write_gguf(tmp_path / "tiny.gguf", "llama", checkpoints.gguf_settings(model), tensors)
    assert load_float32(path).config.rope == RopeConfig(frequency_factors=(1.0, 1.5, 4.0, 8.0))
    tensors["rope_freqs.weight"] = factors[:3]
    path = checkpoints.write_gguf(tmp_path / "short.gguf", "llama", checkpoints.gguf_settings(model), tensors)
    assert_refused(path, "3 RoPE frequency factors for 4")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, ["longrope"]),
        ({"rope.dimension_count": 4}, ["partial_rotary_factor"]),
        ({"expert_count": 8}, ["llama.expert_count = 8"]),
        ({"logit_scale": 2.0}, ["llama.logit_scale"]),
        ({"attention.head_count": 0}, ["attention.head_count"]),
        ({"attention.value_length": 4}, ["attention.value_length"]),
        ({"attention.sliding_window": 16}, ["sliding_window 16", "window=16 would work"]),
        ({"split.count": 2}, ["split"]),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_ext_factor": 0.5},
            ["ext_factor"],
        ),
    ],
)
def test_metadata_that_is_not_served_is_named(settings: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    assert_refused(write(tmp_path / "tiny.gguf", checkpoints.llama(), **settings), *parts)


def test_a_sliding_window_is_kept_and_served_up_to_its_width(tmp_path: Path) -> None:
    for config in (checkpoints.llama(), checkpoints.qwen2()):
        path = write(tmp_path / f"{config.model_type}.gguf", config, **{"attention.sliding_window": 16})
        model = load_float32(path, window=16)
        assert (model.config.sliding_window, model.window) == (16, 16)
        with pytest.raises(ModelLoadError, match="window=16 would work"):
            load_float32(path, window=17)


def test_a_missing_tensor_a_wrong_shape_and_an_unknown_tensor_are_named(tmp_path: Path) -> None:
    model = checkpoints.random_model(checkpoints.llama())
    tensors = checkpoints.gguf_tensors(model)

    def written(**changes: Array | None) -> Path:
        changed = tensors | {name.replace("__", "."): values for name, values in changes.items()}
        kept = {name: values for name, values in changed.items() if values is not None}
        return checkpoints.write_gguf(tmp_path / "tiny.gguf", "llama", checkpoints.gguf_settings(model), kept)

    assert_refused(written(blk__1__ffn_up__weight=None), "blk.1.ffn_up.weight", "missing")
    assert_refused(written(token_embd__weight=None), "vocab_size")
    assert_refused(
        written(blk__1__attn_q__weight=np.ones((32, 31), np.float32)), "blk.1.attn_q.weight", "[32, 31]", "[32, 32]"
    )
    assert_refused(
        written(blk__1__attn_q_norm__weight=np.ones(8, np.float32)), "blk.1.attn_q_norm.weight", "unknown to llama"
    )


def test_a_type_that_is_not_served_is_named(tmp_path: Path) -> None:
    model = checkpoints.random_model(checkpoints.llama())
    tensors: dict[str, Array] = dict(checkpoints.gguf_tensors(model))
    name = "blk.0.attn_output.weight"
    tensors[name] = quantize(tensors[name], GGMLQuantizationType.Q5_0)
    path = checkpoints.write_gguf(
        tmp_path / "tiny.gguf", "llama", checkpoints.gguf_settings(model), tensors, {name: GGMLQuantizationType.Q5_0}
    )
    assert_refused(path, name, "Q5_0", "Q4_K")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    model = checkpoints.random_model(checkpoints.llama())
    path = checkpoints.write_gguf(
        tmp_path / "tiny.gguf", "gemma3", checkpoints.gguf_settings(model), checkpoints.gguf_tensors(model)
    )
    assert_refused(path, "gemma3", "qwen2")


def test_what_is_no_gguf_file_is_refused(whole: Path, tmp_path: Path) -> None:
    content, path = whole.read_bytes(), tmp_path / "bad.gguf"
    for bad, part in [
        (b"", "empty"),
        (b"PK\x03\x04 a zip file", "magic invalid"),
        (content[:4] + struct.pack("<I", 1) + content[8:], "version 1"),
        (content[:4] + struct.pack(">I", 3) + content[8:], "GGUF file"),
    ]:
        path.write_bytes(bad)
        assert_refused(path, part)


def test_a_file_cut_anywhere_is_refused(whole: Path, tmp_path: Path) -> None:
    content, path = whole.read_bytes(), tmp_path / "cut.gguf"
    for keep in [*range(4, 200, 7), *range(200, len(content), len(content) // 60)]:
        path.write_bytes(content[:keep])
        assert_refused(path, "GGUF file")
    path.write_bytes(content[:-4])  # the last tensor may be padded, but not by less than it lacks
    assert_refused(path, "not a whole GGUF file")


def test_damage_in_the_header_is_refused_or_harmless(whole: Path, tmp_path: Path) -> None:
    """Each byte may be wrong; whatever it was, there is a model or a `ModelLoadError`, and no other error."""
    content, path, chance = whole.read_bytes(), tmp_path / "damaged.gguf", random.Random(7)
    header = content.index(b"token_embd.weight") + 200
    outcomes = {True: 0, False: 0}
    for _ in range(300):
        damaged, at = bytearray(content), chance.randrange(8, header)
        damaged[at] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            load_float32(path)
            outcomes[True] += 1
        except ModelLoadError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 20


def test_smollm2_is_described_as_published() -> None:
    path = packaged_model()
    assert path is not None
    model = load_float32(path)
    assert model.config == ModelConfig(
        architecture="llama",
        vocab_size=49_152,
        layers=30,
        width=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        ffn_width=1_536,
        window=8_192,
        norm="rms",
        norm_eps=1e-5,
        activation="silu",
        gated=True,
        positions="rope",
        rope=RopeConfig(theta=100_000.0),
        tied_head=True,
    )
    assert (model.window, model.tokenizer.bos_id, model.tokenizer.eos_ids) == (2_048, 1, (2,))
    assert sum(tensor.numel() for tensor in model.weights.tensors()) == 134_515_008
