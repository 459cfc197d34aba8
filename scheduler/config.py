"""The scheduler's own settings, validated once."""

from dataclasses import dataclass
from importlib.metadata import version

from pydantic import Field

from drumline.model.validated import Validated
from drumline.scheduler.speculation import TILE_TOKENS

VERSION = version("drumline")

MIN_PROMPT_TOKENS = 16
"""Prompt tokens a step takes even when decoding rows use up its budget, so that no prompt starves."""


DRAFT_TOKENS = TILE_TOKENS - 1
"""The most drafts of a row, and the default."""


STALL_S = 30.0
"""Steps of small models take up to a second, one of 8,192 tokens ten or twenty."""


@dataclass(frozen=True)
class EngineSettings:
    """How a scheduler steps, as the commands and benchmarks choose it: arguments of `Scheduler`."""

    rows: int = 16
    step_tokens: int = 256
    backend: str | None = None
    draft_tokens: int = DRAFT_TOKENS
    reuse: bool = True


MOST_STEP_TOKENS = 8_192
"""Buffers of a step grow with it, logits of prompts most of all."""


class SchedulerConfig(Validated):
    """Bounds and names of one scheduler, checked; the defaults stand in the signature of `Scheduler`."""

    rows: int = Field(ge=1, le=1024)
    step_tokens: int = Field(ge=MIN_PROMPT_TOKENS, le=MOST_STEP_TOKENS)
    queue_requests: int = Field(ge=1)
    queue_tokens: int = Field(ge=1)
    """Prompt tokens and token budgets of all queued requests together."""
    backend: str | None
    """None: the exact backend where the model has one, else torch's."""
    require_exact: bool
    draft_tokens: int = Field(ge=0, le=DRAFT_TOKENS)
    """The most tokens drafted ahead for a row in one step; 0: none."""
    reuse: bool
    """Whether prompts that begin alike are computed once."""
    refuse_late: bool
    """Whether a request is refused that cannot be expected to end before its deadline."""
    restarts: int = Field(ge=0)
    """How often a failed step may be answered by a new pool, in which all that ran goes on."""
    stall_s: float = Field(default=STALL_S, gt=0, allow_inf_nan=False)
    """A step, or a silence of the event loop, that takes longer counts as hanging."""
    name: str = Field(min_length=1, max_length=64)
