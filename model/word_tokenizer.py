"""The course model's vocabulary: whole words and punctuation marks, learned from a text, saved with the checkpoint."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from drumline.model.errors import InvalidRequest, ModelLoadError

BOS, EOS, UNK, PAD = range(4)
SPECIAL_TOKENS = ("<bos>", "<eos>", "<unk>", "<pad>")
_WORD = re.compile(r"\w+|[^\w\s]")
_MARKUP = re.compile("(" + "|".join(SPECIAL_TOKENS) + ")")


class WordTokenizer:
    """The `Tokenizer` protocol with one id a word; a word outside the vocabulary becomes UNK, BOS always comes first.

    `words` get the ids after the special tokens. Decoding joins them by single spaces, so `encode(decode(ids))` is
    `ids` for ids of words. Raises `ModelLoadError` where an entry is not one word, or occurs twice.
    """

    bos_id: int | None = BOS
    eos_ids: tuple[int, ...] = (EOS,)
    adds_bos: bool = True
    strips_leading_space: bool = True

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)
        for word in self.words:
            if not isinstance(word, str) or not _WORD.fullmatch(word) or not _is_unicode(word):
                raise ModelLoadError(f"vocabulary: {word!r} is not one word or punctuation mark")
        self._ids = {word: len(SPECIAL_TOKENS) + index for index, word in enumerate(self.words)}
        if len(self._ids) != len(self.words):
            repeated = Counter(self.words).most_common(1)[0][0]
            raise ModelLoadError(f"vocabulary: {repeated!r} occurs more than once")
        self.vocab_size = len(SPECIAL_TOKENS) + len(self.words)

    @classmethod
    def from_text(cls, text: str, max_words: int | None = None) -> Self:
        """The vocabulary of a text, most frequent words first (equals in alphabetical order), at most `max_words`.

        Raises `InvalidRequest` for a negative `max_words` and for text with lone surrogates.
        """
        if max_words is not None and max_words < 0:
            raise InvalidRequest("max_words", f"must be at least 0, got {max_words}")
        if not _is_unicode(text):
            raise InvalidRequest("text", "must be Unicode text without lone surrogates")
        counts = Counter(_WORD.findall(text))
        return cls(sorted(counts, key=lambda word: (-counts[word], word))[:max_words])

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read what `save` wrote; raises `ModelLoadError`, which names the file, for anything else."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["kind"] != "word" or not isinstance(content["words"], list):
                raise ModelLoadError("kind must be 'word', and words a list")
            return cls(content["words"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelLoadError(f"{path}: not a word vocabulary: {error!r}") from error
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error}") from error

    def save(self, path: Path | str) -> None:
        """Write the vocabulary as JSON."""
        content = {"kind": "word", "words": self.words}
        Path(path).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    @property
    def special_tokens(self) -> Sequence[str]:
        """The spellings that `encode_template` reads as one token."""
        return SPECIAL_TOKENS

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special tokens spelled in it are ordinary characters, and no BOS is added."""
        return [self._ids.get(word, UNK) for word in _WORD.findall(text)]

    def encode_template(self, text: str, restore: Mapping[int, str] | None = None) -> list[int]:
        """Ids of text of our own making, where special tokens are special; `restore` as in the protocol."""
        ids: list[int] = []
        for piece in _MARKUP.split(text):
            if piece in SPECIAL_TOKENS:
                ids.append(SPECIAL_TOKENS.index(piece))
            else:
                ids += self.encode(piece if restore is None else piece.translate(restore))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """A word with a space before it; empty for special tokens and for ids without a word."""
        if not len(SPECIAL_TOKENS) <= token_id < self.vocab_size:
            return b""
        return b" " + self.words[token_id - len(SPECIAL_TOKENS)].encode()


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
