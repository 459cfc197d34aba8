import json
from pathlib import Path

import pytest

FIGURES = {
    "output_tokens_per_s",
    "prompt_tokens_per_s",
    "wall_s",
    "ttft_s",
    "inter_token_s",
    "rows_live_mean",
    "padding_ratio",
    "outside_model_ratio",
}
COUNTS = {"jobs", "output_tokens", "prompt_tokens"}
LINES = [
    {"prompt": "a", "max_tokens": 9},
    {"prompt": "bcd", "max_tokens": 5, "sampling": {"temperature": 1.0, "seed": 4}},
    {"prompt_ids": [7] * 40, "max_tokens": 3},
    {"prompt": "e" * 20, "max_tokens": 7, "ignore_eos": False},
]


@pytest.mark.parametrize("sampling", ["greedy", "chat"])
def test_figures_as_json(cli, checkpoint: Path, workload, sampling):
    run = cli("bench", workload(LINES), "--model", checkpoint, "--rows", 2, "--sampling", sampling, "--json")
    assert (run.code, run.err) == (0, "")
    report = json.loads(run.out)
    assert report.keys() == FIGURES | COUNTS
    assert (report["jobs"], report["output_tokens"], report["prompt_tokens"]) == (4, 24, 64)
    assert report["output_tokens_per_s"] * report["wall_s"] == pytest.approx(24)
    assert report["prompt_tokens_per_s"] * report["wall_s"] == pytest.approx(64)
    for name in ("ttft_s", "inter_token_s"):
        assert list(report[name]) == ["p50", "p90", "p99"]
        assert 0 < report[name]["p50"] <= report[name]["p90"] <= report[name]["p99"] <= report["wall_s"]
    assert 1 < report["rows_live_mean"] <= 2
    assert report["padding_ratio"] == 0  # the exact backend's attention follows each row's own length
    assert 0 < report["outside_model_ratio"] < 1


def test_the_torch_backend_pads(cli, checkpoint: Path, workload):
    run = cli("bench", workload(LINES), "--model", checkpoint, "--rows", 2, "--backend", "torch", "--json")
    report = json.loads(run.out)
    assert report["output_tokens"] == 24
    assert 0 < report["padding_ratio"] < 1


def test_one_row_has_no_company(cli, checkpoint: Path, workload):
    run = cli("bench", workload(LINES), "--model", checkpoint, "--rows", 1, "--json")
    report = json.loads(run.out)
    assert (report["rows_live_mean"], report["output_tokens"]) == (1, 24)


def test_jobs_without_tokens_have_no_times(cli, checkpoint: Path, workload):
    report = json.loads(cli("bench", workload([{"prompt": "a", "max_tokens": 0}]), "--model", checkpoint, "--json").out)
    assert report["output_tokens"] == 0
    assert report["ttft_s"] == report["inter_token_s"] == {"p50": None, "p90": None, "p99": None}


def test_a_window_of_one_token_can_be_measured(cli, checkpoint: Path, workload):
    path = workload([{"prompt": "a", "max_tokens": 5}])
    report = json.loads(cli("bench", path, "--model", checkpoint, "--window", 1, "--json").out)
    assert report["output_tokens"] == 1


def test_the_table_names_every_figure(cli, checkpoint: Path, workload):
    run = cli("bench", workload(LINES), "--model", checkpoint)
    assert (run.code, run.err) == (0, "")
    assert [name for name in sorted(FIGURES | COUNTS) if name not in run.out] == []


def test_a_line_that_cannot_be_served_ends_the_measurement(cli, checkpoint: Path, workload):
    run = cli("bench", workload([*LINES, {"prompt": "x" * 99}]), "--model", checkpoint, "--window", 64)
    assert run.code == 2
    assert run.err.startswith("drumline: prompt: has 99 tokens, the window holds 64")
    assert run.err.count("\n") == 1
