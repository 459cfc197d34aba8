import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.measures import Measure
from benchmarks.peers.base import About, Timing, Work
from benchmarks.results import Results, spread

MEASURE = Measure("m", "a measure", (Work((1,), 2),), 4)


def open_results(path: Path, **settings: object) -> Results:
    return Results(path, {"model": "x", **settings}, {"cpu": "c", "cores": 2, "features": []})


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_a_spread_holds_the_median_and_the_ends(values: list[float]):
    found = spread(values)
    assert (found.low, found.high, found.runs) == (min(values), max(values), len(values))
    assert sum(value <= found.median for value in values) * 2 >= len(values)
    assert sum(value >= found.median for value in values) * 2 >= len(values)


def test_every_run_is_on_disk_at_once_and_found_again(tmp_path: Path):
    path = tmp_path / "deep" / "r.json"
    results = open_results(path)
    results.met("drumline", About({"drumline": "1"}, "float32"), 3.5)
    results.add("drumline", MEASURE, Timing(30, 10, 2.0))
    results.add("drumline", MEASURE, Timing(30, 10, 1.0))
    results.started("cold", 9.0)
    again = open_results(path)
    assert again.data == json.loads(path.read_text()) == results.data
    rate = again.rate("drumline", "m")
    assert rate is not None
    assert (rate.median, rate.low, rate.high, rate.runs) == (22.5, 15.0, 30.0, 2)
    assert again.starts("cold") == [9.0]
    assert again.starts("warm") == []
    assert again.engine("drumline")["ready_s"] == 3.5
    assert again.rate("vllm", "m") is None


def test_an_engine_that_works_again_has_no_error(tmp_path: Path):
    results = open_results(tmp_path / "r.json")
    results.engine("vllm")["error"] = "no"
    results.met("vllm", About({}, ""), 1.0)
    assert "error" not in results.engine("vllm")


def test_figures_of_other_settings_are_not_mixed(tmp_path: Path):
    open_results(tmp_path / "r.json").save()
    with pytest.raises(ValueError, match="other settings"):
        open_results(tmp_path / "r.json", precision="int8")
    fresh = Results(tmp_path / "r.json", {"model": "y"}, {}, fresh=True)
    assert fresh.data["settings"] == {"model": "y"}
