"""What a choice had generated when its worker stopped: enough to go on from there, and end with the same answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from drumline.model.errors import InvalidRequest
from drumline.scheduler.request import Request, TokenLogprob


@dataclass(frozen=True)
class Progress:
    """The first tokens of a choice, with their log-probabilities where the request wants them."""

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None

    def tokens(self) -> list[tuple[int, TokenLogprob | None]]:
        """Each id with its log-probability."""
        known = [None] * len(self.token_ids) if self.logprobs is None else self.logprobs
        return list(zip(self.token_ids, known, strict=True))


def check_progress(request: Request, progress: Sequence[Progress], vocab_size: int) -> None:
    """Raise `InvalidRequest("progress")` for what this request cannot have generated."""
    if progress and request.sampling.seed is None:
        raise InvalidRequest("progress", "needs the seed that it was drawn with")
    choices = [entry.choice for entry in progress]
    if len(set(choices)) < len(choices) or not all(0 <= choice < request.n for choice in choices):
        raise InvalidRequest("progress", f"must name different choices of 0 … {request.n - 1}")
    for entry in progress:
        if len(entry.token_ids) > request.max_tokens:
            raise InvalidRequest("progress", f"holds {len(entry.token_ids)} tokens, max_tokens is {request.max_tokens}")
        if not all(0 <= token_id < vocab_size for token_id in entry.token_ids):
            raise InvalidRequest("progress", f"holds ids outside 0 … {vocab_size - 1}")
        given = None if entry.logprobs is None else [known.id for known in entry.logprobs]
        if given != (None if request.logprobs is None else list(entry.token_ids)):
            raise InvalidRequest("progress", "must have a log-probability of each token where logprobs asks for them")
