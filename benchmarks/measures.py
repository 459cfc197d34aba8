"""What is measured: data, the same for every engine."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.peers.base import SamplingName, Timing, Work

Unit = Literal["output", "decode", "prompt"]
"""Output tokens a second of wall time; tokens after the first over the time after it; prompt tokens a second."""


@dataclass(frozen=True)
class Measure:
    """A workload, the rows it may fill, and which rate counts."""

    name: str
    title: str
    work: tuple[Work, ...]
    rows: int
    unit: Unit = "output"
    sampling: SamplingName = "greedy"
    peers: bool = True
    """False where only ours is measured: more points for the plot."""

    def rate(self, timing: Timing) -> float:
        """The figure of one run, tokens a second."""
        if self.unit == "prompt":
            return timing.prompt_tokens_per_s
        if self.unit == "decode" and timing.decode_tokens_per_s is not None:
            return timing.decode_tokens_per_s
        return timing.output_tokens_per_s


def all_measures(workload: Sequence[Work]) -> list[Measure]:
    """Every measure over this workload. Few rows take fewer of its requests, or they would take minutes."""
    work = tuple(workload)
    name = f"mixed{len(work)}"
    one_row, four = _prompts(work, 1, 128), _prompts(work, 4, 128)
    return [
        Measure("greedy-32", f"{name}, greedy, 32 rows", work, 32),
        Measure("greedy-16", f"{name}, greedy, 16 rows", work, 16),
        Measure("chat-32", f"{name}, chat sampling, 32 rows", work, 32, sampling="chat"),
        Measure("one-row", "one row, 128 + 64, after the first token", (Work(one_row[0], 64),), 1, "decode"),
        Measure("prefill-mixed", f"prompts of {name}, one token each", tuple(_first_token(work)), 32, "prompt"),
        Measure("prefill-4x128", "4 prompts of 128, one token each", tuple(Work(ids, 1) for ids in four), 4, "prompt"),
        Measure("greedy-1", "its first 4 requests, greedy, 1 row", work[:4], 1),
        Measure("greedy-2", "its first 8 requests, greedy, 2 rows", work[:8], 2, peers=False),
        Measure("greedy-4", "its first 16 requests, greedy, 4 rows", work[:16], 4, peers=False),
        Measure("greedy-8", "its first 32 requests, greedy, 8 rows", work[:32], 8, peers=False),
    ]


def warm_up(measure: Measure) -> tuple[Work, ...]:
    """A short run of the same shape, so that no first-time cost is measured."""
    return tuple(Work(request.prompt_ids[:16], 2) for request in measure.work[: measure.rows])


def _first_token(work: Sequence[Work]) -> list[Work]:
    return [Work(request.prompt_ids, 1) for request in work]


def _prompts(work: Sequence[Work], count: int, length: int) -> list[tuple[int, ...]]:
    """Prompts of one length, cut from the workload's own ids, no two alike."""
    ids = itertools.cycle(itertools.chain.from_iterable(request.prompt_ids for request in work))
    return [tuple(itertools.islice(ids, length)) for _ in range(count)]
