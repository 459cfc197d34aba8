import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from drumline import EngineFailed, Request, Result, SamplingParams, load_model
from drumline.scheduler.cli import verify
from drumline.scheduler.cli.comparison import Condition, added, compare, mixed, run_alone, run_together
from drumline.scheduler.config import EngineSettings
from drumline.scheduler.policy import Policy
from tests.drive import generate
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

KEYS = {"jobs", "ids_differ", "bits_differ", "max_logprob_difference", "resumes", "reused_tokens"}
CONDITION = {"rows", "step_tokens", "preempt_every", "draft_tokens", "reuse", "shuffle"}
LINES = [
    {"prompt": "a", "max_tokens": 9},
    {"prompt": "bcd", "max_tokens": 12, "sampling": {"temperature": 1.0, "seed": 4}},
    {"prompt_ids": [7] * 40, "max_tokens": 10, "n": 2},
]
FLOAT32_NOISE = 1e-4


@pytest.fixture
async def results() -> list[Result]:
    requests = [Request(prompt=text, max_tokens=6, ignore_eos=True, logprobs=0) for text in ("a", "bc", "def")]
    return await generate(tiny_model(), *requests)


def altered(result: Result, **changes: object) -> Result:
    return replace(result, choices=(replace(result.choices[0], **changes),))


def nudged(result: Result, index: int, to: float) -> Result:
    logprobs = list(result.choices[0].logprobs)
    logprobs[index] = replace(logprobs[index], logprob=to)
    return altered(result, logprobs=tuple(logprobs))


def test_equal_results(results):
    assert compare(results, results) == {
        "jobs": 3,
        "ids_differ": 0,
        "bits_differ": 0,
        "max_logprob_difference": 0.0,
        "resumes": 0,
        "reused_tokens": 0,
    }


def test_one_bit_is_enough(results):
    before = results[1].choices[0].logprobs[2].logprob
    after = float(np.nextafter(np.float32(before), np.float32(0)))
    report = compare(results, [results[0], nudged(results[1], 2, after), results[2]])
    assert report == {
        "jobs": 3,
        "ids_differ": 0,
        "bits_differ": 1,
        "max_logprob_difference": after - before,
        "resumes": 0,
        "reused_tokens": 0,
    }
    assert report["max_logprob_difference"] > 0


async def test_the_bits_of_alternatives_count_too(results):
    (one,) = await generate(tiny_model(), Request(prompt="a", max_tokens=4, ignore_eos=True, logprobs=2))
    entry = one.choices[0].logprobs[1]
    other = replace(entry, top=(entry.top[0], (entry.top[1][0], entry.top[1][1] - 0.5)))
    changed = altered(one, logprobs=(one.choices[0].logprobs[0], other, *one.choices[0].logprobs[2:]))
    report = compare([one], [changed])
    assert (report["ids_differ"], report["bits_differ"], report["max_logprob_difference"]) == (0, 1, 0.0)


def test_other_ids_count_once_and_what_follows_them_is_not_compared(results):
    ids = list(results[0].token_ids)
    ids[3] ^= 1
    changed = altered(nudged(nudged(results[0], 1, -2.5), 4, -99.0), token_ids=tuple(ids))
    report = compare(results, [changed, *results[1:]])
    assert (report["jobs"], report["ids_differ"], report["bits_differ"]) == (3, 1, 1)
    assert report["max_logprob_difference"] == abs(results[0].choices[0].logprobs[1].logprob + 2.5)


def test_a_shorter_answer_differs(results):
    choice = results[2].choices[0]
    shorter = altered(results[2], token_ids=choice.token_ids[:-1], logprobs=choice.logprobs[:-1])
    report = compare(results, [*results[:2], shorter])
    assert (report["ids_differ"], report["bits_differ"], report["max_logprob_difference"]) == (1, 1, 0.0)


async def test_every_choice_counts(results):
    (both,) = await generate(tiny_model(), Request(prompt="a", max_tokens=4, n=2, ignore_eos=True, logprobs=0))
    first, second = both.choices
    other = replace(both, choices=(first, replace(second, token_ids=(*second.token_ids[:-1], 0))))
    assert compare([both], [other])["ids_differ"] == 1
    parted = replace(
        other, choices=(replace(first, token_ids=(0, *first.token_ids[1:])), nudged(both, 0, -1.5).choices[0])
    )
    assert compare([both], [parted])["max_logprob_difference"] == abs(second.logprobs[0].logprob + 1.5)


def test_a_failed_job_cannot_be_compared(results):
    with pytest.raises(EngineFailed, match="nonsense"):
        compare(results, [altered(results[0], stop_reason="error", error="nonsense"), *results[1:]])


@pytest.mark.parametrize("preempt_every", [0, 3])
@pytest.mark.parametrize("sampling", ["greedy", "chat"])
def test_report_and_exit_code_agree(cli, checkpoint: Path, workload, sampling, preempt_every):
    options = ("--rows", 4, "--sampling", sampling, "--preempt-every", preempt_every, "--json")
    run = cli("verify", workload(LINES), "--model", checkpoint, *options)
    report = json.loads(run.out)
    assert report.keys() == KEYS
    assert (report["jobs"], report["ids_differ"], run.err) == (3, 0, "")
    assert (report["resumes"] > 0) == (preempt_every > 0)
    assert report["max_logprob_difference"] <= FLOAT32_NOISE
    assert (report["max_logprob_difference"] > 0) <= (report["bits_differ"] > 0)
    assert run.code == (1 if report["bits_differ"] else 0)


@pytest.mark.parametrize(
    "options",
    [
        ("--rows", "2,4", "--step-tokens", "16,64,1024"),
        ("--rows", "2", "--rows", "4", "--step-tokens", "16", "--step-tokens", "64,1024"),
    ],
)
def test_each_number_of_rows_with_each_budget(cli, checkpoint: Path, workload, options):
    run = cli("verify", workload(LINES), "--model", checkpoint, *options, "--preempt-every", 5, "--json")
    report = json.loads(run.out)
    conditions = report.pop("conditions")
    assert report == added(conditions)
    assert (report["jobs"], report["ids_differ"], run.err) == (18, 0, "")
    tried = [(entry["rows"], entry["step_tokens"], entry["preempt_every"], entry["jobs"]) for entry in conditions]
    assert tried == [(rows, tokens, 5, 3) for rows in (2, 4) for tokens in (16, 64, 1024)]
    assert all(entry.keys() == KEYS | CONDITION for entry in conditions)


def test_company_is_drawn_from_a_seed():
    requests = [Request(prompt="a", max_tokens=1, id=f"job-{place}") for place in range(40)]
    arrivals, policy = mixed(requests, 3)
    assert mixed(requests, 3)[0] == arrivals
    assert sorted(place for place, _ in arrivals) == list(range(40))
    assert [place for place, _ in arrivals] != list(range(40))
    assert all(request.id == f"job-{place}" for place, request in arrivals)
    assert {request.priority for _, request in arrivals} == {"low", "normal", "high"}
    assert len({request.tenant for _, request in arrivals}) == 4
    assert len({type(mixed(requests, seed)[1]) for seed in range(20)}) == 3
    assert mixed(requests, None) == (list(enumerate(requests)), None)
    assert isinstance(policy, Policy)


def test_shuffled_conditions_change_nothing(cli, checkpoint: Path, workload):
    options = ("--rows", "1,2", "--reuse", "off", "--shuffle", 5, "--preempt-every", 2, "--json")
    lines = [line for line in LINES if "n" not in line]
    run = cli("verify", workload(lines), "--model", checkpoint, *options)
    report = json.loads(run.out)
    assert [entry["shuffle"] for entry in report["conditions"]] == [5, 6]
    assert (report["jobs"], report["ids_differ"], report["reused_tokens"]) == (4, 0, 0)
    assert report["resumes"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rows", "2,x"), "--rows: must be whole numbers"),
        (("--rows", ""), "--rows: must be whole numbers"),
        (("--step-tokens", "16,"), "--step-tokens: must be whole numbers"),
        (("--rows", "2,0"), "rows: "),
        (("--step-tokens", "16,15"), "step_tokens: "),
        (("--rows", "4,1"), "--rows: 1 cannot hold the 2 choices of line-3"),
    ],
)
def test_a_condition_out_of_range_is_refused_before_anything_runs(cli, checkpoint: Path, workload, options, message):
    run = cli("verify", workload(LINES), "--model", checkpoint, *options)
    assert (run.code, run.out) == (2, "")
    assert run.err.startswith(f"drumline: {message}")


@pytest.mark.parametrize("rows", ["4", "4,2"])
def test_exit_1_where_an_answer_differs(cli, checkpoint: Path, workload, monkeypatch, rows):
    """Real runs, of which one is altered."""
    altered_yet = False

    async def and_alter(*arguments: object) -> list[Result]:
        nonlocal altered_yet
        together = await run_together(*arguments)
        if not altered_yet:
            altered_yet, together[0] = True, altered(together[0], token_ids=(0,) * 9)
        return together

    monkeypatch.setattr(verify, "run_together", and_alter)
    run = cli("verify", workload(LINES), "--model", checkpoint, "--rows", rows)
    assert (run.code, run.err) == (1, "")
    assert run.out.splitlines()[-1].startswith(f"{3 * len(rows.split(','))} jobs: 1 with other ids, ")


async def test_preempting_makes_rows_start_again(checkpoint: Path):
    sampling = SamplingParams(temperature=1.0, seed=1)
    request = Request(prompt="abc", max_tokens=10, ignore_eos=True, logprobs=0, sampling=sampling)
    model = load_model(checkpoint)
    alone = await run_alone(model, [request], "torch", lambda: None)
    together = await run_together(model, [request], Condition(EngineSettings(2, 256, "torch"), 3), lambda: None)
    starts = [[step.input_length for step in run[0].steps if step.cache_before == 0] for run in (alone, together)]
    assert starts[0] == [3]
    assert len(starts[1]) > 2
    assert starts[1] == sorted(starts[1])
    assert compare(alone, together)["resumes"] == len(starts[1]) - 1
    assert alone[0].token_ids == together[0].token_ids
