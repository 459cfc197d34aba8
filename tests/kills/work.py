"""Mixed jobs, and what the engine answers when nothing disturbs it."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drumline import Request, Scheduler, load_model
from drumline.scheduler.mqtt.codec import SubmitMessage
from drumline.scheduler.request import Result
from tests.checkpoints import llama, random_model, save
from tests.kills.checker import Answer, JobKey, Verdict, check
from tests.kills.device import Device

WINDOW = 512
FAR_S = 86_400.0
TOGETHER = 256
PROMPTS = ("drum", "the sun warms a small stone by the river", "a", "one two three four five six seven eight nine ten")
# What a byte-level random model says soon enough to stop at.
STOPS = ["e", "t", "Q", "~~"]


def checkpoint(folder: Path) -> Path:
    """A tiny model with a window in which a job takes many steps."""
    return save(folder / "tiny", random_model(llama(max_position_embeddings=WINDOW)))


def body(dice: random.Random, tokens: range) -> dict[str, Any]:
    """A job of a random kind, its length from `tokens`; about one in ten has no seed of its own."""
    sampling: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": dice.randrange(2**64)}
    job: dict[str, Any] = {"prompt": dice.choice(PROMPTS), "max_tokens": dice.choice(tokens), "ignore_eos": True}
    kind = dice.randrange(10)
    if kind == 0:
        return job
    if kind == 1:
        return job | {"logprobs": 2}
    if kind == 2:
        return job | {"n": 2, "sampling": sampling}
    if kind == 3:
        return job | {"n": 2, "sampling": sampling | {"repetition_penalty": 1.1}, "logprobs": 1}
    if kind == 4:
        return job | {"sampling": sampling, "stop": dice.sample(STOPS, 2), "min_tokens": job["max_tokens"] // 2}
    if kind == 5:
        lengths = {"regex": f"[a-z ]{{{job['max_tokens'] // 2}}}"}
        return job | {"sampling": sampling, "structured": lengths, "ignore_eos": False}
    if kind == 6:
        return job | {"sampling": sampling, "logprobs": 0, "deadline_s": FAR_S}
    if kind == 7:
        del sampling["seed"]
        return job | {"sampling": sampling, "logprobs": 3}
    if kind == 8:
        return job | {"sampling": sampling, "priority": "high", "deadline_s": FAR_S}
    return job | {"sampling": sampling, "priority": "low", "logprobs": 5, "prompt_logprobs": 1}


_known: dict[tuple[Path, str], tuple[Answer, ...]] = {}


async def undisturbed(model: Path, bodies: dict[JobKey, dict[str, Any]]) -> dict[JobKey, tuple[Answer, ...]]:
    """What an engine answers that nobody kills, without MQTT and without a journal; the bodies have their seeds.

    Each is computed once: the tests of single faults send the same jobs.
    """
    asked = {key: (model, json.dumps(body)) for key, body in bodies.items()}
    new = [known for known in dict.fromkeys(asked.values()) if known not in _known]
    async with Scheduler(load_model(model, precision="int8"), rows=8) as scheduler:
        for start in range(0, len(new), TOGETHER):
            together = new[start : start + TOGETHER]
            jobs = [await scheduler.submit(_request(body)) for _, body in together]
            for known, job in zip(together, jobs, strict=True):
                _known[known] = _answers(await job.result())
    return {key: _known[known] for key, known in asked.items()}


def _request(body: str) -> Request:
    return SubmitMessage.from_json(body).request("undisturbed")


def _answers(result: Result) -> tuple[Answer, ...]:
    return tuple(
        Answer(
            choice.token_ids,
            choice.text,
            choice.stop_reason,
            None
            if choice.logprobs is None
            else tuple((entry.id, entry.logprob, entry.top) for entry in choice.logprobs),
        )
        for choice in result.choices
    )


def seeded(devices: Iterable[Device]) -> dict[JobKey, dict[str, Any]]:
    """The bodies of the accepted jobs, each with the seed that it was given, or that its result says it drew."""
    bodies = {}
    for device in devices:
        seeds: dict[str, int] = {}
        for heard in device.heard:
            for choice in json.loads(heard.payload).get("choices", ()):
                seeds.setdefault(heard.job[1], choice["seed"])
        for sent in device.jobs.values():
            if sent.accepted.is_set():
                sampling = {"seed": seeds.get(sent.id, 0)} | sent.body.get("sampling", {})
                bodies[device.name, sent.id] = sent.body | {"sampling": sampling}
    return bodies


async def judged(model: Path, *devices: Device) -> Verdict:
    """All that these devices heard, compared with undisturbed answers."""
    bodies = seeded(devices)
    return check(bodies, [heard for each in devices for heard in each.heard], await undisturbed(model, bodies))


async def flawless(model: Path, *devices: Device) -> Verdict:
    """The same; raises `AssertionError` for a fault."""
    verdict = await judged(model, *devices)
    assert verdict.faults == {"lost": [], "doubled": [], "changed": []}
    return verdict
