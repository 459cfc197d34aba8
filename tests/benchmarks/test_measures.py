from pathlib import Path

import pytest

from benchmarks.measures import Measure, all_measures, warm_up
from benchmarks.peers.base import Timing, Work, read_work
from tests.processes import ROOT

MIXED64 = read_work(ROOT / "benchmarks" / "mixed64.jsonl")
MEASURES = {measure.name: measure for measure in all_measures(MIXED64)}


def test_mixed64_is_what_the_figures_are_stated_for():
    assert len(MIXED64) == 64
    assert sum(len(request.prompt_ids) for request in MIXED64) == 8_274
    assert sum(request.max_tokens for request in MIXED64) == 6_647


def test_the_measures_of_the_goals_are_all_there():
    greedy = {name: MEASURES[name] for name in ("greedy-16", "greedy-32", "chat-32")}
    assert [(measure.rows, measure.sampling) for measure in greedy.values()] == [
        (16, "greedy"),
        (32, "greedy"),
        (32, "chat"),
    ]
    assert all(measure.work == tuple(MIXED64) and measure.unit == "output" for measure in greedy.values())
    (alone,) = MEASURES["one-row"].work
    assert (len(alone.prompt_ids), alone.max_tokens, MEASURES["one-row"].unit) == (128, 64, "decode")
    four = MEASURES["prefill-4x128"].work
    assert [(len(request.prompt_ids), request.max_tokens) for request in four] == [(128, 1)] * 4
    assert len({request.prompt_ids for request in four}) == 4
    assert [request.prompt_ids for request in MEASURES["prefill-mixed"].work] == [r.prompt_ids for r in MIXED64]
    assert {measure.rows for measure in MEASURES.values() if measure.unit == "output"} == {1, 2, 4, 8, 16, 32}


def test_each_unit_counts_its_own_tokens():
    timing = Timing(output_tokens=60, prompt_tokens=90, wall_s=3.0, decode_tokens_per_s=25.0)
    rates = {unit: Measure("m", "m", (), 1, unit).rate(timing) for unit in ("output", "prompt", "decode")}
    assert rates == {"output": 20.0, "prompt": 30.0, "decode": 25.0}


def test_decoding_without_its_own_clock_counts_the_whole_time():
    assert Measure("m", "m", (), 1, "decode").rate(Timing(60, 90, 3.0)) == 20.0


def test_a_warm_up_is_short_and_as_wide():
    short = warm_up(MEASURES["greedy-16"])
    assert len(short) == 16
    assert all(len(request.prompt_ids) <= 16 and request.max_tokens == 2 for request in short)


@pytest.mark.parametrize("count", [1, 3])
def test_a_small_workload_will_do(count: int):
    small = all_measures([Work((4, 5, 6), 7)] * count)
    assert {measure.name for measure in small} == set(MEASURES)
    assert all(measure.work for measure in small)


def test_a_workload_file_is_read(tmp_path: Path):
    file = tmp_path / "work.jsonl"
    file.write_text('{"id": "a", "prompt_ids": [1, 2], "max_tokens": 3}\n\n{"prompt_ids": [4], "max_tokens": 5}\n')
    assert read_work(file) == [Work((1, 2), 3), Work((4,), 5)]
