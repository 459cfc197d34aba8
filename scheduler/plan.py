"""Which tokens the next step computes. Plain Python: no tensor, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass

from drumline.scheduler.config import MIN_PROMPT_TOKENS


@dataclass(frozen=True)
class Backlog:
    """A live row and how many of its known tokens are not cached yet (1: it decodes)."""

    row: int
    pending: int


@dataclass(frozen=True)
class Portion:
    """How many tokens of a row the step takes, and what may follow them (`speculation.py`)."""

    row: int
    length: int
    drafts: tuple[int, ...] = ()


def plan_step(backlogs: Sequence[Backlog], step_tokens: int) -> list[Portion]:
    """Every decoding row steps; prompts, oldest first, share max(step_tokens − decoding rows, 16) tokens.

    `backlogs` come in the order in which the rows were taken, or slid.
    """
    decoding = [Portion(backlog.row, 1) for backlog in backlogs if backlog.pending == 1]
    budget = max(step_tokens - len(decoding), MIN_PROMPT_TOKENS)
    prompts = []
    for backlog in backlogs:
        if backlog.pending > 1 and budget > 0:
            length = min(backlog.pending, budget)
            prompts.append(Portion(backlog.row, length))
            budget -= length
    return decoding + prompts
