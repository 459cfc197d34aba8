"""A folder as Hugging Face writes it: config.json, safetensors (one file or several), tokenizer.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drumline.model.bpe_tokenizer import load_tokenizer_json
from drumline.model.chat import ChatTemplate, load_chat_template
from drumline.model.checkpoint import Checkpoint, check_shape
from drumline.model.errors import ModelLoadError
from drumline.model.tokenizer import Tokenizer
from drumline.model.transformer_lm import MODEL_TYPE as COURSE_MODEL
from drumline.model.weights import Take
from drumline.model.word_tokenizer import WordTokenizer

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BESIDE_WEIGHTS = (
    *("config.json", "generation_config.json", _INDEX, "vocabulary.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
)
_STORED_TYPES = ("F32", "F16", "BF16")


def load_safetensors(folder: Path) -> Checkpoint:
    """Open a checkpoint folder; raises `ModelLoadError` for what is missing or damaged, naming it. Never unpickles."""
    settings = _read_json(folder / "config.json")
    shards = [_open(file) for file in _weight_files(folder)]
    homes = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118 (no mapping)
    unread = set(homes)
    return Checkpoint(
        settings=settings,
        take=_take(homes, unread),
        unread=unread,
        files=(folder / "config.json", *_weight_files(folder)),
        open_tokenizer=lambda: _open_tokenizer(folder, settings),
    )


def files_read(folder: Path) -> list[Path]:
    """Every file of the folder that says something about the model, its tokenizer or its chat template."""
    beside = [file for file in (folder / name for name in _BESIDE_WEIGHTS) if file.exists()]
    return [*beside, *(file for file in _weight_files(folder) if file.exists())]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{file.name} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file.name} is not a JSON object")
    return content


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    if (folder / _INDEX).exists():
        index = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
            raise ModelLoadError(f"{_INDEX} has no weight_map of tensor names to files")
        names = sorted(set(index.values()))
        if any(Path(name).name != name for name in names):
            raise ModelLoadError(f"{_INDEX} names files outside the folder")
        return [folder / name for name in names]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise ModelLoadError(f"there is no {_SINGLE}; pickled weights (*.bin, *.pt) are never read: convert them first")
    raise ModelLoadError(f"there is neither {_SINGLE} nor {_INDEX}")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise ModelLoadError(f"{file.name} is missing") from None
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{file.name} is not a whole safetensors file: {error}") from error


def _take(homes: Mapping[str, Any], unread: set[str]) -> Take:
    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        # Checkpoints of a bare model (as OpenAI's GPT-2) leave the first part of each name out.
        stored_name = name if name in homes else name.partition(".")[2]
        if stored_name not in homes:
            raise ModelLoadError(f"tensor {name} is missing")
        stored = homes[stored_name].get_slice(stored_name)
        check_shape(name, tuple(stored.get_shape()), shape)
        if stored.get_dtype() not in _STORED_TYPES:
            raise ModelLoadError(f"tensor {name} has type {stored.get_dtype()}; served are {', '.join(_STORED_TYPES)}")
        unread.discard(stored_name)
        tensor: Tensor = homes[stored_name].get_tensor(stored_name)
        return tensor.to(torch.float32, copy=True)  # out of the mapped file, which may change under us

    return take


def _open_tokenizer(folder: Path, settings: Mapping[str, Any]) -> tuple[Tokenizer, ChatTemplate | None]:
    if settings.get("model_type") == COURSE_MODEL:
        return WordTokenizer.load(folder / "vocabulary.json"), None
    tokenizer = load_tokenizer_json(folder)
    return tokenizer, load_chat_template(folder, tokenizer)
