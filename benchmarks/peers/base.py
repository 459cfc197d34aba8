"""What every engine is asked and what it answers. Standard library alone: a peer's own Python reads this, too."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

SamplingName = Literal["greedy", "chat"]
CHAT = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
"""What `chat` means, in the spelling that all engines share."""


class PeerFailed(Exception):
    """An engine did not start, died or refused the work; the message ends with what it said last."""


@dataclass(frozen=True)
class Work:
    """One request: prompt ids, and how many tokens to generate (EOS is ignored)."""

    prompt_ids: tuple[int, ...]
    max_tokens: int

    def to_json(self) -> dict[str, Any]:
        """As it travels to a worker."""
        return {"prompt_ids": self.prompt_ids, "max_tokens": self.max_tokens}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The inverse of `to_json`; also reads a line of a workload file."""
        return cls(tuple(fields["prompt_ids"]), fields["max_tokens"])


def read_work(path: Path) -> list[Work]:
    """The requests of a workload file (JSON lines with prompt_ids and max_tokens)."""
    return [Work.from_json(json.loads(line)) for line in path.read_text().splitlines() if line.strip()]


@dataclass(frozen=True)
class Timing:
    """One run: tokens, seconds from the first submit to the last token, and what else the engine tells."""

    output_tokens: int
    prompt_tokens: int
    wall_s: float
    decode_tokens_per_s: float | None = None
    """Of a lone request: tokens after the first, over the time after the first."""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.output_tokens / self.wall_s

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.wall_s


@dataclass(frozen=True)
class About:
    """What an engine says of itself once it is ready."""

    versions: dict[str, str]
    note: str
    """Precision, threads and whatever else a reader of the figures must know."""


class Engine(Protocol):
    """The side that computes."""

    about: About

    def run(self, work: Sequence[Work], rows: int, sampling: SamplingName) -> Timing:
        """Run all of it, at most `rows` at once, all queued at the start."""


class Peer(Protocol):
    """The side that asks; leaving its block ends the engine's process."""

    about: About
    ready_s: float
    """From starting the process to its being ready."""

    def run(self, work: Sequence[Work], rows: int, sampling: SamplingName, timeout_s: float) -> Timing:
        """As `Engine.run`; raises `PeerFailed`, also when it takes longer than `timeout_s`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...
