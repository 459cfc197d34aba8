"""Int8 models kept between starts: the same bits, and never anything that was damaged, changed or half written."""

import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drumline.model import packed_cache, registry
from drumline.model.errors import ModelLoadError
from drumline.model.language_model import LanguageModel
from drumline.model.registry import load_model
from drumline.model.transformer_lm import CourseConfig, TransformerLM, save_checkpoint
from drumline.model.weights import QuantisedWeight
from drumline.model.word_tokenizer import WordTokenizer
from tests import checkpoints

TEXT = "the drum <|im_start|> keeps é 12 🥁"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where entries lie."""
    monkeypatch.setenv("DRUMLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Grows by a path whenever a model is read from its own files."""
    paths: list[Path] = []
    read = registry._read

    def watched(path: Path, window: int | None) -> object:
        paths.append(path)
        return read(path, window)

    monkeypatch.setattr(registry, "_read", watched)
    return paths


def llama_folder(tmp_path: Path, **settings: object) -> Path:
    """With RoPE scaling, which is part of the description."""
    config = checkpoints.llama(**settings)
    return checkpoints.save(tmp_path / "llama", checkpoints.random_model(config))


def gpt2_folder(tmp_path: Path) -> Path:
    return checkpoints.save(tmp_path / "gpt2", checkpoints.random_model(checkpoints.gpt2()))


def llama_file(tmp_path: Path) -> Path:
    model = checkpoints.random_model(checkpoints.llama())
    tensors = checkpoints.gguf_tensors(model)
    return checkpoints.write_gguf(tmp_path / "tiny.gguf", "llama", checkpoints.gguf_settings(model), tensors)


def course_folder(tmp_path: Path) -> Path:
    vocabulary = WordTokenizer.from_text("the drum keeps the beat")
    trained = TransformerLM(CourseConfig(vocabulary.vocab_size, width=16, layers=2, heads=2, block_size=8))
    save_checkpoint(tmp_path / "course", trained, vocabulary)
    return tmp_path / "course"


def load(path: Path) -> LanguageModel:
    return load_model(path, precision="int8")


def assert_same(first: LanguageModel, second: LanguageModel) -> None:
    """In bits, and in everything that a tokenizer and a template are asked for."""
    for ours, theirs in zip(first.weights.tensors(), second.weights.tensors(), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    nameless = {"weights": None, "tokenizer": None, "chat_template": None}
    assert vars(first) | nameless == vars(second) | nameless
    for layer, other in zip(first.weights.layers, second.weights.layers, strict=True):
        for slot in ("qkv", "output", "up", "down"):
            mine, others = getattr(layer, slot), getattr(other, slot)
            assert isinstance(mine, QuantisedWeight)
            assert mine.rotation == others.rotation
    for name in ("vocab_size", "bos_id", "eos_ids", "adds_bos", "strips_leading_space", "special_tokens"):
        assert getattr(first.tokenizer, name) == getattr(second.tokenizer, name)
    assert first.tokenizer.encode(TEXT) == second.tokenizer.encode(TEXT)
    assert first.tokenizer.encode_template(TEXT) == second.tokenizer.encode_template(TEXT)
    every = range(first.tokenizer.vocab_size)
    assert [first.tokenizer.token_bytes(i) for i in every] == [second.tokenizer.token_bytes(i) for i in every]
    assert (first.chat_template is None) == (second.chat_template is None)
    if first.chat_template is not None and second.chat_template is not None:
        messages = [{"role": "user", "content": "hi"}]
        assert first.chat_template.encode(messages) == second.chat_template.encode(messages)


@pytest.mark.parametrize("make", [llama_folder, gpt2_folder, llama_file, course_folder])
def test_a_second_load_reads_the_entry_and_gives_the_same_model(
    make: Callable[[Path], Path], tmp_path: Path, cache: Path, reads: list[Path]
) -> None:
    path = make(tmp_path)
    first = load(path)
    (entry,) = cache.iterdir()
    assert reads == [path]
    second = load(path)
    assert reads == [path]
    assert list(cache.iterdir()) == [entry]
    assert_same(first, second)
    assert second.exact


def test_rope_scaling_survives(tmp_path: Path, cache: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    folder = llama_folder(tmp_path, rope_parameters=rope)
    first, second = load(folder), load(folder)
    assert first.config == second.config
    assert first.config.rope is not None
    assert first.config.rope.scaling == "llama3"
    factors = replace(first.config.rope, frequency_factors=(1.0, 2.0))
    assert packed_cache._config(packed_cache.asdict(replace(first.config, rope=factors))).rope == factors


def test_options_of_the_step_are_not_part_of_the_entry(tmp_path: Path, cache: Path, reads: list[Path]) -> None:
    path = llama_folder(tmp_path)
    load(path)
    narrow = load_model(path, precision="int8", window=16, kv_dtype="int8")
    assert (narrow.window, narrow.kv_dtype, len(reads)) == (16, torch.int8, 1)
    with pytest.raises(ModelLoadError, match="window 65"):
        load_model(path, precision="int8", window=65)
    assert len(list(cache.iterdir())) == 1


def test_other_precisions_write_nothing(tmp_path: Path, cache: Path) -> None:
    load_model(llama_folder(tmp_path), precision="float32")
    assert not cache.exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_every_file_of_the_model_counts(name: str, tmp_path: Path, cache: Path, reads: list[Path]) -> None:
    path = llama_folder(tmp_path)
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    load(path)
    if name == "config.json":
        checkpoints.edit_config(path, rms_norm_eps=1e-3)
    elif name == "model.safetensors":
        checkpoints.save(path, checkpoints.random_model(checkpoints.llama(), seed=1))
        (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    else:
        file = path / name
        file.write_text(file.read_text() + "\n")
    load(path)
    assert len(reads) == 2
    assert len(list(cache.iterdir())) == 2


def test_the_version_counts(tmp_path: Path, cache: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = llama_folder(tmp_path)
    load(path)
    monkeypatch.setattr(packed_cache, "version", lambda name: "99.0")
    load(path)
    monkeypatch.setattr(packed_cache.quantise, "FORMAT", 99)
    load(path)
    assert (len(reads), len(list(cache.iterdir()))) == (3, 3)


def test_the_files_name_and_place_do_not_count(tmp_path: Path, cache: Path, reads: list[Path]) -> None:
    path = llama_file(tmp_path)
    load(path)
    other = shutil.copy(path, tmp_path / "other.gguf")
    assert load(other).name == "other"
    assert reads == [path]


def _truncate(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-1])


def _empty(entry: Path) -> None:
    entry.write_bytes(b"")


def _flip(at: float) -> Callable[[Path], None]:
    def flip(entry: Path) -> None:
        content = bytearray(entry.read_bytes())
        content[int(len(content) * at)] ^= 1
        entry.write_bytes(content)

    return flip


def _another(entry: Path) -> None:
    """A whole safetensors file, but not of ours."""
    from safetensors.torch import save_file

    save_file({"embedding": torch.zeros(3)}, entry)


@pytest.mark.parametrize(
    "damage", [_truncate, _empty, _another, *(_flip(at) for at in (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.9999))]
)
def test_a_damaged_entry_is_noticed_and_made_again(
    damage: Callable[[Path], None],
    tmp_path: Path,
    cache: Path,
    reads: list[Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = llama_folder(tmp_path)
    first = load(path)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    damage(entry)
    assert_same(first, load(path))
    assert len(reads) == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "damaged" in caplog.text
    assert entry.read_bytes() == whole
    load(path)
    assert len(reads) == 2


def test_a_cache_that_cannot_be_written_is_only_a_warning(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").write_text("where the folder should be")
    monkeypatch.setenv("DRUMLINE_CACHE", str(tmp_path / "a file"))
    path = llama_folder(tmp_path)
    assert_same(load(path), load(path))
    assert len(reads) == 2
    assert "cannot be kept" in caplog.text
    assert (tmp_path / "a file").read_text() == "where the folder should be"


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_cache, "save_file", full)
    assert load(llama_folder(tmp_path)).exact
    assert "No space left" in caplog.text
    assert list(cache.iterdir()) == []


def test_loads_at_once_all_get_the_same_model(tmp_path: Path, cache: Path) -> None:
    path = llama_folder(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(load, [path] * 4))
    for model in models:
        assert_same(model, load(path))
    assert len(list(cache.iterdir())) == 1


def test_a_model_that_changed_while_it_was_read_is_not_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = llama_folder(tmp_path), registry._read

    def meanwhile(path: Path, window: int | None) -> object:
        contents = read(path, window)
        checkpoints.edit_config(path, rms_norm_eps=1e-3)
        return contents

    monkeypatch.setattr(registry, "_read", meanwhile)
    load(path)
    assert not cache.exists()


def test_the_oldest_entries_and_abandoned_files_go(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cache, "_MOST_ENTRIES", 2)
    path = llama_folder(tmp_path)
    cache.mkdir(parents=True)
    for name, age_s in [("old.safetensors", 100), ("older.safetensors", 200), ("a.part", 90_000), ("b.part", 100)]:
        (cache / name).write_bytes(b"")
        used = (cache / name).stat().st_mtime - age_s
        os.utime(cache / name, (used, used))
    load(path)
    assert {file.name for file in cache.iterdir()} >= {"old.safetensors", "b.part"}
    assert not {"older.safetensors", "a.part"} & {file.name for file in cache.iterdir()}
    assert len(list(cache.iterdir())) == 3


def test_an_error_of_the_model_leaves_no_entry(tmp_path: Path, cache: Path) -> None:
    path = llama_folder(tmp_path)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load(path)
    assert not cache.exists()
