"""Text to ids and back, behind one small protocol.

A token is bytes, not characters: an emoji may take four tokens. Full and incremental decoding therefore both work on
`token_bytes`, so that their texts are equal by construction.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """What the scheduler needs of a tokenizer."""

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    adds_bos: bool
    strips_leading_space: bool
    """The pieces carry the space before a word, and the first one of a text is dropped (SentencePiece, word level)."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special tokens spelled in it are ordinary characters, and no BOS is added."""

    def encode_template(self, text: str, restore: Mapping[int, str] | None = None) -> list[int]:
        """Ids of text of our own making (a chat template), where special tokens are special.

        `restore` translates (as `str.translate` does) what lies between them, once they have been found: it lets a
        template carry a user's text in which the beginnings of special tokens are spelled differently meanwhile.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this id stands for; empty for special and unknown ids."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """The spellings that `encode_template` reads as one token."""
