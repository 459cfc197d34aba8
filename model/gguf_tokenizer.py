"""The tokenizer that a GGUF file carries, put into the terms of a `tokenizer.json`.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer. The pre-tokenisers are those of the models'
published `tokenizer.json` files.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, cast

from drumline.model.bpe_tokenizer import BPETokenizer
from drumline.model.errors import ModelLoadError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(gpt2_words: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": gpt2_words}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _digits() -> dict[str, Any]:
    return {"type": "Digits", "individual_digits": True}


_GPT2_WORDS = _byte_level(gpt2_words=True)
_DIGITS_FIRST = _sequence(_digits(), _byte_level(gpt2_words=True))
_LLAMA3_WORDS = _sequence(_split(_LLAMA3), _byte_level(gpt2_words=False))
_QWEN2_WORDS = _sequence(_split(_QWEN2), _byte_level(gpt2_words=False))
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt"), _GPT2_WORDS),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_FIRST),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe"), _LLAMA3_WORDS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2_WORDS),
    "tekken": _sequence(_split(_TEKKEN), _byte_level(gpt2_words=False)),
    "deepseek-llm": _sequence(
        _split("[\r\n]"),
        _split(r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"),
        _split(r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"),
        _split(r"\s+$"),
        _split(_CJK),
        _digits(),
        _byte_level(gpt2_words=False),
    ),
    "deepseek-coder": _sequence(
        _split("[\r\n]"),
        _split(r"\s?\p{L}+"),
        _split(r"\s?\p{P}+"),
        _split(_CJK),
        _digits(),
        _byte_level(gpt2_words=False),
    ),
}
_WHOLE_WORDS_FIRST = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"})
"""Where a word that is in the vocabulary is one token whatever the merges say, and BOS is added unless denied."""
_COMPOSES = frozenset({"qwen2", "deepseek-r1-qwen", "megrez"})
"""Where the models' own tokenizers normalise to NFC first."""


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> BPETokenizer:
    """Build the tokenizer from a GGUF file's metadata: plain values by key, lists for arrays.

    Serves the models `gpt2` (byte-level BPE) and `llama` (SentencePiece-like). Raises `ModelLoadError`, which names
    the key and its value, for others, for an unknown `pre`, and for what is missing or does not fit.
    """
    model = metadata.get("tokenizer.ggml.model")
    pre = str(metadata.get("tokenizer.ggml.pre") or "default")
    tokens = cast(list[str], _required(metadata, "tokens", list))
    types = cast(list[int], metadata.get("tokenizer.ggml.token_type") or [_TokenType.NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ModelLoadError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    if model == "gpt2":
        spec = _byte_level_spec(metadata, tokens, pre)
        adds_bos = pre in _WHOLE_WORDS_FIRST
    elif model == "llama":
        spec = _sentencepiece_spec(metadata, tokens, types)
        adds_bos = True
    else:
        raise ModelLoadError(f"tokenizer.ggml.model {model!r} is not served, only gpt2 and llama")
    spec["added_tokens"] = _added_tokens(tokens, types)
    bos_id = _token_id(metadata, "bos")
    stated = metadata.get("tokenizer.ggml.add_bos_token")
    return BPETokenizer(
        spec,
        bos_id=bos_id,
        eos_ids=[i for i in (_token_id(metadata, name) for name in ("eos", "eot", "eom")) if i is not None],
        adds_bos=adds_bos and bos_id is not None if stated is None else bool(stated),
        vocab_size=len(tokens),
        source="tokenizer.ggml",
    )


def _required(metadata: Mapping[str, object], key: str, kind: type) -> object:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, kind):
        raise ModelLoadError(f"tokenizer.ggml.{key} is missing or not a {kind.__name__}")
    return value


def _token_id(metadata: Mapping[str, object], name: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    size = len(cast(list[str], metadata["tokenizer.ggml.tokens"]))
    if value is not None and (not isinstance(value, int) or not 0 <= value < size):
        raise ModelLoadError(f"tokenizer.ggml.{name}_token_id {value!r} is outside 0 … {size - 1}")
    return value


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    shown = {_TokenType.USER_DEFINED: False, _TokenType.CONTROL: True, _TokenType.UNKNOWN: True}
    return [
        {
            "id": index,
            "content": token,
            "special": shown[_TokenType(kind)],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in shown
    ]


def _byte_level_spec(metadata: Mapping[str, object], tokens: Sequence[str], pre: str) -> dict[str, Any]:
    if pre not in _PRE_TOKENIZERS:
        raise ModelLoadError(f"tokenizer.ggml.pre {pre!r} is not served; known: {', '.join(_PRE_TOKENIZERS)}")
    merges = cast(list[str], _required(metadata, "merges", list))
    return {
        "normalizer": {"type": "NFC"} if pre in _COMPOSES else None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "decoder": _byte_level(gpt2_words=True),
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [_two_pieces(merge) for merge in merges],
            "ignore_merges": pre in _WHOLE_WORDS_FIRST,
        },
    }


def _two_pieces(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)  # a piece may itself begin with a space
    if at < 0:
        raise ModelLoadError(f"tokenizer.ggml.merges: {merge!r} is not two pieces")
    return merge[:at], merge[at + 1 :]


def _sentencepiece_spec(metadata: Mapping[str, object], tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    scores = cast(list[float], _required(metadata, "scores", list))
    if len(scores) != len(tokens):
        raise ModelLoadError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    to_marks = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    to_spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    unknown = _token_id(metadata, "unknown")
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), to_marks],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *(strip if prefix else [])],
        },
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": _merges(tokens, types, scores),
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece's rule as merges: of two neighbours whose union is a piece, the union of highest score comes first.

    Each piece may be made of any two others; ties go to the smaller ids.
    """
    pieces = {
        token: (-score, index)
        for index, (token, kind, score) in enumerate(zip(tokens, types, scores, strict=True))
        if kind == _TokenType.NORMAL
    }
    found = [
        (rank, pieces[piece[:cut]][1], pieces[piece[cut:]][1], piece[:cut], piece[cut:])
        for piece, rank in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]
