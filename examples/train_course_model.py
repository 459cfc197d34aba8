"""Train the course model on a small text, save it, and serve it with a prompt longer than its window.

    python examples/train_course_model.py [--folder DIR] [--steps N] [--seconds S]

About a minute on two CPU cores. The window is 32 tokens and slides: once it is full, each further token recomputes the
last 32 from position zero, as learned absolute positions demand.
"""

import argparse
import asyncio
import time
from pathlib import Path

import torch

from drumline import Request, Result, SamplingParams, Scheduler, load_model
from drumline.model.reference import compare
from drumline.model.transformer_lm import CourseConfig, TransformerLM, save_checkpoint
from drumline.model.word_tokenizer import WordTokenizer

TEXT = Path(__file__).with_name("course_text.txt")
BLOCK_SIZE = 32
BATCH = 16
LONG_PROMPT = (
    "The drummer wakes early. She opens the window and listens to the rain. The rain keeps time on the roof, and she "
    "taps the same time on the table. The old boat sleeps by the river. In the spring"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, save and serve the course model.")
    parser.add_argument("--folder", type=Path, default=Path("course-model"), help="where the checkpoint goes")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop training after so long")
    arguments = parser.parse_args()

    text = TEXT.read_text("utf-8")
    vocabulary = WordTokenizer.from_text(text)
    model = train(text, vocabulary, arguments.steps, arguments.seconds)
    save_checkpoint(arguments.folder, model, vocabulary)
    print(f"saved to {arguments.folder}")
    asyncio.run(serve(arguments.folder))


def train(text: str, vocabulary: WordTokenizer, steps: int, seconds: float) -> TransformerLM:
    """Next-token training on random windows of the stories, each of which stands between BOS and EOS."""
    torch.manual_seed(0)
    stories = [vocabulary.encode(line) for line in text.splitlines()]
    stream = torch.tensor([token for story in stories for token in (vocabulary.bos_id, *story, *vocabulary.eos_ids)])
    windows = stream.unfold(0, BLOCK_SIZE + 1, 1)
    model = TransformerLM(
        CourseConfig(vocabulary.vocab_size, 64, layers=2, heads=4, block_size=BLOCK_SIZE, dropout=0.1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        batch = windows[torch.randint(len(windows), (BATCH,))]
        loss = model(batch[:, :-1], targets=batch[:, 1:])["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        elapsed = time.perf_counter() - started
        if step in (1, steps) or step % 100 == 0 or elapsed > seconds:
            print(f"step {step}: loss {loss.item():.3f} ({elapsed:.1f} s)")
        if elapsed > seconds:
            break
    return model.eval()


async def serve(folder: Path) -> None:
    """Two requests at once on the saved model: one whose text ends by itself, one that slides from the start."""
    model = load_model(folder)
    sampling = SamplingParams(temperature=0.5, seed=3)
    requests = {
        "short": Request(prompt="The baker likes the cat.", max_tokens=64, sampling=sampling),
        "long": Request(prompt=LONG_PROMPT, max_tokens=24, ignore_eos=True, sampling=sampling),
    }
    async with Scheduler(model, rows=2) as scheduler:
        jobs = {name: await scheduler.submit(request) for name, request in requests.items()}
        results = {name: await job.result() for name, job in jobs.items()}
    for name, request in requests.items():
        report(name, request, results[name], model.window)
    prompt_ids = model.encode_prompt(LONG_PROMPT)
    difference = compare(model, prompt_ids, results["long"].token_ids)
    print(f"\ncached against uncached, the long request again: largest logit difference {difference:.1e}")


def report(name: str, request: Request, result: Result, window: int) -> None:
    """What the course asks of a report: lengths, the step that filled the window, recomputes, positions, times."""
    usage, timings = result.usage, result.timings
    print(f"\n[{name}] {request.prompt} |{result.text}")
    print(f"  stop reason: {result.stop_reason}")
    print(f"  prompt: {usage.prompt_tokens} tokens, window {window}; generated: {usage.generated_tokens}")
    print(f"  window full at generated token: {usage.window_filled_step}; recomputes: {usage.window_recomputes}")
    print(f"  positions evaluated: {usage.evaluated_positions}, uncached: {usage.uncached_positions}")
    print(f"  prefill {timings.prefill_s * 1e3:.1f} ms, decode {timings.decode_s * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
