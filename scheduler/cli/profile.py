"""`drumline profile`: where a decoding step's time goes, and how far it is from what the machine allows."""

import asyncio
import json
import time
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
import typer
from rich.console import Console
from rich.table import Table

from drumline.model.config import ModelConfig
from drumline.model.errors import InvalidRequest
from drumline.model.language_model import LanguageModel
from drumline.model.sampling_params import SamplingParams
from drumline.scheduler.cli import options
from drumline.scheduler.cli.loop import run_loop
from drumline.scheduler.cli.workload import SamplingName, make_scheduler, with_sampling
from drumline.scheduler.config import EngineSettings
from drumline.scheduler.request import Request
from drumline.scheduler.scheduler import Scheduler

BANDWIDTH_BYTES = 512 * 2**20
"""Read to measure the memory: far more than any cache holds."""


@runtime_checkable
class TimedBackend(Protocol):
    """A backend that can say where its time goes."""

    timings: dict[str, float] | None
    """None: off. A dict: every forward adds its seconds by phase (linear, attention, norm, head, …)."""


@runtime_checkable
class RatedBackend(Protocol):
    """A backend that can measure how fast the machine multiplies."""

    def product_rate(self) -> float:
        """Multiply-adds a second of its own product on a large shape."""


@dataclass(frozen=True)
class Sums:
    """Seconds and steps so far; the difference of two is what happened between them."""

    steps: int
    wall_s: float
    forward_s: float
    sample_s: float
    python_s: float
    """Plan and commit, on the event loop."""

    def since(self, before: "Sums") -> "Sums":
        """What was added after `before`."""
        return replace(self, **{name: value - getattr(before, name) for name, value in vars(self).items()})

    def seconds_by_part(self) -> dict[str, float]:
        """Seconds a step. Waiting is what no part accounts for: handing the step to its thread and back, the event
        loop's other work, delivery."""
        known = {"forward": self.forward_s, "sampling": self.sample_s, "python": self.python_s}
        parts = known | {"waiting": self.wall_s - sum(known.values())}
        return {name: seconds / self.steps for name, seconds in parts.items()}


@dataclass(frozen=True)
class Limits:
    """What one step must read and multiply at least, and the machine's measured rates (None: not measured)."""

    read_bytes: int
    multiply_adds: int
    bytes_per_s: float
    multiply_adds_per_s: float | None

    @property
    def memory_s(self) -> float:
        """The time that reading alone takes."""
        return self.read_bytes / self.bytes_per_s

    @property
    def product_s(self) -> float | None:
        """The time that the linear layers' multiplications alone take."""
        return None if self.multiply_adds_per_s is None else self.multiply_adds / self.multiply_adds_per_s


def profile(
    model: options.ModelPath = None,
    rows: options.Rows = 16,
    context: Annotated[int, typer.Option(help="Tokens that each row holds at the middle of the measurement.")] = 160,
    steps: Annotated[int, typer.Option(help="Decoding steps to measure.")] = 40,
    sampling: Annotated[SamplingName, typer.Option(help="chat: temperature 0.8, top-k 50, top-p 0.9.")] = "greedy",
    window: options.Window = None,
    precision: options.PrecisionName = "auto",
    backend: options.BackendName = "auto",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Say where a decoding step's time goes, and the distance to the limits of memory and arithmetic."""
    options.use_threads(threads)
    if steps < 1:
        raise InvalidRequest("--steps", "must be at least 1")
    loaded = options.open_model(model, precision, window)
    prompt = context - steps
    if prompt < 1 or context + steps + 2 > loaded.window:
        raise InvalidRequest("--context", f"must be {steps + 1} to {loaded.window - steps - 2} with {steps} steps")
    report = run_loop(_profile(loaded, rows, prompt, steps, sampling, options.chosen_backend(backend)))
    if as_json:
        print(json.dumps(report))
    else:
        _print_tables(f"{loaded.name}, {loaded.precision}, {rows} rows at {context} tokens, {sampling}", report)


async def _profile(
    model: LanguageModel, rows: int, prompt: int, steps: int, sampling: SamplingName, backend: str | None
) -> dict[str, Any]:
    """Decode with the backend's clocks off, which gives the step, then on, which gives the forward pass's phases."""
    ids = [(7 * row + 13 * place) % model.config.vocab_size for row in range(rows) for place in range(prompt)]
    requests = [
        Request(prompt_ids=tuple(ids[row * prompt :][:prompt]), max_tokens=2 * steps + 4, sampling=SamplingParams())
        for row in range(rows)
    ]
    seeded = [request.model_copy(update={"overflow": "stop"}) for request in with_sampling(requests, sampling, 0)]
    settings = EngineSettings(rows, max(256, 2 * rows), backend, draft_tokens=0)  # each step a token a row
    async with make_scheduler(model, seeded, settings) as scheduler:
        jobs = [await scheduler.submit(request) for request in seeded]
        while min(job.generated for job in jobs) < 2:  # until then, prompts are computed
            await _moment()
        engine = getattr(scheduler, "backend", None)
        step = await _measure(scheduler, steps)
        phases = None
        if isinstance(engine, TimedBackend):
            timings: dict[str, float] = {}
            engine.timings = timings
            timed = await _measure(scheduler, steps)
            phases = _phases(dict(timings), timed)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*(job.result() for job in jobs))
        if isinstance(engine, TimedBackend):
            engine.timings = None
    rate = engine.product_rate() if isinstance(engine, RatedBackend) else None
    limits = _limits(model, rows, prompt + steps // 2, rate)
    return {
        "rows": rows,
        "steps": step.steps,
        "step_s": step.wall_s / step.steps,
        "parts_s": step.seconds_by_part(),
        "outside_model_ratio": 1 - (step.forward_s + step.sample_s) / step.wall_s,
        "phases_s": phases,
        "read_bytes": limits.read_bytes,
        "multiply_adds": limits.multiply_adds,
        "bytes_per_s": limits.bytes_per_s,
        "multiply_adds_per_s": limits.multiply_adds_per_s,
        "memory_limit_s": limits.memory_s,
        "product_limit_s": limits.product_s,
    }


async def _measure(scheduler: Scheduler, steps: int) -> Sums:
    """The sums over the next `steps` steps."""
    before = _sums(scheduler)
    while scheduler.statistics().steps < before.steps + steps:
        await _moment()
    return _sums(scheduler).since(before)


async def _moment() -> None:
    """Let the scheduler work; looking more often would take a core from it."""
    await asyncio.sleep(0.002)


def _phases(timings: dict[str, float], timed: Sums) -> dict[str, float]:
    """Seconds a step of the forward pass by phase, the longest first, and what no phase accounts for."""
    parts = {phase: timings[phase] / timed.steps for phase in sorted(timings, key=timings.__getitem__, reverse=True)}
    return parts | {"other": max(0.0, timed.forward_s / timed.steps - sum(parts.values()))}


def _sums(scheduler: Scheduler) -> Sums:
    statistics = scheduler.statistics()
    python = (
        scheduler.registry.get_sample_value(
            "drumline_step_seconds_sum", {"scheduler": scheduler.config.name, "phase": phase}
        )
        for phase in ("plan", "commit")
    )
    return Sums(
        steps=statistics.steps,
        wall_s=time.perf_counter(),
        forward_s=statistics.forward_s,
        sample_s=statistics.sample_s,
        python_s=sum(seconds or 0.0 for seconds in python),
    )


def _limits(model: LanguageModel, rows: int, context: int, rate: float | None) -> Limits:
    """Every weight but the embedding's unused lines, and every row's keys and values, are read once a step."""
    config, weights = model.config, model.weights
    looked_up = [weights.position_embedding, None if weights.head is weights.embedding else weights.embedding]
    read = sum(tensor.nbytes for tensor in weights.tensors()) - sum(t.nbytes for t in looked_up if t is not None)
    read += model.ledger(rows, context).kv_bytes
    return Limits(read, rows * _linear_size(config), measure_bandwidth(), rate)


def _linear_size(config: ModelConfig) -> int:
    """Multiply-adds of one token in all linear layers and the head."""
    up = config.ffn_width * (2 if config.gated else 1)
    layer = config.query_width * 2 + 2 * config.kv_width + up + config.ffn_width
    return config.width * (config.layers * layer + config.vocab_size)


def measure_bandwidth() -> float:
    """Bytes a second that all threads together read from memory: the best of five passes over a large buffer."""
    buffer = torch.ones(BANDWIDTH_BYTES // 4)
    passes = []
    for _ in range(5):
        started = time.perf_counter()
        buffer.sum()
        passes.append(time.perf_counter() - started)
    return BANDWIDTH_BYTES / min(passes)


def _print_tables(title: str, report: dict[str, Any]) -> None:
    step_s = report["step_s"]
    table = Table(title=f"{title}: {step_s * 1000:.2f} ms a step, {report['rows'] / step_s:.0f} tokens/s")
    for heading in ("part", "ms", "share"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for part, seconds in report["parts_s"].items():
        table.add_row(part, f"{seconds * 1000:.3f}", f"{seconds / step_s:.1%}")
    table.add_row("outside the model", "", f"{report['outside_model_ratio']:.1%}", style="bold")
    console = Console()
    console.print(table)
    if report["phases_s"] is not None:
        forward_s = sum(report["phases_s"].values())
        phases = Table(title=f"the forward pass, each phase clocked: {forward_s * 1000:.2f} ms")
        for heading in ("phase", "ms", "share"):
            phases.add_column(heading, justify="left" if heading == "phase" else "right")
        for phase, seconds in report["phases_s"].items():
            phases.add_row(phase, f"{seconds * 1000:.3f}", f"{seconds / forward_s:.1%}")
        console.print(phases)
    console.print(
        f"memory: {report['read_bytes'] / 1e6:.0f} MB at {report['bytes_per_s'] / 1e9:.1f} GB/s = "
        f"{report['memory_limit_s'] * 1000:.2f} ms; the step takes {step_s / report['memory_limit_s']:.1f} × that"
    )
    if report["product_limit_s"] is not None:
        console.print(
            f"products: {report['multiply_adds'] / 1e9:.2f} G multiply-adds at "
            f"{report['multiply_adds_per_s'] / 1e9:.0f} G/s = {report['product_limit_s'] * 1000:.2f} ms; "
            f"the step takes {step_s / report['product_limit_s']:.1f} × that"
        )
