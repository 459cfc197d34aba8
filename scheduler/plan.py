"""Which tokens the next step computes. Plain Python: no tensor, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from drumline.model.config import ModelConfig
from drumline.scheduler.config import MIN_PROMPT_TOKENS

ATTENTION_COST = 1.6
"""A multiply-add of attention against one of a matrix product, as measured (SmolLM2 at positions up to 4,000)."""


@dataclass(frozen=True)
class Backlog:
    """A live row and how many of its known tokens are not cached yet (1: it decodes)."""

    row: int
    pending: int
    cost: float = 1.0
    """Of one of its tokens, against a token at position zero: attention reads all that stand before it."""


def token_cost(config: ModelConfig, position: int) -> float:
    """What computing the token at `position` takes, against one at position zero."""
    return 1 + ATTENTION_COST * position / config.attention_balance


@dataclass(frozen=True)
class Portion:
    """How many tokens of a row the step takes, and what may follow them (`speculation.py`)."""

    row: int
    length: int
    drafts: tuple[int, ...] = ()


def plan_step(backlogs: Sequence[Backlog], step_tokens: int) -> list[Portion]:
    """Every decoding row steps; prompts, oldest first, share max(step_tokens − decoding rows, 16) tokens' time.

    So a long prompt's portions become shorter towards its end, and those who wait for the step do not notice how far it
    has come. `backlogs` come in the order in which the rows were taken, or slid.
    """
    decoding = [Portion(backlog.row, 1) for backlog in backlogs if backlog.pending == 1]
    budget = float(max(step_tokens - len(decoding), MIN_PROMPT_TOKENS))
    prompts = []
    for backlog in backlogs:
        if backlog.pending > 1 and budget > 0:
            length = min(backlog.pending, ceil(budget / backlog.cost))
            prompts.append(Portion(backlog.row, length))
            budget -= length * backlog.cost
    return decoding + prompts
