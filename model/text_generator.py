"""Prompt in, text streamed to the terminal, stop reason out: one request at a time, on the cached generator."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from drumline.model.detokenize import Detokenizer
from drumline.model.language_model import LanguageModel
from drumline.model.reference import Options, ReferenceResult, stream_cached
from drumline.model.stop_reason import StopReason

_print = partial(print, end="", flush=True)


@dataclass(frozen=True)
class TextResult:
    """The generated text, without the prompt and special tokens, and what the run did."""

    text: str
    run: ReferenceResult

    @property
    def stop_reason(self) -> StopReason:
        """Why the text ended."""
        return self.run.stop_reason


class TextGenerator:
    """Generates text from one model. The options of its methods are those of `generate_cached`."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def stream(self, prompt: str, **options: Unpack[Options]) -> Generator[str, None, TextResult]:
        """Yield the text piece by piece, never half a character; the generator returns the `TextResult`."""
        return self._pieces(stream_cached(self.model, self.model.encode_prompt(prompt), **options))

    def generate(
        self, prompt: str, on_text: Callable[[str], object] = _print, **options: Unpack[Options]
    ) -> TextResult:
        """Hand each piece to `on_text` (by default it is printed) and return the whole."""
        pieces = self.stream(prompt, **options)
        while True:
            try:
                on_text(next(pieces))
            except StopIteration as end:
                result: TextResult = end.value
                return result

    def _pieces(self, ids: Generator[int, None, ReferenceResult]) -> Generator[str, None, TextResult]:
        detokenizer, pieces = Detokenizer(self.model.tokenizer), list[str]()
        run = None
        while run is None:
            try:
                piece = detokenizer.push(next(ids))
            except StopIteration as end:
                run, piece = end.value, detokenizer.flush()
            if piece:
                pieces.append(piece)
                yield piece
        return TextResult("".join(pieces), run)
