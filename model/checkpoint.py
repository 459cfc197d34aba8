"""What a loader hands to a family: settings, a way to take tensors, and what comes with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.model.chat import ChatTemplate
from drumline.model.config import ModelConfig
from drumline.model.errors import ModelLoadError
from drumline.model.tokenizer import Tokenizer
from drumline.model.weights import Take, Weights


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint, whatever its file format.

    `settings` has the form of a Hugging Face `config.json`. `unread` holds the stored names of the tensors that `take`
    has not been asked for yet, so that what a family does not know is noticed. `files` are what a fingerprint covers.
    `open_tokenizer` reads the tokenizer and the chat template, once it is known that the model itself can be served.
    """

    settings: Mapping[str, Any]
    take: Take
    unread: set[str]
    files: tuple[Path, ...]
    open_tokenizer: Callable[[], tuple[Tokenizer, ChatTemplate | None]]


@dataclass(frozen=True)
class ModelContents:
    """What a model's files hold, once it is read and checked; `fingerprint` is a hash of its settings and weights."""

    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    fingerprint: str


def check_shape(name: str, stored: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise `ModelLoadError` where a tensor's shape is not the one that the settings ask for."""
    if stored != expected:
        raise ModelLoadError(f"tensor {name} has shape {list(stored)}, the settings ask for {list(expected)}")
