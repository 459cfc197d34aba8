"""Many prompts, no broker: different lengths and different sampling, stepped together in four rows.

    python examples/offline_batch.py [--model PATH] [--rows N] [--max-tokens N]

With more prompts than rows, the next one takes a row as soon as one is free: nobody waits for the longest answer.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from drumline import DrumlineError, Request, Result, SamplingParams, Scheduler, load_model
from drumline.model.registry import packaged_model
from drumline.scheduler.engine import Statistics

GREEDY = SamplingParams()
CAREFUL = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=1)
LIVELY = SamplingParams(temperature=1.0, top_k=40, min_p=0.05, seed=2)
BATCH = (
    ("The sea", LIVELY, 1.0),
    ("The capital of France is", GREEDY, 0.25),
    ("A recipe for pancakes:\n1.", CAREFUL, 1.0),
    ("The days of the week are Monday, Tuesday,", GREEDY, 0.5),
    ("def add(a, b):\n    ", GREEDY, 0.5),
    ("Once upon a time", LIVELY, 0.75),
)
"""Prompt, sampling, and the share of `--max-tokens` that it may use."""


async def generate(model_path: Path, rows: int, max_tokens: int) -> tuple[list[Result], Statistics]:
    """All requests through one scheduler; results in the order of `BATCH`."""
    async with Scheduler(load_model(model_path), rows=rows) as scheduler:
        requests = [
            Request(prompt=prompt, sampling=sampling, max_tokens=max(1, int(share * max_tokens)))
            for prompt, sampling, share in BATCH
        ]
        jobs = [await scheduler.submit(request) for request in requests]
        results = [await job.result() for job in jobs]
        return results, scheduler.statistics()


def report(results: list[Result], statistics: Statistics) -> None:
    """Answers, then what the batch took."""
    for (prompt, _, _), result in zip(BATCH, results, strict=True):
        usage = result.usage
        print(f"[{result.stop_reason}: {usage.prompt_tokens} + {usage.generated_tokens} tokens] {prompt}|{result.text}")
    print(f"\njobs: {statistics.finished}")
    print(f"prompt tokens: {statistics.prompt_tokens}")
    print(f"generated tokens: {statistics.generated_tokens}")
    print(f"steps: {statistics.steps}")
    print(f"tokens/s: {statistics.generated_tokens / statistics.step_s:.1f}")
    print(f"rows live, mean: {statistics.row_steps / statistics.steps:.2f} of {statistics.rows}")
    print(f"padding: {1 - statistics.real_cells / statistics.padded_cells:.1%} of the attention computed")
    print(f"outside the model: {1 - (statistics.forward_s + statistics.sample_s) / statistics.step_s:.1%} of the time")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate for several prompts at once, without a broker.")
    parser.add_argument("--model", type=Path, default=packaged_model(), help="a GGUF file or a checkpoint folder")
    parser.add_argument("--rows", type=int, default=4, help="requests that are stepped together")
    parser.add_argument("--max-tokens", type=int, default=48, help="budget of the longest answers")
    arguments = parser.parse_args(given)
    if arguments.model is None:
        sys.exit("the packaged model is not installed: name one with --model PATH")
    started = time.perf_counter()
    try:
        results, statistics = asyncio.run(generate(arguments.model, arguments.rows, arguments.max_tokens))
    except DrumlineError as error:
        sys.exit(str(error))
    report(results, statistics)
    print(f"with loading: {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
