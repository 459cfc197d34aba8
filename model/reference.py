"""The oracle: one request, a plain loop over the description, no padding, no batch; with and without a K/V cache.

Everything that is fast is judged against `uncached_logits`. The two generators share their choosing and their stop
rules, and differ only in what they feed: `generate_uncached` the whole window each step, `generate_cached` the whole
prompt first and then only the newest token. An exact model is judged twice: bit by bit by its own kernels on one
request (`exact_reference.py`), and in float64 by `emulated_logits`, which shares no code with them.
"""

import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Required, TypedDict, Unpack

import torch
from torch import Tensor

from drumline.model.batch import StepRecord
from drumline.model.errors import InvalidRequest
from drumline.model.language_model import LanguageModel
from drumline.model.layers import linear
from drumline.model.plain_forward import Cache, hidden_states
from drumline.model.random_state import RandomState
from drumline.model.sampling import choose
from drumline.model.sampling_params import SamplingParams
from drumline.model.stop_reason import StopReason

Overflow = Literal["stop", "slide"]
Feed = Callable[[Sequence[int]], tuple[Tensor, StepRecord]]
"""All ids so far -> the newest position's logits `[vocab]`, and what it took."""


@dataclass(frozen=True)
class ReferenceResult:
    """What one run of a generator did.

    `evaluated_positions` went through the model, an uncached loop needs `uncached_positions`. `window_filled_step` is
    the index of the generated token at which the window was first full, or None. `prefill_s` covers the first pass
    and every recompute of the window, `decode_s` the others.
    """

    token_ids: tuple[int, ...]
    stop_reason: StopReason
    steps: tuple[StepRecord, ...]
    prompt_tokens: int
    window_recomputes: int
    window_filled_step: int | None
    evaluated_positions: int
    uncached_positions: int
    prefill_s: float
    decode_s: float
    seed: int


@torch.inference_mode()
def forward(model: LanguageModel, ids: Sequence[int], cache: Cache | None = None, last: int | None = None) -> Tensor:
    """Logits `[time, vocab]`, float32, of ids that stand behind what `cache` holds, which grows by them.

    `last` keeps only the last so many positions. Raises `ValueError` for no ids, and past the model's window.
    """
    if model.exact:
        return _exact_forward(model, ids, cache, last)
    hidden = hidden_states(model.config, model.weights, ids, model.kv_dtype, cache)
    return linear(hidden if last is None else hidden[-last:], model.weights.head).float()


def _exact_forward(model: LanguageModel, ids: Sequence[int], cache: Cache | None, last: int | None) -> Tensor:
    from drumline.model.exact_reference import exact_logits, exact_row  # which imports `Cache` from the plain pass

    cache = Cache() if cache is None else cache
    if cache.exact is None:
        cache.exact = exact_row(model)
    return exact_logits(model, ids, cache.exact, last)


def uncached_logits(model: LanguageModel, ids: Sequence[int], last: int | None = None) -> Tensor:
    """The judge's logits `[time, vocab]`, float32: every position of `ids` computed at once, from position zero."""
    return forward(model, ids, None, last)


@torch.inference_mode()
def emulated_logits(model: LanguageModel, ids: Sequence[int], last: int | None = None) -> Tensor:
    """`uncached_logits` in float64, `[time, vocab]`: what the same weights say when nothing but what the model's
    precision asks for is rounded (the codes of int8 activations, and keys and values to the cache's dtype)."""
    weights = model.weights.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    hidden = hidden_states(model.config, weights, ids, model.kv_dtype)
    return linear(hidden if last is None else hidden[-last:], weights.head)


def uncached_steps(model: LanguageModel, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Iterator[Tensor]:
    """Teacher-forced: the judge's logits `[vocab]` from which each of `token_ids` was to be chosen.

    One pass covers every step before the window slides (attention is causal); after that each step is its own pass
    over the last `model.window` ids, from position zero.
    """
    ids, prompt, window = [*prompt_ids, *token_ids], len(prompt_ids), model.window
    together = max(0, min(len(token_ids), window - prompt + 1))
    if together:
        yield from uncached_logits(model, ids[: prompt + together - 1], last=together)
    for end in range(prompt + together, prompt + len(token_ids)):
        yield uncached_logits(model, ids[end - window : end], last=1)[0]


def compare(model: LanguageModel, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
    """The largest logit difference, cached against uncached, over the steps that chose `token_ids`."""
    ids, cached, largest = list(prompt_ids), _cached_feed(model), 0.0
    for token_id, expected in zip(token_ids, uncached_steps(model, prompt_ids, token_ids), strict=True):
        largest = max(largest, float((cached(ids)[0] - expected).abs().max()))
        ids.append(token_id)
    return largest


def uncached_positions(prompt_tokens: int, generated_tokens: int, window: int) -> int:
    """Token positions an uncached loop evaluates: the sum of min(prompt + i, window) over the generated tokens i."""
    growing = min(generated_tokens, max(0, window - prompt_tokens))
    return growing * prompt_tokens + growing * (growing - 1) // 2 + (generated_tokens - growing) * window


class Options(TypedDict, total=False):
    """Keyword arguments of the generators; the meaning of each is that of the field of `Request` with its name."""

    max_tokens: Required[int]
    sampling: SamplingParams
    ignore_eos: bool
    overflow: Overflow | None
    stop_ids: Sequence[int]
    min_tokens: int


def generate_uncached(model: LanguageModel, prompt_ids: Sequence[int], **options: Unpack[Options]) -> ReferenceResult:
    """Generate by computing the whole window afresh for every token; all else is `generate_cached`'s."""
    rules = _Rules(**options)
    return drain(_generate(model, _checked_prompt(model, prompt_ids, rules), rules, _uncached_feed(model)))


def generate_cached(model: LanguageModel, prompt_ids: Sequence[int], **options: Unpack[Options]) -> ReferenceResult:
    """Generate with a K/V cache: the first call covers the whole prompt, then the newest token alone is fed.

    A prompt of P ≤ C tokens (C: `model.window`) may generate C − P + 1; then the row ends with `window`, or slides:
    each further step clears the cache and recomputes the last C ids from position zero; a longer prompt keeps its last
    C ids, though the penalties see all of it. `overflow` None is the model's own habit. An empty prompt is BOS where
    the tokenizer has one. A row that stops on EOS never feeds EOS. Raises `InvalidRequest` for ids outside the
    vocabulary, a prompt above the window (unless it slides), bad budgets; `EngineFailed` when all ids are masked.
    """
    return drain(stream_cached(model, prompt_ids, **options))


def stream_cached(
    model: LanguageModel, prompt_ids: Sequence[int], **options: Unpack[Options]
) -> Generator[int, None, ReferenceResult]:
    """`generate_cached` id by id: yields each id as it is chosen, and returns the result."""
    rules = _Rules(**options)
    return _generate(model, _checked_prompt(model, prompt_ids, rules), rules, _cached_feed(model))


def drain(generation: Generator[int, None, ReferenceResult]) -> ReferenceResult:
    """Run a generation to its end."""
    while True:
        try:
            next(generation)
        except StopIteration as end:
            result: ReferenceResult = end.value
            return result


@dataclass(frozen=True)
class _Rules:
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    ignore_eos: bool = False
    overflow: Overflow | None = None
    stop_ids: Sequence[int] = ()
    min_tokens: int = 0

    def slides(self, model: LanguageModel) -> bool:
        """Whether a full window slides: what was asked for, else the model's own habit."""
        return model.slides if self.overflow is None else self.overflow == "slide"


def _uncached_feed(model: LanguageModel) -> Feed:
    def feed(ids: Sequence[int]) -> tuple[Tensor, StepRecord]:
        fed = ids[-model.window :]
        return uncached_logits(model, fed, last=1)[0], StepRecord(len(fed), 0, 0)

    return feed


def _cached_feed(model: LanguageModel) -> Feed:
    cache = Cache()

    def feed(ids: Sequence[int]) -> tuple[Tensor, StepRecord]:
        nonlocal cache
        if cache.length == model.window:
            cache = Cache()
        before = cache.length
        fed = ids[before:] if before else ids[-model.window :]
        logits = forward(model, fed, cache, last=1)[0]
        return logits, StepRecord(len(fed), before, cache.length)

    return feed


def _generate(model: LanguageModel, ids: list[int], rules: _Rules, feed: Feed) -> Generator[int, None, ReferenceResult]:
    """The loop both generators share. Feeding and choosing are two moments: the last chosen id is never fed."""
    prompt, window, sampling = len(ids), model.window, rules.sampling
    eos_ids = () if rules.ignore_eos else model.tokenizer.eos_ids
    random = RandomState(secrets.randbits(64) if sampling.seed is None else sampling.seed)
    steps: list[StepRecord] = []
    recomputes, filled, prefill_s, decode_s = 0, None, 0.0, 0.0
    stop_reason: StopReason | None = None if rules.max_tokens else "budget"
    while stop_reason is None:
        started = time.perf_counter()
        logits, record = feed(ids)
        steps.append(record)
        generated = len(ids) - prompt
        if filled is None and len(ids) >= window:
            filled = generated
        blocked = (*eos_ids, *rules.stop_ids) if generated < rules.min_tokens else ()
        chosen = choose(logits.cpu().numpy(), sampling, ids, prompt, random, blocked)
        recomputed = generated > 0 and len(ids) > window
        recomputes += recomputed
        elapsed = time.perf_counter() - started
        if generated == 0 or recomputed:
            prefill_s += elapsed
        else:
            decode_s += elapsed
        ids.append(chosen)
        random = random.next()
        stop_reason = _stop_reason(chosen, generated + 1, eos_ids, rules)
        if stop_reason is None and len(ids) > window and not rules.slides(model):
            stop_reason = "window"  # feeding the id just chosen would need a place more
        yield chosen
    return ReferenceResult(
        token_ids=tuple(ids[prompt:]),
        stop_reason=stop_reason,
        steps=tuple(steps),
        prompt_tokens=prompt,
        window_recomputes=recomputes,
        window_filled_step=filled,
        evaluated_positions=sum(step.input_length for step in steps),
        uncached_positions=uncached_positions(prompt, len(ids) - prompt, window),
        prefill_s=prefill_s,
        decode_s=decode_s,
        seed=random.seed,
    )


def _stop_reason(chosen: int, generated: int, eos_ids: Sequence[int], rules: _Rules) -> StopReason | None:
    """Decided on ids alone, the chosen one first: an EOS that also spends the budget is `eos`."""
    if chosen in eos_ids:
        return "eos"
    if chosen in rules.stop_ids:
        return "stop"
    return "budget" if generated == rules.max_tokens else None


def _checked_prompt(model: LanguageModel, prompt_ids: Sequence[int], rules: _Rules) -> list[int]:
    ids, vocab_size = model.started(prompt_ids), model.config.vocab_size
    for name, given in (("prompt_ids", ids), ("stop_ids", rules.stop_ids)):
        outside = [token_id for token_id in given if not 0 <= token_id < vocab_size]
        if outside:
            raise InvalidRequest(name, f"id {outside[0]} is outside 0 … {vocab_size - 1}")
    rules.sampling.check_vocabulary(vocab_size)
    if not 0 <= rules.min_tokens <= rules.max_tokens:
        raise InvalidRequest("max_tokens", f"0 ≤ min_tokens ≤ max_tokens, got {rules.min_tokens}, {rules.max_tokens}")
    if rules.overflow not in (None, "stop", "slide"):
        raise InvalidRequest("overflow", f"must be stop or slide, not {rules.overflow!r}")
    if len(ids) > model.window and not rules.slides(model):
        raise InvalidRequest("prompt", f"{len(ids)} tokens are above the window of {model.window}")
    return ids
