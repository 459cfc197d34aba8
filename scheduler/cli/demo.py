"""`drumline demo`: a dozen chat prompts over MQTT at once, seen live, then the answers and the metrics."""

import asyncio
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drumline.model.errors import EngineFailed
from drumline.model.language_model import LanguageModel
from drumline.model.sampling_params import SamplingParams
from drumline.scheduler.cli import options
from drumline.scheduler.cli.lanes import Lane, Lanes
from drumline.scheduler.cli.loop import run_loop
from drumline.scheduler.cli.worker import Worker, WorkerSettings, run_worker
from drumline.scheduler.config import EngineSettings
from drumline.scheduler.mqtt.client import Client, RemoteJob
from drumline.scheduler.request import Message, Result

NOTICE = (
    "Summarise this notice in one sentence: The workshop will be closed on Friday from noon because the floor is being "
    "repainted. Machines 3 and 4 must be switched off and covered by eleven. Finished parts that are to be shipped on "
    "Monday should be brought to the loading bay on Thursday evening, since the forklift cannot pass the wet floor. "
    "Anyone who needs access during the weekend should ask Maria for a key."
)
# prompt, token budget, repetition penalty: each row has parameters of its own
PROMPTS = (
    ("What is the capital of France?", 24, 1.0),
    ("Name three primary colours.", 60, 1.1),
    ("Write one sentence about the sea.", 48, 1.0),
    ("Give me a short recipe for pancakes.", 160, 1.1),
    ("Explain in two sentences why the sky is blue.", 90, 1.1),
    ("What is 2 + 2?", 24, 1.0),
    ("Write a short story about a robot that learns to paint.", 200, 1.1),
    ("How many days are in a week?", 24, 1.0),
    ("List five things to check before a long bicycle tour.", 140, 1.1),
    (NOTICE, 64, 1.0),
    ("Write a polite e-mail that asks a supplier when an order of bearings will arrive.", 160, 1.1),
    ("Say hello.", 40, 1.0),
)
PIPED_WIDTH = 110
"""Columns where the output is no terminal and so has no width of its own."""
SCRAPED = ("requests_total", "generated_tokens_total", "prompt_tokens_total", "steps_total", "mqtt_messages_total")


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt, with times as the device saw them."""

    prompt: str
    result: Result
    first_token_s: float
    total_s: float


def demo(
    model: options.ModelPath = None,
    rows: options.Rows = 8,
    precision: options.PrecisionName = "auto",
    backend: options.BackendName = "auto",
    threads: options.Threads = None,
) -> None:
    """Serve a model on an embedded broker and send it a dozen chat prompts over MQTT, all at once."""
    options.use_threads(threads)
    run_loop(_demo(lambda: options.open_model(model, precision), rows, options.chosen_backend(backend)))


async def _demo(load: Callable[[], LanguageModel], rows: int, backend: str | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    settings = WorkerSettings(broker=None, metrics=("127.0.0.1", 0), engine=EngineSettings(rows=rows, backend=backend))
    async with run_worker(load, settings) as worker:
        kind = worker.embedded.kind if worker.embedded is not None else "a broker"
        console.print(
            f"{worker.model.name} in {worker.model.precision} on {rows} rows; {kind} on port {worker.broker.port}; "
            f"{len(PROMPTS)} prompts over MQTT at once"
        )
        started = time.perf_counter()
        with Lanes(console, [Lane(_name(i), prompt, budget) for i, (prompt, budget, _) in enumerate(PROMPTS)]) as lanes:
            async with Client(worker.broker.host, worker.broker.port, name="demo") as client:
                answers = await asyncio.gather(*(_ask(client, lanes, index) for index in range(len(PROMPTS))))
        wall_s = time.perf_counter() - started
        console.print(answers_table(answers))
        _print_totals(console, answers, wall_s, worker)
        console.print(f"\nfrom {worker.exporter.url}/metrics")
        for line in await asyncio.to_thread(_scrape, f"{worker.exporter.url}/metrics"):
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    failed = [answer.result.id for answer in answers if answer.result.status != "completed"]
    if failed:
        raise EngineFailed(f"jobs did not complete: {', '.join(failed)}")


def _name(index: int) -> str:
    return f"job-{index + 1:02d}"


async def _ask(client: Client, lanes: Lanes, index: int) -> Answer:
    prompt, budget, penalty = PROMPTS[index]
    sent = time.perf_counter()
    job = await client.submit(
        id=_name(index),
        messages=(Message(role="user", content=prompt),),
        max_tokens=budget,
        sampling=SamplingParams(repetition_penalty=penalty),
    )
    first_token_s = await _follow(job, lanes, index, sent)
    result = await job.result()
    lanes.finish(index, result.stop_reason, result.usage.generated_tokens)
    return Answer(prompt, result, first_token_s, time.perf_counter() - sent)


async def _follow(job: RemoteJob, lanes: Lanes, index: int, sent: float) -> float:
    """Fill the job's lane as chunks come; returns the seconds to the first of them."""
    first_token_s = 0.0
    async for chunk in job:
        first_token_s = first_token_s or time.perf_counter() - sent
        lanes.add(index, chunk.text, len(chunk.token_ids))
    return first_token_s


def answers_table(answers: list[Answer]) -> Table:
    """One line a prompt."""
    table = Table(title="answers", show_lines=True, expand=True)
    table.add_column("prompt", ratio=2)
    table.add_column("answer", ratio=5)
    table.add_column("stop", no_wrap=True)
    for heading in ("tokens", "first token", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for answer in answers:
        usage, timings = answer.result.usage, answer.result.timings
        rate = (usage.generated_tokens - 1) / timings.decode_s if timings.decode_s else 0.0
        table.add_row(
            Text(_shortened(answer.prompt, 80)),  # as it is: a model may write what rich would read as markup
            Text(_shortened(" ".join(answer.result.text.split()), 280)),
            answer.result.stop_reason,
            f"{usage.prompt_tokens} + {usage.generated_tokens}",
            f"{answer.first_token_s:.2f} s",
            f"{rate:.1f}",
        )
    return table


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _print_totals(console: Console, answers: list[Answer], wall_s: float, worker: Worker) -> None:
    generated = sum(answer.result.usage.generated_tokens for answer in answers)
    prompts = sum(answer.result.usage.prompt_tokens for answer in answers)
    statistics = worker.scheduler.statistics()
    rows = statistics.row_steps / max(statistics.steps, 1)
    console.print(
        f"{len(answers)} jobs, {prompts} prompt tokens and {generated} generated tokens in {wall_s:.1f} s: "
        f"{generated / wall_s:.0f} tokens/s with {rows:.1f} rows live on average"
    )


def _scrape(url: str) -> list[str]:
    """The page's lines of the counters that a newcomer wants to see, those that are not zero."""
    with urllib.request.urlopen(url, timeout=5) as response:
        page = response.read().decode()
    wanted = tuple(f"drumline_{name}" for name in SCRAPED)
    return [line for line in page.splitlines() if line.startswith(wanted) and not line.endswith(" 0.0")]
