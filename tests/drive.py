"""Driving a scheduler from a test: run requests to their end, look at each step's logits, hold a step still."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import torch
from numpy.typing import NDArray
from torch import Tensor

from drumline import Request, Result, SamplingParams, Scheduler
from drumline.model.language_model import LanguageModel
from drumline.scheduler.job import GenerationJob

_PATIENCE_S = 20.0
"""How long a held step waits before its row ends with an error: a failing test must not hang."""


async def generate(model: LanguageModel, *requests: Request, **settings: object) -> list[Result]:
    """All requests together through one scheduler, which must be in order afterwards."""
    async with Scheduler(model, **settings) as scheduler:
        jobs = [await scheduler.submit(request) for request in requests]
        results = [await job.result() for job in jobs]
        scheduler.check_integrity()
    return results


class Capture:
    """A processor that keeps a copy of the scores it sees (the raw logits, where nothing is penalised)."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, ids: Sequence[int], scores: NDArray) -> NDArray:
        self.logits.append(torch.from_numpy(scores.copy()))
        return scores


class Gate:
    """A processor that holds the step at each token of its row until the test lets it go on.

    While it holds, nothing moves, so that a test can act at a known moment: what it does lands at the next boundary.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Semaphore(0)
        self._may_pass = threading.Semaphore(0)
        self._open = False

    def __call__(self, ids: Sequence[int], scores: NDArray) -> NDArray:
        self._loop.call_soon_threadsafe(self._arrived.release)
        if not self._open and not self._may_pass.acquire(timeout=_PATIENCE_S):
            raise TimeoutError("the test never opened the gate")
        return scores

    async def arrived(self) -> None:
        """Wait until a step is held."""
        await asyncio.wait_for(self._arrived.acquire(), _PATIENCE_S)

    def step(self) -> None:
        """Let the held step end; the next one is held again."""
        self._may_pass.release()

    def open(self) -> None:
        """Hold nothing any more."""
        self._open = True
        self._may_pass.release()


def asking(prompt: str = "the drum", tokens: int = 8, **fields: object) -> Request:
    """A request that runs to its budget."""
    return Request(prompt=prompt, max_tokens=tokens, ignore_eos=True, **fields)


def sampled(seed: int | None = None, **fields: object) -> Request:
    """The same, with draws."""
    return asking(sampling=SamplingParams(temperature=1.0, top_p=0.95, seed=seed), **fields)


async def held(scheduler: Scheduler, tokens: int = 8, **fields: object) -> tuple[Gate, GenerationJob]:
    """A running job whose first step waits for the test."""
    gate = Gate()
    job = await scheduler.submit(asking("h", tokens, processors=[gate], **fields))
    await gate.arrived()
    return gate, job


async def until(holds: Callable[[], bool]) -> None:
    """Let the scheduler work until a condition holds."""
    for turn in range(100_000):
        if holds():
            return
        await asyncio.sleep(0.001 if turn % 50 == 49 else 0)  # now and then the step's thread needs the interpreter
    raise TimeoutError("it never held")


def metric(scheduler: Scheduler, name: str, **labels: str) -> float | None:
    """The value that a scrape would show now."""
    labels = {"scheduler": scheduler.config.name, **labels}
    return scheduler.registry.get_sample_value(f"drumline_{name}", labels)
