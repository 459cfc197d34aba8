"""From a request to what a row needs: token ids, stop rules, seed. Whatever cannot be served is refused here."""

import asyncio
import secrets
from dataclasses import dataclass
from weakref import WeakValueDictionary

from drumline.model.errors import InvalidRequest
from drumline.model.grammar import Grammar, Grammars
from drumline.model.language_model import LanguageModel
from drumline.scheduler.request import Request
from drumline.scheduler.stop import StopRules

LONG_TEXT = 20_000
"""Characters beyond which tokenising would hold the event loop up for tens of milliseconds, as a grammar does."""


@dataclass(frozen=True)
class Admitted:
    """A request that can be served as it is."""

    request: Request
    prompt_ids: tuple[int, ...]
    rules: StopRules
    seed: int
    grammar: Grammar | None = None


class Admission:
    """Checks requests against one model and one pool size."""

    def __init__(self, model: LanguageModel, rows: int) -> None:
        self._model, self._rows = model, rows
        self._grammars = Grammars(model.tokenizer, model.config.vocab_size)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def admit(self, request: Request) -> Admitted:
        """Tokenise and check; raises `InvalidRequest` that names the field and the limit."""
        if not isinstance(request, Request):
            raise InvalidRequest("request", f"must be a Request, not {type(request).__name__}")
        if request.n > self._rows:
            raise InvalidRequest("n", f"must not exceed the scheduler's rows ({self._rows})")
        request.sampling.check_vocabulary(self._model.config.vocab_size)
        self._check_ids("stop_ids", request.stop_ids)
        prompt_ids = self._prompt_ids(request)
        slides = self._slides(request)
        window = self._model.window
        if len(prompt_ids) > window and not slides:
            raise InvalidRequest(
                _given(request),
                f"has {len(prompt_ids)} tokens, the window holds {window}; overflow='slide' keeps the last of them",
            )
        if len(prompt_ids) > window and request.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs", f"needs a prompt within the window ({window} tokens)")
        rules = StopRules(
            eos_ids=frozenset(() if request.ignore_eos else self._model.tokenizer.eos_ids),
            stop_ids=frozenset(request.stop_ids),
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            room=None if slides else window - len(prompt_ids) + 1,
        )
        seed = request.sampling.seed
        grammar = None if request.structured is None else self._grammars.compile(request.structured)
        return Admitted(request, prompt_ids, rules, secrets.randbits(64) if seed is None else seed, grammar)

    async def admit_without_blocking(self, request: Request) -> Admitted:
        """`admit`, in a thread for what takes long; a tenant's grammars are compiled one after the other, so that they
        leave threads to those of others. Lets others run in any case."""
        if not isinstance(request, Request) or (request.structured is None and request.text_length <= LONG_TEXT):
            await asyncio.sleep(0)  # thousands may be submitted in a row
            return self.admit(request)
        async with self._turns.setdefault(request.tenant, asyncio.Lock()):
            return await asyncio.to_thread(self.admit, request)

    def _slides(self, request: Request) -> bool:
        return self._model.slides if request.overflow is None else request.overflow == "slide"

    def _prompt_ids(self, request: Request) -> tuple[int, ...]:
        """The request's ids; BOS where the tokenizer adds it to text, and alone for an empty prompt."""
        if request.prompt_ids is not None:
            self._check_ids("prompt_ids", request.prompt_ids)
            ids = list(request.prompt_ids)
        elif request.messages is not None:
            if self._model.chat_template is None:
                raise InvalidRequest("messages", f"the model {self._model.name} has no chat template")
            ids = self._model.chat_template.encode([message.model_dump() for message in request.messages])
        else:
            ids = self._model.encode_prompt(request.prompt or "")
        return tuple(self._model.started(ids, _given(request)))

    def _check_ids(self, field: str, ids: tuple[int, ...]) -> None:
        vocab_size = self._model.config.vocab_size
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(field, f"id {token_id} is outside 0 … {vocab_size - 1}")


def _given(request: Request) -> str:
    """Which of the three forms of a prompt the request has."""
    return next(name for name in ("prompt_ids", "messages", "prompt") if getattr(request, name) is not None)
