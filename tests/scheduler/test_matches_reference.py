"""The scheduler against the oracle: whatever runs beside a row, its logits and ids are those of the uncached loop.

A conductor row holds every step still until the script has done what it wants at that boundary: submit, cancel,
preempt. It slides, so that each script has a sliding row beside ordinary ones, and it is judged like the others.
"""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline import Request, Result, SamplingParams, Scheduler
from drumline.model.language_model import LanguageModel
from drumline.scheduler.job import GenerationJob
from tests.drive import Capture, Gate
from tests.oracle import Ties, assert_matches_reference
from tests.tiny import FAMILIES, tiny_model

WINDOW = 24


@dataclass
class Part:
    """One request of a script, and at which steps it joins, gives way, and is called off."""

    prompt_ids: tuple[int, ...]
    fields: dict
    joins: int
    preempted: tuple[int, ...] = ()
    cancelled: int | None = None
    capture: Capture = field(default_factory=Capture)
    job: GenerationJob | None = None

    @property
    def sampling(self) -> SamplingParams:
        return self.fields["sampling"]

    @property
    def penalised(self) -> bool:
        return self.sampling.repetition_penalty != 1.0

    def request(self, *processors) -> Request:
        return Request(prompt_ids=self.prompt_ids, logprobs=2, processors=(self.capture, *processors), **self.fields)


@st.composite
def parts(draw: st.DrawFn) -> Part:
    overflow = draw(st.sampled_from(["stop", "stop", "stop", "slide"]))
    length = draw(st.integers(1, WINDOW if overflow == "stop" else WINDOW + 10))
    salt = draw(st.integers(0, 200))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7])),
        top_k=draw(st.sampled_from([0, 20])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        seed=draw(st.integers(0, 2**64 - 1)),
    )
    fields = {
        "sampling": sampling,
        "overflow": overflow,
        "max_tokens": draw(st.integers(1, WINDOW + 6)),
        "ignore_eos": draw(st.booleans()),
    }
    return Part(
        prompt_ids=tuple(3 + (salt + 29 * place * place) % 256 for place in range(length)),
        fields=fields,
        joins=draw(st.integers(0, 20)),
        preempted=draw(st.sampled_from([(), (), (3,), (2, 3, 9)])),
        cancelled=draw(st.sampled_from([None, None, None, 0, 5])),
    )


async def perform(model: LanguageModel, script: list[Part], rows: int, step_tokens: int) -> list[Result]:
    """Run the script; the conductor is its first part."""
    async with Scheduler(model, rows=rows, step_tokens=step_tokens) as scheduler:
        gate, conductor = Gate(), script[0]
        conductor.job = await scheduler.submit(conductor.request(gate))
        step = 0
        while any(part.job is None or part.job.state != "done" for part in script[1:]):
            await gate.arrived()
            for part in script[1:]:
                if part.joins == step:
                    part.job = await scheduler.submit(part.request())
                elif part.job is not None and part.cancelled is not None and step == part.joins + part.cancelled:
                    part.job.cancel()
                elif part.job is not None and step - part.joins in part.preempted:
                    scheduler.preempt(part.job)
            step += 1
            gate.step()
        conductor.job.cancel()
        gate.open()
        results = [await part.job.result() for part in script]
        scheduler.check_integrity()
    return results


def judge(model: LanguageModel, part: Part, result: Result) -> Ties:
    (choice,) = result.choices
    ids = choice.token_ids
    assert len(part.capture.logits) == len(ids)
    assert_reason(model, part, result)
    return assert_matches_reference(
        model,
        part.prompt_ids,
        ids,
        None if part.penalised else part.capture.logits,
        logprobs=choice.logprobs,
        sampling=part.sampling,
        ignore_eos=part.fields["ignore_eos"],
    )


def assert_reason(model: LanguageModel, part: Part, result: Result) -> None:
    """The stop reason that the ids themselves imply."""
    ids, (eos_id,) = result.token_ids, model.tokenizer.eos_ids
    if not part.fields["ignore_eos"]:
        assert eos_id not in ids[:-1]
    if result.stop_reason == "cancelled":
        assert part.cancelled is not None or part.joins < 0
    elif not part.fields["ignore_eos"] and ids[-1] == eos_id:
        assert result.stop_reason == "eos"
    elif len(ids) == part.fields["max_tokens"]:
        assert result.stop_reason == "budget"
    else:
        assert result.stop_reason == "window"
        assert part.fields["overflow"] == "stop"
        assert len(ids) == WINDOW - len(part.prompt_ids) + 1


def assert_scripts_match(family: str, examples: int, record_property) -> None:
    model = tiny_model(family, window=WINDOW)
    total, scripts = Ties(), 0

    @settings(deadline=None, max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(
        others=st.lists(parts(), min_size=1, max_size=8),
        rows=st.integers(2, 5),
        step_tokens=st.integers(16, 48),
        conductor=st.integers(1, WINDOW),
    )
    def check(others: list[Part], rows: int, step_tokens: int, conductor: int) -> None:
        nonlocal scripts
        fields = {"sampling": SamplingParams(), "overflow": "slide", "max_tokens": 10_000, "ignore_eos": True}
        script = [Part(tuple(range(9, 9 + conductor)), fields, joins=-1), *others]
        results = asyncio.run(perform(model, script, rows, step_tokens))
        scripts += 1
        for part, result in zip(script, results, strict=True):
            ties = judge(model, part, result)
            total.steps += ties.steps
            total.differing += ties.differing
            total.largest_difference = max(total.largest_difference, ties.largest_difference)

    check()
    record_property("steps", total.steps)
    record_property("ties", total.count)
    record_property("largest_difference", total.largest_difference)
    print(
        f"{family}: {scripts} scripts, {total.steps} steps, {total.count} ids differ where the judge is undecided, "
        f"largest logit difference {total.largest_difference:.2g}"
    )
    assert scripts >= examples
    assert total.steps > 100
    assert total.count <= total.steps // 100


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", FAMILIES)
def test_batched_cached_chunked_rows_equal_the_oracle(family: str, record_property):
    assert_scripts_match(family, 8, record_property)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", FAMILIES)
def test_many_more_scripts_equal_the_oracle(family: str, record_property):
    assert_scripts_match(family, 400, record_property)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["llama", "course"])
async def test_every_prompt_length_up_to_the_window(family: str):
    model = tiny_model(family, window=WINDOW)
    fields = {"sampling": SamplingParams(), "overflow": "stop", "max_tokens": WINDOW, "ignore_eos": True}
    script = [Part(tuple(range(20, 20 + length)), fields, joins=0) for length in range(1, WINDOW + 1)]
    async with Scheduler(model, rows=7, step_tokens=30) as scheduler:
        jobs = [await scheduler.submit(part.request()) for part in script]
        results = [await job.result() for job in jobs]
        scheduler.check_integrity()
    for part, result in zip(script, results, strict=True):
        assert result.stop_reason == ("budget" if len(part.prompt_ids) == 1 else "window")
        judge(model, part, result)
