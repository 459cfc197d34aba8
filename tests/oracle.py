"""The judge of every row that the scheduler computes: teacher-forced comparison with the uncached reference."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from drumline.model.distribution import distribution
from drumline.model.language_model import LanguageModel
from drumline.model.penalties import penalised
from drumline.model.random_state import DRAW_BITS, RandomState
from drumline.model.reference import uncached_steps
from drumline.model.sampling import choose
from drumline.model.sampling_params import SamplingParams
from drumline.scheduler.request import TokenLogprob


@dataclass
class Ties:
    """Where an id differed from the judge's because the judge itself was undecided; the largest logit difference."""

    steps: int = 0
    differing: list[int] = field(default_factory=list)
    """Indices of the generated tokens."""
    largest_difference: float = 0.0

    @property
    def count(self) -> int:
        """How many ids differed."""
        return len(self.differing)


def assert_matches_reference(
    model: LanguageModel,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    step_logits: Sequence[Tensor] | None = None,
    *,
    logprobs: Sequence[TokenLogprob] | None = None,
    sampling: SamplingParams | None = None,
    choice: int = 0,
    ignore_eos: bool = False,
    min_tokens: int = 0,
    stop_ids: Sequence[int] = (),
    bound: float = 1e-4,
) -> Ties:
    """Check one row's generated ids, and where given its raw logits `[vocab]` or log-probabilities of each step.

    The uncached reference is fed `token_ids`, so one difference does not spoil the steps behind it. Logits must agree
    within `bound`, log-probabilities within 2 · bound. A greedy id must be the judge's own, or one whose score is
    closer than 2 · bound to the judge's best; a sampled id (its seed must be given) that of the same draw, or its
    neighbour where the draw falls within rounding of the border between them. Rows that slid are followed over the
    last `model.window` ids. Counts and prints ties.
    """
    sampling = sampling or SamplingParams()
    ids, ties = list(prompt_ids) or [model.tokenizer.bos_id], Ties(steps=len(token_ids))
    prompt = len(ids)
    ending = (*(() if ignore_eos else model.tokenizer.eos_ids), *stop_ids)
    if step_logits is not None:
        assert len(step_logits) == len(token_ids), f"{len(step_logits)} lines of logits for {len(token_ids)} ids"
    for step, expected in enumerate(uncached_steps(model, tuple(ids), token_ids)):
        if step_logits is not None:
            given = step_logits[step]
            assert given.shape == expected.shape, f"step {step}: logits {given.shape}, the judge's {expected.shape}"
            difference = float((given.float().cpu() - expected.cpu()).abs().max())
            assert difference <= bound, f"step {step}: logits differ by {difference:.3g}, bound {bound:g}"
            ties.largest_difference = max(ties.largest_difference, difference)
        if logprobs is not None:
            _assert_logprobs(logprobs[step], expected.cpu(), token_ids[step], 2 * bound, f"step {step}")
        blocked = ending if step < min_tokens else ()
        judge, chosen = expected.cpu().numpy(), token_ids[step]
        random = RandomState(sampling.seed or 0, choice, step)
        wanted = choose(judge, sampling, ids, prompt, random, blocked)
        if chosen != wanted:
            scores = penalised(judge, sampling, ids, prompt)
            scores[list(_forbidden(sampling, blocked, len(scores)))] = -np.inf
            undecided = _greedy_tie if sampling.greedy else _draw_tie
            assert undecided(scores, chosen, wanted, sampling, random, bound), (
                f"step {step}: id {chosen} (score {scores[chosen]:.6f}), the judge's {wanted} ({scores[wanted]:.6f})"
            )
            ties.differing.append(step)
        ids.append(chosen)
    if ties.count:
        print(f"oracle: {ties.count} of {ties.steps} ids differ where the judge is undecided: steps {ties.differing}")
    return ties


def _assert_logprobs(given: TokenLogprob, expected: Tensor, chosen: int, bound: float, where: str) -> None:
    judge = expected.log_softmax(-1)
    assert given.id == chosen, f"{where}: log-probability of id {given.id}, chosen was {chosen}"
    for token_id, value in ((given.id, given.logprob), *given.top):
        difference = abs(value - float(judge[token_id]))
        assert difference <= bound, f"{where}: log-probability of {token_id} differs by {difference:.3g}"


def _forbidden(sampling: SamplingParams, blocked: Sequence[int], vocab_size: int) -> set[int]:
    forbidden = {*sampling.banned_ids, *blocked}
    if sampling.allowed_ids is not None:
        forbidden |= set(range(vocab_size)) - set(sampling.allowed_ids)
    return forbidden


def _greedy_tie(
    scores: np.ndarray, chosen: int, wanted: int, sampling: SamplingParams, random: RandomState, bound: float
) -> bool:
    """Stricter than "the top two are closer than 2 · bound": the chosen id itself has to be that close."""
    return bool(scores[wanted] - scores[chosen] < 2 * bound)


def _draw_tie(
    scores: np.ndarray, chosen: int, wanted: int, sampling: SamplingParams, random: RandomState, bound: float
) -> bool:
    """Logits off by `bound` move a border of the running sum by at most 2 · bound / temperature of the total."""
    kept, weights = distribution(scores, sampling)
    if chosen not in kept:
        return False
    borders = np.cumsum(weights) / weights.sum()
    at = int(np.flatnonzero(kept == chosen)[0])
    low, high = (borders[at - 1] if at else 0.0), borders[at]
    slack = 2 * bound / sampling.temperature
    return bool(low - slack <= random.draw() / 2**DRAW_BITS <= high + slack)
