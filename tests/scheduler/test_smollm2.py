"""The real model, in float32, through the public API."""

import asyncio

import pytest

from drumline import Request, SamplingParams, Scheduler
from drumline.model.language_model import LanguageModel
from drumline.scheduler.request import Message
from tests.drive import Capture, generate
from tests.oracle import Ties, assert_matches_reference

pytestmark = pytest.mark.usefixtures("one_thread")  # two threads crawl while another process computes

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small town by the sea, there lived an old clockmaker who",
    "1, 1, 2, 3, 5, 8,",
]


async def test_greedy_says_paris(smollm2: LanguageModel):
    question = Message(role="user", content="What is the capital of France?")
    (result,) = await generate(smollm2, Request(messages=[question], max_tokens=24))
    assert result.text == "The capital of France is Paris."
    assert result.stop_reason == "eos"
    assert result.token_ids[-1] == 2


async def test_rows_chunks_and_preemption_equal_the_oracle(smollm2: LanguageModel, record_property):
    """Four requests in three rows, prompts in chunks of at most 16, one of them preempted on its way."""
    sampling = [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9, seed=5)]
    captures = [Capture() for _ in PROMPTS]
    prompts = [tuple(smollm2.tokenizer.encode(prompt)) for prompt in PROMPTS]
    prompts[2] *= 3  # 57 tokens: four chunks
    requests = [
        Request(
            prompt_ids=ids,
            max_tokens=12,
            ignore_eos=True,
            logprobs=3,
            sampling=sampling[i % 2],
            processors=[captures[i]],
        )
        for i, ids in enumerate(prompts)
    ]
    async with Scheduler(smollm2, rows=3, step_tokens=16) as scheduler:
        jobs = [await scheduler.submit(request) for request in requests]
        watched, seen = jobs[0], 0
        async for _ in watched:
            seen += 1
            if seen == 3:
                scheduler.preempt(watched)
        results = await asyncio.gather(*(job.result() for job in jobs))
        preempted = scheduler.registry.get_sample_value("drumline_preemptions_total", {"scheduler": "main"})
        scheduler.check_integrity()
    assert preempted == 1
    assert max(step.input_length for result in results for step in result.steps) == 16

    total = Ties()
    for ids, request, capture, result in zip(prompts, requests, captures, results, strict=True):
        assert (result.stop_reason, len(result.token_ids)) == ("budget", 12)
        ties = assert_matches_reference(
            smollm2,
            ids,
            result.token_ids,
            capture.logits,
            logprobs=result.choices[0].logprobs,
            sampling=request.sampling,
            ignore_eos=True,
        )
        total.steps += ties.steps
        total.differing += ties.differing
        total.largest_difference = max(total.largest_difference, ties.largest_difference)
    print(f"{total.steps} steps, {total.count} ties, largest logit difference {total.largest_difference:.2g}")
    record_property("ties", total.count)
    record_property("largest_difference", total.largest_difference)

    lone_request = requests[0].model_copy(update={"processors": ()})
    (lone,) = await generate(smollm2, lone_request, rows=1)
    lone_ties = assert_matches_reference(smollm2, prompts[0], lone.token_ids, ignore_eos=True)
    if total.count + lone_ties.count == 0:
        assert lone.token_ids == results[0].token_ids
        assert lone.text == results[0].text
