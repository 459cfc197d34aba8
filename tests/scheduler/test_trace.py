"""The timeline of a scheduler, judged by the format's own rules."""

import json
from pathlib import Path

import pytest

from drumline import InvalidRequest, QueueFull, Scheduler
from drumline.model.language_model import LanguageModel
from drumline.scheduler.trace_file import MAX_BYTES
from tests.drive import asking, held, sampled
from tests.scheduler.trace_format import TraceChecked
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


async def test_each_way_to_end_is_one_terminal_event(path: Path):
    now = 0.0
    async with Scheduler(tiny_model(window=64), rows=2, queue_requests=4, clock=lambda: now) as scheduler:
        scheduler.trace.start(path)
        gate, running = await held(scheduler, id="running")
        jobs = [
            await scheduler.submit(asking(tokens=3, id="done")),
            await scheduler.submit(asking(id="twice", n=2, tokens=2)),
            await scheduler.submit(asking(id="late", deadline_s=5.0)),
        ]
        with pytest.raises(QueueFull):
            scheduler.submit_nowait(asking(id="refused"))
        running.cancel()
        now = 6.0
        gate.open()
        results = [await job.result() for job in (running, *jobs)]
        nothing = await (await scheduler.submit(asking(id="nothing", tokens=0))).result()
        summary = scheduler.trace.stop()
    trace = TraceChecked(path)
    assert summary is not None
    assert (summary.path, summary.events, summary.complete) == (path, len(trace.events), True)
    assert summary.size_bytes == path.stat().st_size
    assert trace.terminal() == {result.id: 1 for result in (*results, nothing)}
    told = {event["args"]["job"]: event for event in trace.events if event.get("cat") == "terminal"}
    assert {job: event["name"] for job, event in told.items()} == {
        "running": "cancelled",
        "done": "completed",
        "twice": "completed",
        "late": "expired",
        "nothing": "completed",
    }
    assert told["twice"]["args"]["generated_tokens"] == 4
    assert [event["args"] for event in trace.named("i", "rejected: queue_full")] == [{"job": "refused"}]
    assert len(trace.named("b", "queued")) == 4  # of those that got a row: `late` and `nothing` never did


async def test_a_row_shows_its_request_chunk_by_chunk(path: Path):
    model = tiny_model(window=128)
    prompt = tuple(range(3, 53))
    async with Scheduler(model, rows=1, step_tokens=16) as scheduler:
        scheduler.trace.start(path)
        job = await scheduler.submit(asking(prompt=None, prompt_ids=prompt, tokens=5, id="job", tenant="press"))
        result = await job.result()
        scheduler.trace.stop()
    trace = TraceChecked(path)
    whole, *parts = trace.slices("row 0")
    assert whole["name"] == "job"
    assert whole["args"]["tenant"] == "press"
    assert (whole["args"]["prompt_tokens"], whole["args"]["generated_tokens"]) == (50, 5)
    assert whole["args"]["ended"] == "budget"
    assert [(part["name"], part["args"]["fed"]) for part in parts] == [
        *(("prefill", record.input_length) for record in result.steps if record.cache_after <= 50),
        *(("decode", 1) for _ in range(4)),
    ]
    assert len([part for part in parts if part["name"] == "prefill"]) >= 4
    assert [event["tid"] for event in trace.named("i", "budget")] == [whole["tid"]]
    phases = [event["name"] for event in trace.slices("step phases")]
    assert phases == ["plan", "forward", "sample", "commit"] * len(result.steps)
    fed = [event["args"]["tokens"] for event in trace.named("C", "tokens fed")]
    assert fed == [record.input_length for record in result.steps]


async def test_a_row_that_is_taken_away_waits_again(path: Path):
    async with Scheduler(tiny_model(window=64), rows=1) as scheduler:
        scheduler.trace.start(path)
        gate, job = await held(scheduler)
        scheduler.preempt(job)
        gate.open()
        await job.result()
        scheduler.trace.stop()
    trace = TraceChecked(path)
    assert [event["args"]["ended"] for event in trace.slices("row 0") if "ended" in event["args"]] == [
        "preempted",
        "budget",
    ]
    assert len(trace.named("i", "preempted")) == 1
    assert len(trace.named("b", "queued")) == 2
    assert list(trace.terminal().values()) == [1]


async def test_rows_of_an_engine_that_starts_anew(path: Path):
    async with Scheduler(tiny_model(window=64), rows=1, restarts=1) as scheduler:
        run, failures = scheduler._runner.run, [RuntimeError("the step broke")]

        def breaking(*arguments: object) -> object:
            if failures:
                raise failures.pop()
            return run(*arguments)

        scheduler._runner.run = breaking
        scheduler.trace.start(path)
        await (await scheduler.submit(asking())).result()
        scheduler.trace.stop()
    trace = TraceChecked(path)
    assert len(trace.named("i", "restart")) == 1
    assert list(trace.terminal().values()) == [1]


async def test_it_may_begin_and_end_while_requests_run(path: Path):
    async with Scheduler(tiny_model(window=64), rows=2) as scheduler:
        gate, early = await held(scheduler, id="early")
        scheduler.trace.start(path)
        late = await scheduler.submit(asking(tokens=50, id="late"))
        gate.open()
        await early.result()
        scheduler.trace.stop()
        await late.result()
    trace = TraceChecked(path)
    assert trace.terminal() == {"early": 1}
    whole = [event["args"]["ended"] for event in trace.events if "ended" in event.get("args", {})]
    assert whole == ["still running"]
    assert "early" in {event["args"]["job"] for event in trace.named("X", "decode")}


async def test_a_file_that_is_full_ends_the_recording_and_nothing_else(path: Path):
    async with Scheduler(tiny_model(window=64), rows=1) as scheduler:
        scheduler.trace.start(path, max_bytes=4096)
        result = await (await scheduler.submit(asking(tokens=50))).result()
        assert not scheduler.trace.recording
        summary = scheduler.trace.stop()
        scheduler.trace.start(path)
        assert scheduler.trace.recording
        scheduler.trace.stop()
    assert result.usage.generated_tokens == 50
    assert summary is not None
    assert not summary.complete
    assert summary.size_bytes <= 4096 + len("\n]\n")


async def test_what_a_kill_leaves_lacks_the_last_bracket_alone(path: Path):
    async with Scheduler(tiny_model(window=64), rows=1) as scheduler:
        scheduler.trace.start(path)
        await (await scheduler.submit(asking())).result()
        scheduler.trace.stop()
    whole = path.read_text()
    lines = whole.splitlines()
    assert json.loads("\n".join(lines[:-1]) + "]") == json.loads(whole)
    assert json.loads("\n".join(lines[: len(lines) // 2]).removesuffix(",") + "]")


async def test_bad_starts_are_refused(path: Path, tmp_path: Path):
    async with Scheduler(tiny_model(), rows=1) as scheduler:
        assert scheduler.trace.stop() is None
        with pytest.raises(InvalidRequest, match="max_bytes: must be at least 4096, not 10"):
            scheduler.trace.start(path, max_bytes=10)
        with pytest.raises(FileNotFoundError):
            scheduler.trace.start(tmp_path / "no" / "folder.json")
        scheduler.trace.start(path, MAX_BYTES)
        with pytest.raises(InvalidRequest, match=r"trace: is being recorded already, into .*trace\.json"):
            scheduler.trace.start(tmp_path / "other.json")
    TraceChecked(path)  # leaving the scheduler ends the recording


async def test_bits_do_not_depend_on_it(path: Path, smollm2_int8: LanguageModel):
    """And the file of a real model's requests is valid, too."""
    asked = [sampled(seed=number, prompt=f"Drum {number} " * (number + 1), tokens=12) for number in range(6)]
    answers = []
    for recorded in (False, True):
        async with Scheduler(smollm2_int8, rows=4, step_tokens=32) as scheduler:
            if recorded:
                scheduler.trace.start(path)
            jobs = [await scheduler.submit(request) for request in asked]
            answers.append([(await job.result()).choices[0].token_ids for job in jobs])
            summary = scheduler.trace.stop()
    assert answers[0] == answers[1]
    assert summary is not None
    trace = TraceChecked(path)
    assert sorted(trace.terminal().values()) == [1] * 6
    assert {name for name in trace.tracks().values() if name.startswith("row ")} == {f"row {row}" for row in range(4)}
