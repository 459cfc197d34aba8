"""BPE tokenizers on top of the `tokenizers` library, built from the contents of a `tokenizer.json`.

Two kinds: byte-level (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece-like with byte fallback (Llama 2, Mistral).
"""

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from drumline.model.errors import InvalidRequest, ModelLoadError

_NEVER = "(?!)"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class _AddedToken:
    """A token found in a template's text before BPE runs; a control token is never shown."""

    text: str
    id: int
    control: bool
    strips_left: bool
    strips_right: bool


class BPETokenizer:
    """The `Tokenizer` protocol over a `tokenizer.json`.

    `spec` is the parsed file. `adds_bos` None asks the spec's own post-processor. `vocab_size` may exceed the ids that
    have a token (padded embeddings). Raises `ModelLoadError`, which names `source`, for kinds that are not served.
    `arguments` are what it was built from, plain values from which another can be built.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        adds_bos: bool | None = None,
        vocab_size: int = 0,
        source: str = "tokenizer.json",
    ) -> None:
        self.arguments = {
            "spec": spec,
            "bos_id": bos_id,
            "eos_ids": tuple(eos_ids),
            "adds_bos": adds_bos,
            "vocab_size": vocab_size,
            "source": source,
        }
        model = _bpe_model(spec, source)
        added = [
            _AddedToken(
                text=token["content"],
                id=token["id"],
                control=token["special"],
                strips_left=token["lstrip"],
                strips_right=token["rstrip"],
            )
            for token in spec.get("added_tokens") or ()
        ]
        # Runs of white space that were added for economy are vocabulary, not markup: they stay in ordinary text.
        markup = [token for token in added if token.control or not token.text.isspace()]
        self._markup = {token.text: token for token in markup}
        self._find_markup = re.compile("|".join(map(re.escape, sorted(self._markup, key=len, reverse=True))) or _NEVER)
        self._tokens = {index: token for token, index in model["vocab"].items()} | {t.id: t.text for t in added}
        self._control_ids = frozenset(token.id for token in markup if token.control)
        self._literal_ids = frozenset(token.id for token in added if not token.control)
        self._decode, self.strips_leading_space = _decoder(spec.get("decoder"), source)
        self._first, self._later = _plain_text_tokenizers(spec, markup, source)

        self.vocab_size = max(vocab_size, 1 + max(self._tokens, default=-1))
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        for token_id in (*self.eos_ids, *([] if bos_id is None else [bos_id])):
            if not 0 <= token_id < self.vocab_size:
                raise ModelLoadError(f"{source}: special token id {token_id} is outside 0 … {self.vocab_size - 1}")
        if adds_bos is None:
            adds_bos = bos_id is not None and self._first.encode("", add_special_tokens=True).ids[:1] == [bos_id]
        if adds_bos and bos_id is None:
            raise ModelLoadError(f"{source}: add_bos_token is set, but there is no BOS token")
        self.adds_bos = adds_bos

    @property
    def special_tokens(self) -> Sequence[str]:
        """The spellings that `encode_template` reads as one token."""
        return tuple(self._markup)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special tokens spelled in it are ordinary characters, and no BOS is added."""
        return self._encode_piece(self._first, text)

    def encode_template(self, text: str, restore: Mapping[int, str] | None = None) -> list[int]:
        """Ids of text of our own making, where special tokens are special.

        `restore` translates (as `str.translate` does) what lies between them, once they have been found.
        """
        ids: list[int] = []
        position = 0
        for match in self._find_markup.finditer(text):
            token = self._markup[match[0]]
            piece = text[position : match.start()]
            ids += self._template_piece(piece.rstrip() if token.strips_left else piece, position == 0, restore)
            ids.append(token.id)
            position = match.end()
            if token.strips_right:
                position += len(text[position:]) - len(text[position:].lstrip())
        return ids + self._template_piece(text[position:], position == 0, restore)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this id stands for; empty for control tokens and for ids without a token (padded embeddings)."""
        if token_id in self._control_ids or token_id not in self._tokens:
            return b""
        return self._decode(self._tokens[token_id], token_id in self._literal_ids)

    def _template_piece(self, piece: str, first: bool, restore: Mapping[int, str] | None) -> list[int]:
        text = piece if restore is None else piece.translate(restore)
        return self._encode_piece(self._first if first else self._later, text)

    @staticmethod
    def _encode_piece(tokenizer: FastTokenizer, text: str) -> list[int]:
        try:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:  # the library's word for a lone surrogate
            raise InvalidRequest("prompt", "must be Unicode text without lone surrogates") from None
        return ids


def load_tokenizer_json(folder: Path) -> BPETokenizer:
    """Read `tokenizer.json` and the settings beside it that name BOS and EOS.

    The EOS ids are generation_config.json's list, then those of config.json and tokenizer_config.json. Raises
    `ModelLoadError`, which names the file, for what is missing, damaged or not served.
    """
    spec = _read_json(folder / "tokenizer.json", required=True)
    names = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    model = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    source = str(folder / "tokenizer.json")
    try:
        ids = _bpe_model(spec, source)["vocab"] | {
            token["content"]: token["id"] for token in spec.get("added_tokens") or ()
        }
        bos_ids = _named_ids(names, "bos_token", ids, source)
        if "bos_token" not in names:
            bos_ids = [*_listed_ids(generation, "bos_token_id"), *_listed_ids(model, "bos_token_id")]
        return BPETokenizer(
            spec,
            bos_id=bos_ids[0] if bos_ids else None,
            eos_ids=[
                *_listed_ids(generation, "eos_token_id"),
                *_listed_ids(model, "eos_token_id"),
                *_named_ids(names, "eos_token", ids, source),
            ],
            adds_bos=names.get("add_bos_token"),
            vocab_size=model.get("vocab_size") or 0,
            source=source,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{source}: not a tokenizer description: {error!r}") from error


def _read_json(path: Path, required: bool = False) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: must be a JSON object")
    return content


def _bpe_model(spec: Mapping[str, Any], source: str) -> dict[str, Any]:
    model: dict[str, Any] = spec.get("model") or {}
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise ModelLoadError(f"{source}: a {model.get('type')} model is not served, only BPE")
    return model


def _named_ids(names: Mapping[str, Any], key: str, ids: Mapping[str, int], source: str) -> list[int]:
    """The id of a token that the settings give by its spelling, plain or as a description."""
    name = names.get(key)
    if name is None:
        return []
    text = name["content"] if isinstance(name, dict) else name
    if text not in ids:
        raise ModelLoadError(f"{source}: {key} {text!r} is not in the vocabulary")
    return [ids[text]]


def _listed_ids(settings: Mapping[str, Any], key: str) -> list[int]:
    value = settings.get(key)
    return [] if value is None else [int(item) for item in (value if isinstance(value, list) else [value])]


def _plain_text_tokenizers(
    spec: Mapping[str, Any], markup: Sequence[_AddedToken], source: str
) -> tuple[FastTokenizer, FastTokenizer]:
    """Two tokenizers that know no markup: for the beginning of a text, and for what follows a special token.

    They differ where a space is prepended to the first piece only (Metaspace with the scheme `first`).
    """
    known = {token.text for token in markup}
    kept = [token for token in spec.get("added_tokens") or () if token["content"] not in known]
    model = _without_markup(spec["model"], markup)
    # The library numbers added tokens anew unless the vocabulary has them.
    model["vocab"] |= {token["content"]: token["id"] for token in kept}
    plain = dict(spec) | {"truncation": None, "padding": None, "added_tokens": kept, "model": model}
    first = _build(plain, source)
    later_pre_tokenizer = copy.deepcopy(spec.get("pre_tokenizer"))
    for step in _flattened(later_pre_tokenizer, "pretokenizers"):
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    if later_pre_tokenizer == spec.get("pre_tokenizer"):
        return first, first
    return first, _build(plain | {"pre_tokenizer": later_pre_tokenizer}, source)


def _without_markup(model: Mapping[str, Any], markup: Sequence[_AddedToken]) -> dict[str, Any]:
    """The BPE model without the vocabulary's own copies of special tokens, so that no text can be merged into one.

    Ordinary words that were only added a second time (not control tokens, reached by merges) stay.
    """
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    merged = {left + right for left, right in merges}
    removed = {t.text for t in markup if t.control or (len(t.text) > 1 and t.text not in merged)}
    removed.discard(model.get("unk_token") or "")
    return dict(model) | {
        "dropout": None,
        "vocab": {token: index for token, index in model["vocab"].items() if token not in removed},
        "merges": [
            (left, right)
            for left, right in merges
            if left + right not in removed and left not in removed and right not in removed
        ],
    }


def _build(spec: Mapping[str, Any], source: str) -> FastTokenizer:
    try:
        return FastTokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises nothing more precise
        raise ModelLoadError(f"{source}: {error}") from error


def _flattened(component: dict[str, Any] | None, parts: str) -> Iterable[dict[str, Any]]:
    """The steps of a (possibly nested) sequence; `parts` is the key under which a sequence keeps them."""
    if component is None:
        return
    if component["type"] == "Sequence":
        for part in component[parts]:
            yield from _flattened(part, parts)
    else:
        yield component


def _decoder(component: dict[str, Any] | None, source: str) -> tuple[Callable[[str, bool], bytes], bool]:
    """How a token becomes bytes, and whether the first space of a text is dropped."""
    steps = list(_flattened(component, "decoders"))
    kinds = {step["type"] for step in steps}
    unknown = kinds - {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if not kinds or unknown:
        raise ModelLoadError(f"{source}: the decoder {', '.join(sorted(unknown)) or 'none'} is not served")
    if "ByteLevel" in kinds:
        return _byte_level_bytes, False
    replacements: list[tuple[str, str]] = []
    strips = False
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                raise ModelLoadError(f"{source}: a decoder that replaces by regular expression is not served")
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
            strips |= step.get("prepend_scheme", "always") != "never"
        elif step["type"] == "Strip":
            if (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
                raise ModelLoadError(f"{source}: a decoder that strips anything but one leading space is not served")
            strips = True
    byte_fallback = "ByteFallback" in kinds

    def piece_bytes(token: str, literal: bool) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if byte_fallback and not literal else None
        if byte:
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return piece_bytes, strips


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: a printable byte is itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def _byte_level_bytes(token: str, literal: bool) -> bytes:
    try:
        return token.encode() if literal else bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # not written in the alphabet, so it stands for itself
        return token.encode()
