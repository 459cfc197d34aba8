"""`drumline generate`: answers without a broker, one prompt to the terminal or a JSONL file to another."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from drumline.model.errors import DrumlineError, InvalidRequest
from drumline.model.language_model import LanguageModel
from drumline.model.sampling_params import SamplingParams
from drumline.scheduler.cli import options
from drumline.scheduler.cli.loop import run_loop
from drumline.scheduler.cli.workload import make_scheduler, read_workload
from drumline.scheduler.config import DRAFT_TOKENS, EngineSettings
from drumline.scheduler.mqtt.codec import rejected_message, result_message
from drumline.scheduler.request import Message, Request
from drumline.scheduler.scheduler import Scheduler

PROMPT_OPTIONS = ("raw", "max_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
"""What a line of a file says for itself."""


def generate(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="Sent as a chat message where the model has a template.")] = None,
    input: Annotated[Path | None, typer.Option(help="JSON lines of requests, instead of a prompt.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where the answers go, one JSON line each.")] = None,
    model: options.ModelPath = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Budget of the answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Mass of the tokens kept.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="1.0: none.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Drawn, and shown, when absent.")] = None,
    rows: options.Rows = 16,
    step_tokens: options.StepTokens = 256,
    draft_tokens: options.DraftTokens = DRAFT_TOKENS,
    reuse: options.Reuse = "on",
    window: options.Window = None,
    precision: options.PrecisionName = "auto",
    backend: options.BackendName = "auto",
    threads: options.Threads = None,
) -> None:
    """Stream one answer to the terminal, or run a file of requests with a progress bar."""
    options.use_threads(threads)
    settings = EngineSettings(rows, step_tokens, options.chosen_backend(backend), draft_tokens, reuse == "on")
    if input is not None:
        if prompt is not None or output is None:
            raise InvalidRequest("--input", "goes with --output, and without a prompt")
        _refuse_prompt_options(context)
        if output.exists() and output.samefile(input):
            raise InvalidRequest("--output", "must not be the input")
        requests = read_workload(input)
        loaded = options.open_model(model, precision, window)
        failed = run_loop(_run_file(loaded, requests, output, settings))
        if failed:
            print(f"drumline: {failed} of {len(requests)} requests did not complete: see {output}", file=sys.stderr)
            raise typer.Exit(1)
        return
    if prompt is None or output is not None:
        raise InvalidRequest("PROMPT", "give a prompt, or --input and --output")
    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty, seed=seed
    )
    request = Request(prompt=prompt, max_tokens=max_tokens, sampling=sampling)
    loaded = options.open_model(model, precision, window)
    if loaded.chat_template is not None and not raw:
        messages = (Message(role="user", content=prompt),)
        request = request.model_copy(update={"prompt": None, "messages": messages})
    run_loop(_stream(loaded, request, settings))


def _refuse_prompt_options(context: typer.Context) -> None:
    for name in PROMPT_OPTIONS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InvalidRequest(f"--{name.replace('_', '-')}", "goes with a prompt; a line of --input has its own")


async def _stream(model: LanguageModel, request: Request, settings: EngineSettings) -> None:
    async with make_scheduler(model, [request], settings) as scheduler:
        job = await scheduler.submit(request)
        async for chunk in job:
            print(chunk.text, end="", flush=True)
        result = await job.result()
        print(flush=True)
    result.raise_for_status()
    rate = (result.usage.generated_tokens - 1) / result.timings.decode_s if result.timings.decode_s else 0.0
    print(
        f"[{result.stop_reason}: {result.usage.prompt_tokens} + {result.usage.generated_tokens} tokens, "
        f"first after {result.timings.first_token_s or 0:.2f} s, {rate:.1f} tokens/s, seed {result.seed}]",
        file=sys.stderr,
    )


async def _run_file(model: LanguageModel, requests: Sequence[Request], output: Path, settings: EngineSettings) -> int:
    """Answers in the order of the input; returns how many requests were refused or failed."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    async with make_scheduler(model, requests, settings) as scheduler:
        with output.open("w", encoding="utf-8") as lines, options.progress(*columns) as progress:
            task = progress.add_task("requests", total=len(requests))
            answers = [asyncio.create_task(_answer(scheduler, request)) for request in requests]
            for answer in answers:
                answer.add_done_callback(lambda _: progress.advance(task))
            return sum([_write(lines, await answer) for answer in answers])


async def _answer(scheduler: Scheduler, request: Request) -> dict[str, object]:
    """The terminal message of a request, in the words of the MQTT contract; a refusal does not stop the others."""
    try:
        job = await scheduler.submit(request)
    except DrumlineError as error:
        message = rejected_message(str(request.id), error)
    else:
        message = result_message(str(request.id), await job.result())
    document: dict[str, object] = json.loads(message.encode())
    return document


def _write(lines: TextIO, document: dict[str, object]) -> bool:
    lines.write(json.dumps({"id": document.pop("job_id"), **document}, ensure_ascii=False) + "\n")
    lines.flush()
    return document["status"] != "completed"
