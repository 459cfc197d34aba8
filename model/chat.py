"""Chat templates: messages to ids, with special tokens where the template puts them and nowhere else.

A template is a Jinja program that comes with the model, so it runs in a sandbox; what users wrote is only ever data to
it. In their text the first character of each special token is replaced by a private-use character while the template
runs, and put back after the rendered text has been split at its special tokens. A template that looks for a special
token inside a message therefore does not find one.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from drumline.model.errors import InvalidRequest, ModelLoadError
from drumline.model.tokenizer import Tokenizer

ROLES = frozenset({"system", "user", "assistant", "tool"})
_PRIVATE_USE = range(0xE000, 0xF900)
_MAX_TEMPLATE_CHARACTERS = 1 << 20
"""How much a template may add to the messages before it counts as runaway."""


class _Generation(Extension):
    """`{% generation %}` marks an assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares a set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's chat template together with the tokenizer that gives its markup meaning.

    Raises `ModelLoadError` for a template that does not parse.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self.names = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokenizer = tokenizer
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelLoadError(f"chat template: {error}") from error

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation and of the beginning of the assistant's answer.

        `messages` hold `role` (one of `ROLES`) and `content`. BOS comes first where the template writes it or the
        tokenizer adds it, once. Raises `InvalidRequest` on the field `messages` for what the template refuses.
        """
        for index, message in enumerate(messages):
            if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
                raise InvalidRequest(f"messages.{index}", f"needs a content and a role of {', '.join(sorted(ROLES))}")
        hide, restore = self._disguise("".join(message["content"] for message in messages))
        hidden = [dict(message) | {"content": message["content"].translate(hide)} for message in messages]
        size = sum(len(message["content"]) for message in messages)
        rendered = self._render(hidden, limit=size * 2 + _MAX_TEMPLATE_CHARACTERS)
        ids = self._tokenizer.encode_template(rendered, restore)
        bos_id = self._tokenizer.bos_id
        if self._tokenizer.adds_bos and bos_id is not None and ids[:1] != [bos_id]:
            return [bos_id, *ids]
        return ids

    def _disguise(self, contents: str) -> tuple[dict[int, str], dict[int, str]]:
        """Two translations: special tokens' first characters to private-use ones that occur nowhere, and back."""
        try:
            contents.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("messages", "must be Unicode text without lone surrogates") from None
        specials = self._tokenizer.special_tokens
        firsts = sorted({token[0] for token in specials})
        taken = set(contents).union(self.source, *specials)
        free = (code for code in _PRIVATE_USE if chr(code) not in taken)
        try:
            hidden = {ord(first): chr(next(free)) for first in firsts}
        except (StopIteration, RuntimeError):
            raise InvalidRequest(
                "messages", "must leave some private-use characters (U+E000 … U+F8FF) unused"
            ) from None
        return hidden, {ord(stand_in): chr(first) for first, stand_in in hidden.items()}

    def _render(self, messages: Sequence[Mapping[str, str]], limit: int) -> str:
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._pieces(messages):
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    raise InvalidRequest("messages", f"the chat template wrote more than {limit} characters")
        except InvalidRequest:
            raise
        except Exception as error:  # the template is a program of the model's, so anything may come out of it
            reason = str(error) or type(error).__name__
            raise InvalidRequest("messages", f"the chat template refused them: {reason}") from error
        return "".join(pieces)

    def _pieces(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        return self._template.generate(messages=messages, add_generation_prompt=True, **self.names)


def load_chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a checkpoint's folder: `chat_template.jinja`, else tokenizer_config.json's, else None.

    Raises `ModelLoadError` for files that cannot be read and templates that do not parse.
    """
    settings: dict[str, Any] = {}
    settings_path = folder / "tokenizer_config.json"
    template_path = folder / "chat_template.jinja"
    try:
        if settings_path.exists():
            settings = json.loads(settings_path.read_text(encoding="utf-8"))
        source = template_path.read_text(encoding="utf-8") if template_path.exists() else settings.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if source is None:
            return None
        return ChatTemplate(source, tokenizer, _spelling(settings, "bos_token"), _spelling(settings, "eos_token"))
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{folder}: the chat template cannot be read: {error!r}") from error


def _spelling(settings: Mapping[str, Any], key: str) -> str:
    token = settings.get(key)
    return "" if token is None else str(token["content"] if isinstance(token, dict) else token)


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates written for Hugging Face's `apply_chat_template` expect to find."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Plain JSON, where Jinja's own filter would escape for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
