"""Int8 models made once: what quantising gave, with tokenizer, chat template and settings, in the user's cache folder.

One file a model, in safetensors' form, mapped when it is read. Its name is a hash of everything that it was made of:
the content of the model's files, the version of drumline, the formats below. A file is written under another name and
put in place whole, so that processes may make the same one at once; it carries a hash of its content, and one that
does not match is made again. Where the folder cannot be written, a model is simply quantised at each start.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drumline.model import quantise
from drumline.model.bpe_tokenizer import BPETokenizer
from drumline.model.chat import ChatTemplate
from drumline.model.checkpoint import ModelContents
from drumline.model.config import ModelConfig, RopeConfig
from drumline.model.errors import ModelLoadError
from drumline.model.tokenizer import Tokenizer
from drumline.model.user_cache import cache_folder
from drumline.model.weights import LayerWeights, QuantisedWeight, Weights
from drumline.model.word_tokenizer import WordTokenizer

_LAYOUT = 1  # counts the versions of what this module writes
_ABOUT, _DIGEST, _SUFFIX, _UNFINISHED = "about", "sha256", ".safetensors", ".part"
_MOST_ENTRIES = 4
_ABANDONED_S = 24 * 3600.0
_LOG = logging.getLogger("drumline")


def load_or_pack(files: Mapping[str, Path], make: Callable[[], ModelContents]) -> ModelContents:
    """What `make` gives, or gave an earlier run that found the same content in the model's `files`, by their roles.

    `make` reads those files, quantises, and may raise; what goes wrong with the cache itself is only logged. Raises
    `ModelLoadError` for files that cannot be read.
    """
    try:
        before, key = _states(files), _key(files)
    except OSError as error:
        raise ModelLoadError(f"cannot be read: {error}") from error
    try:
        entry = cache_folder() / "packed" / f"{key}{_SUFFIX}"
    except OSError as error:
        _LOG.warning("the packed model cannot be kept, every start will quantise it anew: %s", error)
        return make()
    contents = _read(entry)
    if contents is None:
        contents = make()
        if _states(files) == before:  # else nobody knows which of the two contents was read
            _write(entry, contents)
    return contents


def _states(files: Mapping[str, Path]) -> list[tuple[int, int, int]]:
    stats = [file.stat() for file in files.values()]
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]


def _key(files: Mapping[str, Path]) -> str:
    digests = {}
    for role, file in files.items():
        with file.open("rb") as stream:
            digests[role] = hashlib.file_digest(stream, "sha256").hexdigest()
    made_by = [_LAYOUT, quantise.FORMAT, version("drumline")]
    return hashlib.sha256(json.dumps([made_by, sorted(digests.items())]).encode()).hexdigest()


def _read(entry: Path) -> ModelContents | None:
    """The entry's content; None where there is none, or where it is not what was written."""
    try:
        if not entry.exists():
            return None
        with safe_open(entry, framework="pt") as stored:
            expected = (stored.metadata() or {}).get(_DIGEST)
            tensors: dict[str, Tensor] = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        if _digest(tensors) != expected:
            raise ValueError("its content does not match its hash")
        contents = _contents(tensors)
        os.utime(entry)  # the least recently used go first
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, ModelLoadError) as error:
        _LOG.warning("packed model %s is damaged and made again: %s", entry, error)
        return None
    return contents


def _write(entry: Path, contents: ModelContents) -> None:
    tensors = _tensors(contents)
    unfinished = entry.with_name(f"{uuid4().hex}{_UNFINISHED}")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, unfinished, {_DIGEST: _digest(tensors)})
            unfinished.replace(entry)
        finally:
            unfinished.unlink(missing_ok=True)
        _prune(entry.parent)
    except (OSError, SafetensorError) as error:
        _LOG.warning("the packed model cannot be kept, every start will quantise it anew: %s", error)


def _prune(folder: Path) -> None:
    """Keep the most recently used entries, and nothing that a process left unfinished long ago."""
    used = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda file: file.stat().st_mtime, reverse=True)
    abandoned = [file for file in folder.glob(f"*{_UNFINISHED}") if time.time() - file.stat().st_mtime > _ABANDONED_S]
    for file in (*used[_MOST_ENTRIES:], *abandoned):
        file.unlink(missing_ok=True)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """One hash over names, types, shapes and bytes; tensors are hashed side by side."""

    def one(name: str) -> list[Any]:
        tensor = tensors[name]
        data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        return [name, str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        parts = list(threads.map(one, sorted(tensors)))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _tensors(contents: ModelContents) -> dict[str, Tensor]:
    """All of it as tensors by name; what is not a tensor, as the bytes of a JSON text."""
    tensors: dict[str, Tensor] = {}
    rotations: dict[str, int] = {}
    owners = {"": contents.weights} | {f"layers.{i}.": layer for i, layer in enumerate(contents.weights.layers)}
    for prefix, owner in owners.items():
        for item in fields(owner):
            value = getattr(owner, item.name)
            if isinstance(value, Tensor):
                tensors[prefix + item.name] = value.contiguous()
            elif isinstance(value, QuantisedWeight):
                rotations[prefix + item.name] = value.rotation
                parts = {"codes": value.codes, "scales": value.scales, "multiplier": value.multiplier}
                tensors |= {f"{prefix}{item.name}.{n}": t.contiguous() for n, t in parts.items() if t is not None}
    about = {
        "config": asdict(contents.config),
        "rotations": rotations,
        "fingerprint": contents.fingerprint,
        "tokenizer": _tokenizer_source(contents.tokenizer),
        "chat_template": _template_source(contents.chat_template),
    }
    return tensors | {_ABOUT: torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)}


def _contents(tensors: dict[str, Tensor]) -> ModelContents:
    about = json.loads(tensors.pop(_ABOUT).numpy().tobytes())
    config = _config(about["config"])
    tokenizer = _tokenizer(about["tokenizer"])
    template = about["chat_template"]
    rotations: dict[str, int] = about["rotations"]
    layers = tuple(
        LayerWeights(**_slots(LayerWeights, tensors, rotations, f"layers.{index}.")) for index in range(config.layers)
    )
    return ModelContents(
        config=config,
        weights=Weights(layers=layers, **_slots(Weights, tensors, rotations, "")),
        tokenizer=tokenizer,
        chat_template=None if template is None else ChatTemplate(tokenizer=tokenizer, **template),
        fingerprint=about["fingerprint"],
    )


def _slots(
    owner: type[Weights | LayerWeights], tensors: Mapping[str, Tensor], rotations: Mapping[str, int], prefix: str
) -> dict[str, Any]:
    slots: dict[str, Any] = {}
    for item in fields(owner):
        name = prefix + item.name
        if name in tensors:
            slots[item.name] = tensors[name]
        elif name in rotations:
            multiplier = tensors.get(f"{name}.multiplier")
            slots[item.name] = QuantisedWeight(
                tensors[f"{name}.codes"], tensors[f"{name}.scales"], rotations[name], multiplier
            )
    return slots


def _config(values: dict[str, Any]) -> ModelConfig:
    rope = values["rope"]
    if rope is not None:
        factors = rope["frequency_factors"]
        rope = RopeConfig(**rope | {"frequency_factors": None if factors is None else tuple(factors)})
    return ModelConfig(**values | {"rope": rope})


def _tokenizer_source(tokenizer: Tokenizer) -> dict[str, Any]:
    if isinstance(tokenizer, WordTokenizer):
        return {"words": tokenizer.words}
    if isinstance(tokenizer, BPETokenizer):
        return {"bpe": tokenizer.arguments}
    raise TypeError(f"no checkpoint brings a {type(tokenizer).__name__}")


def _tokenizer(source: Mapping[str, Any]) -> Tokenizer:
    return WordTokenizer(source["words"]) if "words" in source else BPETokenizer(**source["bpe"])


def _template_source(template: ChatTemplate | None) -> dict[str, str] | None:
    return None if template is None else {"source": template.source, **template.names}
