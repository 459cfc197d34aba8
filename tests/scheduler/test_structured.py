"""Structured output: answers that parse and validate, grammars that end them, and grammars that are refused."""

import asyncio
import json
import re
import threading
from collections import Counter

import jsonschema
import pytest

from drumline import InvalidRequest, Request, SamplingParams, Scheduler
from drumline.model.grammar import Grammars, JsonSchema, Lark, Regex
from drumline.model.language_model import LanguageModel
from drumline.scheduler.admission import Admission
from tests.compositions import answer
from tests.drive import generate
from tests.structured import PROMPTS, SCHEMAS, asking_for
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PERSON = JsonSchema(json_schema=SCHEMAS["person"])
DRAWN = SamplingParams(temperature=1.0, seed=3)


def asking(structured: object, **fields: object) -> Request:
    return Request(**{"prompt": "x", "max_tokens": 120, "structured": structured, "sampling": DRAWN, **fields})


async def one(request: Request, **settings: object) -> object:
    (result,) = await generate(tiny_model(window=256, precision="int8"), request, **settings)
    return result


class TestAnswers:
    """Of a random model, whose every token would be nonsense without the grammar."""

    @pytest.mark.parametrize("seed", range(5))
    async def test_json(self, seed: int):
        result = await one(asking(PERSON, sampling=SamplingParams(temperature=1.0, seed=seed)))
        assert result.stop_reason in ("stop", "eos")
        jsonschema.validate(json.loads(result.text), PERSON.json_schema)

    async def test_regex_and_lark(self):
        result = await one(asking(Regex(regex="(ja|nein), [0-9]{3}")))
        assert re.fullmatch("(ja|nein), [0-9]{3}", result.text)
        assert result.stop_reason == "stop"  # nothing can follow: no EOS was needed
        result = await one(asking(Lark(lark='start: "a" rest\nrest: "b" | "c" rest')))
        assert re.fullmatch("ac*b", result.text)

    async def test_an_end_that_the_model_chooses(self):
        """Where more could follow, EOS ends the answer, and only where the grammar allows it."""
        result = await one(asking(Regex(regex="(ab)+"), sampling=SamplingParams(logit_bias={1: 100.0})))
        assert (result.text, result.stop_reason) == ("ab", "eos")

    async def test_a_budget_cuts(self):
        result = await one(asking(Regex(regex="[a-z]{50}"), max_tokens=7))
        assert re.fullmatch("[a-z]{7}", result.text)
        assert result.stop_reason == "budget"

    async def test_other_limits_still_count(self):
        banned = SamplingParams(banned_ids=[3 + ord("a")], temperature=1.0, seed=1)
        result = await one(asking(Regex(regex="[ab]{9}"), sampling=banned))
        assert result.text == "b" * 9
        result = await one(asking(Regex(regex="a{9}"), sampling=banned))
        assert (result.stop_reason, result.error) == ("error", "every token is masked")

    async def test_log_probabilities_are_of_the_raw_logits(self):
        free = await one(asking(None, logprobs=3, max_tokens=1))
        bound = await one(asking(Regex(regex="[0-9]"), logprobs=3, max_tokens=1))
        assert free.choices[0].logprobs[0].top == bound.choices[0].logprobs[0].top

    async def test_neighbours_and_interruptions_change_nothing(self):
        model = tiny_model(window=256, precision="int8")
        requests = [
            asking(PERSON, n=2),
            asking(None, max_tokens=20),
            asking(Regex(regex="[a-f]{20}")),
            asking(PERSON, logprobs=1),
        ]
        alone = [(await generate(model, request, rows=2, draft_tokens=0))[0] for request in requests]
        async with Scheduler(model, rows=5, step_tokens=16) as scheduler:
            jobs = [await scheduler.submit(request) for request in requests]
            for job in jobs:
                async for _ in job:
                    scheduler.preempt(jobs[0])
            results = [await job.result() for job in jobs]
        assert list(map(answer, results)) == list(map(answer, alone))
        assert results[0].usage.resumes > 0

    @pytest.mark.parametrize("name", SCHEMAS)
    async def test_the_real_model(self, smollm2_int8: LanguageModel, name: str):
        requests = [asking_for(name, prompt, seed) for seed, prompt in enumerate(PROMPTS[:4])]
        for result in await generate(smollm2_int8, *requests, rows=4):
            assert result.stop_reason in ("stop", "eos")
            jsonschema.validate(json.loads(result.text), SCHEMAS[name])


class TestCompiling:
    async def test_a_form_that_is_asked_for_again_is_compiled_once(self, monkeypatch: pytest.MonkeyPatch):
        compiled = []
        compile_ = Grammars._compile
        monkeypatch.setattr(
            Grammars, "_compile", lambda self, source: compiled.append(source) or compile_(self, source)
        )
        async with Scheduler(tiny_model(window=256), rows=4) as scheduler:
            jobs = [await scheduler.submit(asking(Regex(regex="[ab]{3}"))) for _ in range(4)]
            texts = [(await job.result()).text for job in jobs]
        assert len(compiled) == 1
        assert len(set(texts)) == 1  # none of them moved the others' state

    async def test_one_tenant_compiles_one_at_a_time(self, monkeypatch: pytest.MonkeyPatch):
        running: Counter[str] = Counter()
        most: Counter[str] = Counter()
        finished: list[str] = []
        hold = threading.Event()
        admit = Admission.admit

        def slow(self: Admission, request: Request) -> object:
            running[request.tenant] += 1
            most[request.tenant] = max(most[request.tenant], running[request.tenant])
            if request.tenant == "many":
                hold.wait(20)
            running[request.tenant] -= 1
            finished.append(request.tenant)
            return admit(self, request)

        monkeypatch.setattr(Admission, "admit", slow)
        async with Scheduler(tiny_model(window=256), rows=1) as scheduler:
            many = [asyncio.ensure_future(scheduler.submit(asking(Regex(regex="a"), tenant="many"))) for _ in range(40)]
            await asyncio.sleep(0)
            await scheduler.submit(asking(Regex(regex="a"), tenant="few"))
            assert finished == ["few"]
            hold.set()
            await asyncio.gather(*many)
        assert most == {"many": 1, "few": 1}


class TestRefusals:
    @pytest.mark.parametrize(
        ("structured", "limit"),
        [
            (Regex(regex="(ab"), "is not a grammar"),
            (Regex(regex="(?=a)b"), "is not a grammar"),
            (Lark(lark="begin: \"a\""), "is not a grammar"),
            (Lark(lark="start: nothing"), "is not a grammar"),
            (JsonSchema(json_schema={"type": "integer", "minimum": 5, "maximum": 3}), "is not a grammar"),
            (JsonSchema(json_schema={"type": "string", "minLength": 5, "maxLength": 2}), "is not a grammar"),
            (JsonSchema(json_schema={"type": "colour"}), "is not a grammar"),
            (JsonSchema(json_schema={"enum": {1, 2}}), "is no JSON"),
            (JsonSchema(json_schema={"$ref": "#"}), "."),
            (Regex(regex=r"[^\s\S]"), "."),
            (Lark(lark="start: start"), "."),
            (JsonSchema(json_schema={"type": "object", "required": ["a"], "properties": {"a": False}}), "."),
        ],
    )  # fmt: skip
    async def test_an_impossible_grammar(self, structured: object, limit: str):
        async with Scheduler(tiny_model(), rows=1) as scheduler:
            with pytest.raises(InvalidRequest, match=limit) as caught:
                await scheduler.submit(asking(structured))
            assert caught.value.field.startswith("structured")
            assert "\n" not in caught.value.limit
            result = await (await scheduler.submit(asking(None, max_tokens=2, ignore_eos=True))).result()
            assert result.stop_reason == "budget"

    async def test_grammars_that_the_compiler_cannot_stand(self):
        """The longest that is taken: a chain of rules, each of which the compiler enters from the one before."""
        rules = 750
        chain = "start:a0\n" + "\n".join(f"a{i}:a{i + 1}" for i in range(rules)) + f'\na{rules}:"y"'
        assert 7_200 < len(chain) <= 8_192
        result = await one(asking(Lark(lark=chain)))
        assert (result.text, result.stop_reason) == ("y", "stop")

    @pytest.mark.parametrize(
        "body",
        [
            {"json_object": False},
            {},
            {"regex": ""},
            {"regex": 5},
            {"json_schema": "{}"},
            {"json_schema": {}, "regex": "a"},
            "json",
            {"lark": "x" * 9_000},
            {"regx": "a"},
        ],
    )
    def test_degenerate_constraints(self, body: object):
        with pytest.raises(InvalidRequest) as caught:
            Request.from_json(json.dumps({"prompt": "x", "structured": body}))
        assert caught.value.field.startswith("structured")

    def test_json_spells_the_same(self):
        request = Request.from_json('{"prompt": "x", "structured": {"regex": "[0-9]+"}}')
        assert request.structured == Regex(regex="[0-9]+")
        request = Request.from_json(json.dumps({"prompt": "x", "structured": {"json_schema": {"type": "object"}}}))
        assert request.structured == JsonSchema(json_schema={"type": "object"})
