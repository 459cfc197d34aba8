"""The scheduler's own settings, validated once."""

from importlib.metadata import version

from pydantic import Field

from drumline.model.validated import Validated

VERSION = version("drumline")

MIN_PROMPT_TOKENS = 16
"""Prompt tokens a step takes even when decoding rows use up its budget, so that no prompt starves."""


class SchedulerConfig(Validated):
    """Bounds and names of one scheduler; every bound is over requests, rows or tokens."""

    rows: int = Field(default=16, ge=1, le=1024)
    step_tokens: int = Field(default=256, ge=MIN_PROMPT_TOKENS)
    queue_requests: int = Field(default=1024, ge=1)
    queue_tokens: int = Field(default=4_000_000, ge=1)
    """Prompt tokens and token budgets of all queued requests together."""
    backend: str = "torch"
    require_exact: bool = False
    name: str = Field(default="main", min_length=1, max_length=64)
