"""Structured output: which tokens may come next, by llguidance; one grammar a request, one state a row."""

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from drumline.model.errors import EngineFailed, InvalidRequest
from drumline.model.tokenizer import Tokenizer
from drumline.model.validated import Validated

MAX_GRAMMAR_LENGTH = 65_536
MAX_LARK_LENGTH = 8_192
"""The compiler follows rules by recursion: a few thousand of them overflow its stack, and the process dies."""
MOST_KEPT = 16
"""Compiled grammars that are kept for the next request with the same."""
_LIMITS: dict[str, Any] = {"initial_lexer_fuel": 250_000, "max_lexer_states": 20_000, "max_grammar_size": 50_000}
"""A quarter of llguidance's own and less: what needs more takes seconds and hundreds of megabytes."""


class JsonSchema(Validated):
    """The answer is a JSON document that the schema accepts."""

    json_schema: dict[str, Any]


class Regex(Validated):
    """The whole answer matches the expression (Rust's syntax: no look-around, no back-references)."""

    regex: str = Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)


class Lark(Validated):
    """The answer is derived from the rule `start` of a Lark grammar."""

    lark: str = Field(min_length=1, max_length=MAX_LARK_LENGTH)


Structured = JsonSchema | Regex | Lark


class GrammarState:
    """How far one row has come in its grammar. Not thread-safe: the step asks for masks, the event loop advances it,
    never at the same time."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def mask(self) -> NDArray[np.bool_]:
        """Which ids may come next, `[vocab]`. Raises `EngineFailed` where the grammar grew beyond its limits."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].view(np.bool_)

    def advance(self, token_id: int) -> bool:
        """Take the chosen token; True where the grammar allows nothing behind it. Raises `EngineFailed`."""
        self._matcher.consume_token(token_id)
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineFailed(f"the grammar failed: {_in_a_line(self._matcher.get_error())}")


class Grammar:
    """A compiled grammar of one request."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def start(self) -> GrammarState:
        """A row's own state, at the beginning."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size)


class Grammars:
    """Compiles grammars for one model's tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiled = lru_cache(MOST_KEPT)(self._compile)  # devices ask for the same few forms again and again

    def compile(self, structured: Structured) -> "Grammar":
        """Raises `InvalidRequest` for a grammar that is not valid, or that nothing matches.

        Takes milliseconds, the first time and for a large grammar up to a second: not for the event loop.
        """
        return self._compiled(_source(structured))

    def _compile(self, source: str) -> "Grammar":
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._tokens, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequest("structured", f"is not a grammar: {_in_a_line(matcher.get_error())}")
        if matcher.is_stopped():
            raise InvalidRequest("structured", "allows the empty answer alone")
        grammar = Grammar(matcher, self._vocab_size)
        try:
            possible = grammar.start().mask().any()
        except EngineFailed as error:
            raise InvalidRequest("structured", f"is impossible, or too complex ({error})") from None
        if not possible:
            raise InvalidRequest("structured", "matches nothing that this model can say")
        return grammar

    @cached_property
    def _tokens(self) -> llguidance.LLTokenizer:
        tokens: Any = _Tokens(self._tokenizer, self._vocab_size)  # what llguidance calls a TokenizerWrapper
        return llguidance.LLTokenizer(tokens, n_vocab=self._vocab_size)


class _Tokens:
    """The tokenizer as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        known = min(vocab_size, tokenizer.vocab_size)
        pieces = [tokenizer.token_bytes(token_id) for token_id in range(known)]
        self.tokens = [*pieces, *[b""] * (vocab_size - known)]
        self.special_token_ids = [token_id for token_id, piece in enumerate(self.tokens) if not piece]
        self.eos_token_id = next(iter((*tokenizer.eos_ids, *self.special_token_ids)), 0)
        self.bos_token_id = tokenizer.bos_id
        self.is_tokenizer_wrapper = True

    def __call__(self, text: bytes | str) -> Sequence[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def _source(structured: Structured) -> str:
    match structured:
        case JsonSchema():
            return _schema_source(structured.json_schema)
        case Regex():
            return str(llguidance.LLMatcher.grammar_from_regex(structured.regex))
        case Lark():
            return str(llguidance.LLMatcher.grammar_from_lark(structured.lark))


def _schema_source(schema: dict[str, Any]) -> str:
    field = "structured.json_schema"
    try:
        text = json.dumps(schema, allow_nan=False)
        if len(text) > MAX_GRAMMAR_LENGTH:
            raise InvalidRequest(field, f"must be at most {MAX_GRAMMAR_LENGTH} characters long")
        return str(llguidance.LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False}))
    except InvalidRequest:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, f"is no JSON: {_in_a_line(str(error))}") from None
    except RecursionError:
        raise InvalidRequest(field, "is nested too deeply") from None


def _in_a_line(text: str) -> str:
    return " ".join(text.split())[:300] or "no reason is given"
