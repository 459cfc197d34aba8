"""Workloads: JSON lines of requests, queued all at once, as `bench`, `verify` and `generate` run them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from drumline.model.errors import InvalidRequest
from drumline.model.language_model import LanguageModel
from drumline.model.sampling_params import SamplingParams
from drumline.scheduler.config import EngineSettings
from drumline.scheduler.policy import Policy
from drumline.scheduler.request import Request, Result
from drumline.scheduler.scheduler import Scheduler

SamplingName = Literal["greedy", "chat"]


def read_workload(path: Path) -> list[Request]:
    """The requests of a JSONL file, one a line; raises `InvalidRequest` naming the file's line."""
    requests: list[Request] = []
    seen: set[str] = set()
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            request = Request.from_json(line)
        except InvalidRequest as error:
            raise InvalidRequest(f"{path.name}:{number}: {error.field}", error.limit) from None
        if request.id is None:
            request = request.model_copy(update={"id": f"line-{number}"})
        if request.id in seen:
            raise InvalidRequest(f"{path.name}:{number}: id", f"{request.id} stands on an earlier line")
        seen.add(str(request.id))
        requests.append(request)
    if not requests:
        raise InvalidRequest(str(path), "holds no request")
    return requests


def with_sampling(requests: Sequence[Request], sampling: SamplingName, seed: int) -> list[Request]:
    """Measured requests run to their budget (EOS ignored); a line's own `sampling` wins.

    `chat` is temperature 0.8, top-k 50, top-p 0.9. Where a line gives no seed, it is `seed` + line number (from 0), so
    that a run can be repeated.
    """
    named = SamplingParams() if sampling == "greedy" else SamplingParams(temperature=0.8, top_k=50, top_p=0.9)
    measured = []
    for number, request in enumerate(requests):
        chosen = request.sampling if "sampling" in request.model_fields_set else named
        if chosen.seed is None:
            chosen = chosen.model_copy(update={"seed": seed + number})
        measured.append(request.model_copy(update={"ignore_eos": True, "sampling": chosen}))
    return measured


def make_scheduler(
    model: LanguageModel, requests: Sequence[Request], settings: EngineSettings, policy: Policy | None = None
) -> Scheduler:
    """A scheduler whose queue takes the whole workload at once."""
    choices = sum(request.n for request in requests)
    return Scheduler(
        model,
        **asdict(settings),
        policy=policy,
        queue_requests=max(1024, choices),
        queue_tokens=max(4_000_000, 2 * choices * model.window + sum(r.n * r.max_tokens for r in requests)),
    )


async def run_all(scheduler: Scheduler, requests: Sequence[Request], on_done: Callable[[], None]) -> list[Result]:
    """Queue all requests at once and wait for all results, in the order of `requests`."""
    jobs = [scheduler.submit_nowait(request) for request in requests]

    async def finished(index: int) -> Result:
        result = await jobs[index].result()
        on_done()
        return result

    return await asyncio.gather(*(finished(index) for index in range(len(jobs))))
