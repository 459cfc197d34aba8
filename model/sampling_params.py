"""How a row chooses its next token, as a user states it."""

import re
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from drumline.model.errors import InvalidRequest
from drumline.model.validated import Validated

GREEDY_BELOW = 1e-4
"""A temperature at or below this is greedy: a division by it would only amplify rounding."""


def _key_of_json(key: object) -> object:
    """JSON spells the keys of an object as text."""
    return int(key) if isinstance(key, str) and re.fullmatch(r"-?(0|[1-9][0-9]{0,18})", key) else key


class SamplingParams(Validated):
    """Sampling options of one request; the defaults are greedy.

    Applied in this order: repetition penalty, presence and frequency penalties, logit_bias, processors, masks, then
    temperature, top-k, min_p, top-p, draw. Ids beyond the model's vocabulary are refused at submit.
    """

    temperature: float = Field(default=0.0, ge=0.0)
    top_k: int = Field(default=0, ge=0)
    """0 keeps every token."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    exempt_ids: tuple[int, ...] = Field(default=(), strict=False)
    """Ids that the repetition penalty leaves alone."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[Annotated[int, BeforeValidator(_key_of_json)], float] = Field(default_factory=dict)
    banned_ids: tuple[int, ...] = Field(default=(), strict=False)
    allowed_ids: tuple[int, ...] | None = Field(default=None, strict=False)
    """When given, only these ids may be chosen."""
    seed: int | None = Field(default=None, ge=0, le=2**64 - 1)
    """Drawn, and echoed in the result, when absent."""

    @property
    def greedy(self) -> bool:
        """Whether the highest logit is taken without a draw."""
        return self.temperature <= GREEDY_BELOW

    @model_validator(mode="after")
    def _not_contradictory(self) -> Self:
        if self.allowed_ids is not None:
            if not self.allowed_ids:
                raise InvalidRequest("allowed_ids", "must name at least one id")
            both = set(self.allowed_ids) & set(self.banned_ids)
            if both:
                raise InvalidRequest("allowed_ids", f"id {min(both)} is also in banned_ids")
        return self

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` for an id that the model does not have."""
        for name in ("exempt_ids", "logit_bias", "banned_ids", "allowed_ids"):
            for token_id in getattr(self, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(f"sampling.{name}", f"id {token_id} is outside 0 … {vocab_size - 1}")
