import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.draw import draw_all
from benchmarks.measures import Measure
from benchmarks.open_loop import Served, judge
from benchmarks.peers.base import About, Timing, Work
from benchmarks.report import engine_lines, make_table
from benchmarks.results import Results
from tests.benchmarks.reading import shown

PNG = b"\x89PNG\r\n\x1a\n"
QUALITY = [
    {"precision": precision, "text": text, "divergence": 0.002, "perplexity": 14.0, "perplexity_change": 0.001}
    for precision in ("float32", "int8")
    for text in ("prose", "code")
]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Two engines, of which one failed halfway."""
    machine = {"cpu": "a CPU", "cores": 2, "features": ["avx2"]}
    found = Results(tmp_path / "r.json", {"model": "tiny", "workload": "w"}, machine)
    work = (Work((1, 2), 3),)
    measures = [Measure(f"greedy-{rows}", f"greedy {rows}", work, rows) for rows in (1, 16)]
    found.met("drumline", About({"drumline": "1"}, "int8"), 2.0)
    found.met("vllm", About({"vllm": "2"}, "float32"), 50.0)
    for measure in measures:
        for wall_s in (1.0, 2.0, 4.0):
            found.add("drumline", measure, Timing(40, 8, wall_s))
    found.add("vllm", measures[1], Timing(40, 8, 5.0))
    found.engine("vllm")["error"] = "it died"
    found.started("warm", 2.0)
    trials = [vars(judge(rate, [Served(first, (0.01, 0.02))], 1.0)) for rate, first in ((1.0, 0.3), (2.0, 1.5))]
    trials[1]["ttft_s"] = trials[1]["ttft_s"] | {"p99": None}  # a request had no first token when the trial ended
    found.data["open_loop"] = {"best_rate": 1.0, "limit_s": 1.0, "rows": 32, "trials": trials}
    return found


def test_all_plots_are_pictures(results: Results, tmp_path: Path):
    quality = tmp_path / "quality.json"
    quality.write_text(json.dumps(QUALITY))
    files = draw_all(results.data, quality, tmp_path / "plots")
    assert [file.name for file in files] == ["throughput.png", "open-loop.png", "quality.png"]
    assert all(file.read_bytes().startswith(PNG) for file in files)


def test_only_what_was_measured_is_drawn(tmp_path: Path):
    empty: dict[str, Any] = {"runs": {}, "open_loop": None}
    assert draw_all(empty, tmp_path / "none.json", tmp_path / "plots") == []


def test_the_table_has_medians_spreads_and_ratios(results: Results):
    text = shown(make_table(results))
    assert "20.0 (10.0–40.0, 3)" in text
    assert "8.0 (8.0–8.0, 1)  ours 2.50 ×" in text
    assert "2.0 s (2.0–2.0, 1)" in text
    assert "50.0 s" in text
    assert "1.00" in text


def test_engines_are_told_with_versions_and_errors(results: Results):
    assert engine_lines(results) == ["drumline: drumline 1; int8", "vllm: vllm 2; float32; it died"]
