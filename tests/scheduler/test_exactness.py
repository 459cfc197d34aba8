"""The same request, the same bits: whatever runs beside it, however it is cut into steps, wherever it resumes."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from drumline import InvalidRequest, Request, SamplingParams, Scheduler
from drumline.model.language_model import LanguageModel
from drumline.scheduler.cli.comparison import Condition, compare, run_alone, run_together
from drumline.scheduler.config import EngineSettings
from tests.compositions import DRAFT_TOKENS, Arrival, alone, in_company, random_company, random_requests
from tests.drive import asking, generate, sampled
from tests.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny_int8(family: str = "llama", **settings: object) -> LanguageModel:
    return tiny_model(family, precision="int8", **settings)


class TestRandomCompany:
    @pytest.mark.parametrize("family", FAMILIES)
    async def test_tiny_models_of_every_family(self, family: str):
        """Prompts longer than the window and windows that slide are among them."""
        dice, model = random.Random(FAMILIES.index(family)), tiny_int8(family)
        requests = random_requests(dice, 30, model.config.vocab_size, prompt=range(1, 40), tokens=range(1, 16))
        strangers = random_requests(dice, 6, model.config.vocab_size, prompt=range(1, 40), tokens=range(6, 20))
        expected = await alone(model, requests)
        for rows, step_tokens in ((1, 16), (2, 17), (3, 256), (7, 16), (16, 33), (32, 1024)):
            company = random_company(dice, requests, strangers)
            settings = {"rows": rows, "step_tokens": step_tokens, "draft_tokens": dice.choice(DRAFT_TOKENS)}
            assert await in_company(model, company, requests, **settings) == expected, settings

    async def test_the_real_model(self, smollm2_int8: LanguageModel):
        dice = random.Random(7)
        vocab_size = smollm2_int8.config.vocab_size
        requests = random_requests(dice, 10, vocab_size, prompt=range(1, 65), tokens=range(2, 10))
        strangers = random_requests(dice, 3, vocab_size, prompt=range(1, 65), tokens=range(6, 20))
        expected = await alone(smollm2_int8, requests)
        for rows, step_tokens in ((7, 16), (16, 1024)):
            company = random_company(dice, requests, strangers)
            settings = {"rows": rows, "step_tokens": step_tokens, "draft_tokens": dice.choice(DRAFT_TOKENS)}
            assert await in_company(smollm2_int8, company, requests, **settings) == expected, settings

    async def test_threads_do_not_matter_either(self, one_thread, smollm2_int8: LanguageModel):
        requests = [asking(tokens=6, logprobs=2), sampled(3, prompt="one two three", tokens=6, logprobs=2)]
        expected = await alone(smollm2_int8, requests)
        torch.set_num_threads(2)  # the fixture puts it back
        assert await alone(smollm2_int8, requests) == expected


class TestSchedulersSideBySide:
    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    async def test_two_in_one_process(self, family: str):
        """Their steps run on threads of their own, at the same time."""
        dice, model = random.Random(1), tiny_int8(family)
        requests = random_requests(dice, 40, model.config.vocab_size, prompt=range(1, 30), tokens=range(4, 30))
        expected = await alone(model, requests)
        halves = requests[:20], requests[20:]
        companies = [[Arrival(request) for request in half] for half in halves]
        given = await asyncio.gather(
            in_company(model, companies[0], halves[0], rows=5, step_tokens=16),
            in_company(model, companies[1], halves[1], rows=16, step_tokens=64),
        )
        assert given[0] + given[1] == expected

    async def test_two_of_the_real_model(self, smollm2_int8: LanguageModel):
        requests = [sampled(seed, prompt="The drums", tokens=8, logprobs=1) for seed in range(6)]
        expected = await alone(smollm2_int8, requests)
        given = await asyncio.gather(
            *(
                in_company(smollm2_int8, [Arrival(request) for request in half], half, rows=2)
                for half in (requests[:3], requests[3:])
            )
        )
        assert given[0] + given[1] == expected


class TestThePromise:
    async def test_int8_takes_the_exact_backend(self):
        async with Scheduler(tiny_int8(), require_exact=True) as scheduler:
            await (await scheduler.submit(asking(tokens=2))).result()
            labels = {"scheduler": "main", "model": "tiny-llama", "precision": "int8", "backend": "cpu"}
            assert scheduler.registry.get_sample_value("drumline_model_info", labels) == 1

    @pytest.mark.parametrize(
        ("precision", "backend", "limit"),
        [
            ("int8", "torch", "precision int8 on the torch backend is not exact"),
            ("float32", "torch", "precision float32 on the torch backend is not exact"),
            ("float32", None, "precision float32 on the torch backend is not exact"),
        ],
    )
    async def test_who_cannot_keep_it_is_refused(self, precision: str, backend: str | None, limit: str):
        with pytest.raises(InvalidRequest) as caught:
            Scheduler(tiny_model(precision=precision), backend=backend, require_exact=True)
        assert (caught.value.field, caught.value.limit) == ("require_exact", limit)

    async def test_torch_computes_the_same_int8_model(self):
        """Up to rounding: it is the judge of the exact backend, with no promise of its own."""
        request = asking(tokens=6, logprobs=0)
        ((exact,), (judge,)) = [await generate(tiny_int8(), request, backend=backend) for backend in ("cpu", "torch")]
        assert exact.token_ids == judge.token_ids
        pairs = zip(exact.choices[0].logprobs, judge.choices[0].logprobs, strict=True)
        assert all(first.logprob == pytest.approx(second.logprob, abs=0.05) for first, second in pairs)


class TestTheMeasureCanFail:
    async def test_float32_has_other_bits_in_company(self, smollm2: LanguageModel):
        """Padded float attention rounds differently beside other rows; were it not seen, nothing would be."""
        sampling = [SamplingParams(), SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=1)]
        requests = [
            Request(prompt=text, max_tokens=8, ignore_eos=True, logprobs=0, sampling=sampling[place % 2])
            for place, text in enumerate(["The capital of France is", "def f(n):", "Once upon a time", "1, 2, 3,"])
        ]
        lone = await run_alone(smollm2, requests, "torch", lambda: None)
        together = await run_together(smollm2, requests, Condition(EngineSettings(4, 16, "torch")), lambda: None)
        report = compare(lone, together)
        assert report["bits_differ"] > 0
        assert 0 < report["max_logprob_difference"] < 1e-3


class TestTheFingerprint:
    async def test_it_is_of_all_that_bits_depend_on(self):
        """Schedulers that owe each other the same answers agree; another model, precision, store, backend does not."""
        model = tiny_model("llama", precision="int8")

        async def of(model: LanguageModel, **settings: object) -> str:
            async with Scheduler(model, **settings) as scheduler:
                return scheduler.fingerprint

        assert await of(model, rows=1) == await of(model, rows=3, step_tokens=32)
        others = [
            tiny_model("llama"),
            tiny_model("llama", seed=1, precision="int8"),
            replace(model, kv_dtype=torch.int8),
        ]
        prints = {await of(model), await of(model, backend="torch"), *[await of(other) for other in others]}
        assert len(prints) == 5
