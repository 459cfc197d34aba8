"""Rows and step tokens against latency, with a tiny model: the settings that are named are those that ran."""

from pathlib import Path

import pytest

from benchmarks import rows
from benchmarks.draw import draw_rows
from drumline.scheduler.request import Request
from tests.tiny import tiny_model


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROWS", (1, 4))
    monkeypatch.setattr(rows, "STEP_TOKENS", (32,))


@pytest.mark.usefixtures("few")
def test_every_setting_runs_once_a_round(tmp_path: Path):
    requests = [Request(prompt_ids=(1, 2, number), max_tokens=6, ignore_eos=True) for number in range(4)]
    runs = rows.run_rounds(tiny_model(window=32), requests, rounds=2)
    assert {sweep: {value: len(taken) for value, taken in found.items()} for sweep, found in runs.items()} == {
        "rows": {"1": 2, "4": 2},
        "step_tokens": {"32": 2},
    }
    alone, together = (found[0] for found in runs["rows"].values())
    assert (alone["rows_live_mean"], together["rows_live_mean"]) == (1, 4)
    assert {run["output_tokens"] for found in runs["rows"].values() for run in found} == {24}
    picture = draw_rows({"runs": runs, "settings": {"requests": 4}}, tmp_path / "rows.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_has_medians():
    def report(tokens_per_s: float) -> rows.Report:
        times = {"p50": 0.02, "p99": 0.3}
        return {"output_tokens_per_s": tokens_per_s, "inter_token_s": times, "ttft_s": {"p50": 1.25, "p99": 3.0}}

    last = rows.table("rows", {"8": [report(100), report(300), report(140)]}).splitlines()[-1]
    assert last == "| 8 | 140 | 20 ms | 300 ms | 1.2 s | 3.0 s |"
