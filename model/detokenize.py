"""Ids back to text, whole or as they come.

A text that begins with SentencePiece's or a word vocabulary's leading space loses it, also when it continues a prompt:
both ways of decoding begin at the first generated token, so they agree.
"""

import codecs
from collections.abc import Iterable

from drumline.model.tokenizer import Tokenizer


class Detokenizer:
    """Text of one sequence of ids, piece by piece: never half a character, and the pieces joined are the whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """The characters that this id completes; an incomplete one is held back."""
        data = self._tokenizer.token_bytes(token_id)
        if data and self._drops_space:
            self._drops_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for bytes that never became a character."""
        return self._decoder.decode(b"", final=True)


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The text of ids; special tokens are left out, and invalid UTF-8 becomes U+FFFD."""
    detokenizer = Detokenizer(tokenizer)
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])
