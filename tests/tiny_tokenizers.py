"""Tiny tokenizers, trained here: byte-level BPE, and the two layouts in which SentencePiece-like BPE is published."""

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

CORPUS = [
    "the sun warms a small stone by the river and an old frog sleeps on it",
    "def f(x):\n    return x + 1  # one more\n",
    "What is the capital of France? The capital of France is Paris.",
    "Zürich naïve café 中文字 日本語 👋 1234567890",
] * 3
KINDS = ("byte_level", "prepend", "metaspace")


def byte_level(vocab_size: int = 400) -> dict[str, Any]:
    """As GPT-2 and SmolLM: 0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|>, and <think> at the end, shown in text."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    _train(tokenizer, vocab_size, specials, alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.add_tokens(["<think>"])
    return json.loads(tokenizer.to_str())


def prepend(vocab_size: int = 450) -> dict[str, Any]:
    """As Llama 2: 0 <unk>, 1 <s>, 2 </s>, the bytes, then pieces; a normaliser prepends the mark."""
    spec = _sentencepiece(vocab_size)
    spec["normalizer"] = json.loads(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]).__getstate__()
    )
    spec["pre_tokenizer"] = None
    return spec


def metaspace(vocab_size: int = 450) -> dict[str, Any]:
    """As Mistral: the pre-tokeniser prepends the mark, at the beginning of a text alone."""
    spec = _sentencepiece(vocab_size)
    spec["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return spec


@functools.cache
def spec_text(kind: str) -> str:
    """The tokenizer.json of one of `KINDS`."""
    return json.dumps({"byte_level": byte_level, "prepend": prepend, "metaspace": metaspace}[kind]())


def write_folder(folder: Path, spec: dict[str, Any], **settings: dict[str, Any]) -> Path:
    """A checkpoint folder without weights; `settings` are the other JSON files by name."""
    for name, content in {"tokenizer": spec, **settings}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def _sentencepiece(vocab_size: int) -> dict[str, Any]:
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    named = ["<unk>", "<s>", "</s>"]
    _train(tokenizer, vocab_size, [*named, *(f"<0x{byte:02X}>" for byte in range(256))], alphabet=[])
    spec = json.loads(tokenizer.to_str())
    # The trainer adds whatever it is told to keep; published files add only what is markup.
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in named]
    return spec


def _train(tokenizer: Tokenizer, vocab_size: int, specials: list[str], alphabet: list[str]) -> None:
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True) for text in specials],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
