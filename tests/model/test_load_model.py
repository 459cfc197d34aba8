"""`load_model`: its options, their defaults and their errors, and what the model says of itself."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline import ModelLoadError, load_model
from drumline.model import gpt2, llama
from drumline.model.backends import products
from drumline.model.config import GOLDEN
from drumline.model.quantise import quantise
from drumline.model.reference import uncached_logits
from drumline.model.registry import FAMILIES, packaged_model
from drumline.model.transformer_lm import CourseConfig, TransformerLM, save_checkpoint
from drumline.model.word_tokenizer import WordTokenizer
from tests import checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = checkpoints.random_model(checkpoints.llama(max_position_embeddings=4_096))
    return checkpoints.save(tmp_path_factory.mktemp("checkpoint") / "tiny-llama", model)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, outside the folders it loads."""
    monkeypatch.setenv("DRUMLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


def test_defaults(folder: Path) -> None:
    model = load_model(str(folder), precision="float32")
    assert model.name == "tiny-llama"
    assert (model.precision, model.dtype, model.kv_dtype) == ("float32", torch.float32, torch.float32)
    assert (model.window, model.config.window) == (2_048, 4_096)
    assert model.device == torch.device("cpu")
    assert not model.exact
    assert not model.slides


def test_int8_is_exact_with_float32_activations_and_bfloat16_keys_and_values(folder: Path) -> None:
    model, wide = load_model(folder, precision="int8"), load_model(folder, precision="float32")
    assert (model.precision, model.dtype, model.kv_dtype) == ("int8", torch.float32, torch.bfloat16)
    assert model.exact
    assert model.fingerprint == wide.fingerprint
    expected = quantise(wide.weights, wide.config)
    assert all(torch.equal(a, b) for a, b in zip(model.weights.tensors(), expected.tensors(), strict=True))


def test_auto_is_int8_where_its_products_are_exact(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "choose_product", products.PanelProduct)
    model = load_model(folder)
    assert (model.precision, model.exact) == ("int8", True)


def test_bfloat16_rounds_every_tensor(folder: Path) -> None:
    wide, narrow = (load_model(folder, precision=name) for name in ("float32", "bfloat16"))
    assert (narrow.precision, narrow.kv_dtype) == ("bfloat16", torch.bfloat16)
    for ours, theirs in zip(narrow.weights.tensors(), wide.weights.tensors(), strict=True):
        assert torch.equal(ours, theirs.to(torch.bfloat16))
    assert narrow.fingerprint == wide.fingerprint


def test_options_are_taken(folder: Path) -> None:
    assert load_model(folder, window=1).window == 1
    assert load_model(folder, window=4_096).window == 4_096
    mixed = load_model(folder, precision="float32", kv_dtype="bfloat16")
    assert (mixed.dtype, mixed.kv_dtype) == (torch.float32, torch.bfloat16)
    for name, kv_dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("int8", torch.int8)):
        assert load_model(folder, precision="int8", kv_dtype=name).kv_dtype == kv_dtype


def test_the_default_window_is_the_models_where_that_is_smaller(tmp_path: Path) -> None:
    assert load_model(checkpoints.save(tmp_path, checkpoints.random_model(checkpoints.llama()))).window == 64


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"precision": "float16"}, "precision 'float16'"),
        ({"precision": "float32", "kv_dtype": "int8"}, "kv_dtype int8 needs precision int8, not float32"),
        ({"precision": "int8", "kv_dtype": "float16"}, "kv_dtype 'float16'"),
        ({"device": "abacus"}, "device 'abacus'"),
        ({"device": "meta"}, "device 'meta'"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not available"),
        ({"window": 0}, "window 0 .* 4096"),
        ({"window": -1}, "window -1"),
        ({"window": 4_097}, "window 4097 .* 4096"),
        ({"window": 2.5}, "window 2.5"),
        ({"window": True}, "window True"),
    ],
)
def test_a_wrong_option_is_named(folder: Path, options: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelLoadError, match=part):
        load_model(folder, **options)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere\.gguf: no such file or folder"):
        load_model(tmp_path / "nowhere.gguf")


def test_an_active_sliding_window_bounds_the_window(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path, checkpoints.random_model(checkpoints.mistral(sliding_window=16)))
    with pytest.raises(ModelLoadError, match=r"sliding_window 16 .* window 64 is too long, window=16 would work"):
        load_model(folder)
    assert load_model(folder, window=16).window == 16


def test_the_fingerprint_follows_the_content(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "under-another-name"
    shutil.copytree(folder, copy)
    assert load_model(copy, precision="float32").fingerprint == load_model(folder, precision="float32").fingerprint
    checkpoints.edit_config(copy, rms_norm_eps=1e-4)
    changed_settings = load_model(copy, precision="float32").fingerprint
    shutil.copy(folder / "config.json", copy / "config.json")
    other = checkpoints.random_model(checkpoints.llama(max_position_embeddings=4_096), seed=1)
    checkpoints.save(copy, other)
    changed_weights = load_model(copy, precision="float32").fingerprint
    assert len({load_model(folder, precision="float32").fingerprint, changed_settings, changed_weights}) == 3
    assert len(changed_weights) == 64


def test_the_course_model_loads_like_any_other_and_slides(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vocabulary = WordTokenizer.from_text("the drum line keeps the beat")
    trained = TransformerLM(CourseConfig(vocabulary.vocab_size, width=16, layers=2, heads=2, block_size=8)).eval()
    save_checkpoint(tmp_path / "course", trained, vocabulary)
    model = load_model(tmp_path / "course", precision="float32")
    assert model.slides
    assert (model.name, model.window, model.chat_template) == ("course", 8, None)
    ids = model.tokenizer.encode("the drum keeps")
    with torch.inference_mode():
        expected = trained(torch.tensor([ids]))["logits"][0]
    assert torch.allclose(uncached_logits(model, ids), expected, atol=1e-5)


def test_the_golden_configuration_builds() -> None:
    """0.04B: 12 layers, width 512, 8/2 heads of 64, vocabulary 4,096, window 1,024."""
    asked: dict[str, tuple[int, ...]] = {}

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        asked[name] = shape
        return torch.zeros(shape)

    weights = llama.build_weights(take, GOLDEN)
    assert asked["model.layers.11.self_attn.k_proj.weight"] == (128, 512)
    assert asked["model.layers.0.mlp.down_proj.weight"] == (512, 1_408)
    assert weights.layers[0].qkv.shape == (768, 512)
    assert weights.head is weights.embedding
    assert sum(tensor.numel() for tensor in weights.tensors()) == 35_926_528


def test_every_family_has_its_two_functions() -> None:
    assert {name for name, family in FAMILIES.items() if family is llama} == {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
    assert FAMILIES["GPT2LMHeadModel"] is gpt2
    assert all(callable(family.read_config) and callable(family.build_weights) for family in FAMILIES.values())


def test_the_packaged_model_is_found_without_importing_it() -> None:
    path = packaged_model()
    assert path is not None
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.stat().st_size > 90_000_000
