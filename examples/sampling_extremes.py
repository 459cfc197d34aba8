"""What the sampling options do at their extremes, on the packaged SmolLM2: the same prompt, three ways, side by side.

    python examples/sampling_extremes.py [--model PATH] [--tokens N]

Greedy decoding without a repetition penalty (1.0 changes nothing) falls into a loop; temperature 2.0 runs wild, for
unlikely words come up nearly as often as likely ones; a sane setting does neither. All three run in one batch.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from drumline import Request, Result, SamplingParams, Scheduler, load_model
from drumline.model.registry import packaged_model

PROMPT = "I like to play the drum and"
SETTINGS = {
    "loops: repetition_penalty 1.0, temperature 0": SamplingParams(repetition_penalty=1.0),
    "runs wild: temperature 2.0": SamplingParams(temperature=2.0, seed=7),
    "sane: temperature 0.7, top_p 0.9, repetition_penalty 1.2": SamplingParams(
        temperature=0.7, top_p=0.9, repetition_penalty=1.2, seed=7
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Show a looping, a wild and a sane sampling setting.")
    parser.add_argument("--model", type=Path, default=packaged_model(), help="a GGUF file or a checkpoint folder")
    parser.add_argument("--tokens", type=int, default=80, help="tokens to generate for each setting")
    arguments = parser.parse_args()
    if arguments.model is None:
        sys.exit("the packaged model is not installed: name one with --model PATH")
    for name, result in asyncio.run(generate(arguments.model, arguments.tokens)).items():
        print(f"\n[{name}]  {repeated_share(result):.0%} of its word triples have occurred before")
        print(f"{PROMPT} |{result.text}")


async def generate(model_path: Path, tokens: int) -> dict[str, Result]:
    """One request for each setting, all in one batch."""
    async with Scheduler(load_model(model_path), rows=len(SETTINGS)) as scheduler:
        jobs = {
            name: await scheduler.submit(Request(prompt=PROMPT, max_tokens=tokens, ignore_eos=True, sampling=sampling))
            for name, sampling in SETTINGS.items()
        }
        return {name: await job.result() for name, job in jobs.items()}


def repeated_share(result: Result) -> float:
    """The part of all triples of successive words that were already there earlier in the text: 0 … 1."""
    words = result.text.split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(triples)) / len(triples) if triples else 0.0


if __name__ == "__main__":
    main()
