import json
from pathlib import Path

import pytest

SMALL = ("--rows", 3, "--context", 40, "--steps", 8, "--precision", "float32")


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch):
    """The bandwidth is not looked at here."""
    monkeypatch.setattr("drumline.scheduler.cli.profile.BANDWIDTH_BYTES", 2**20)


def test_the_parts_add_up_to_the_step(cli, checkpoint: Path):
    run = cli("profile", "--model", checkpoint, *SMALL, "--json")
    assert (run.code, run.err) == (0, "")
    report = json.loads(run.out)
    assert list(report["parts_s"]) == ["forward", "sampling", "python", "waiting"]
    assert sum(report["parts_s"].values()) == pytest.approx(report["step_s"])
    assert min(report["parts_s"].values()) >= 0
    assert report["steps"] >= 8
    outside = 1 - (report["parts_s"]["forward"] + report["parts_s"]["sampling"]) / report["step_s"]
    assert report["outside_model_ratio"] == pytest.approx(outside)


def test_the_limits_follow_from_the_shapes(cli, checkpoint: Path):
    """tests/checkpoints.py's llama: 2 layers, width 32, 4 and 2 heads of 8, ffn 48, vocabulary 264, head untied."""
    report = json.loads(cli("profile", "--model", checkpoint, *SMALL, "--json").out)
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48
    linear = 2 * layer + 32 * 264
    assert report["multiply_adds"] == 3 * linear
    norms, kv = 5 * 32, 3 * 36 * 2 * 2 * 2 * 8
    assert report["read_bytes"] == 4 * (linear + norms + kv)
    assert report["memory_limit_s"] == pytest.approx(report["read_bytes"] / report["bytes_per_s"])


def test_the_tables_name_the_parts(cli, checkpoint: Path):
    run = cli("profile", "--model", checkpoint, *SMALL)
    assert (run.code, run.err) == (0, "")
    words = ("forward", "sampling", "python", "waiting", "outside the model", "memory:")
    assert [word for word in words if word not in run.out] == []


@pytest.mark.parametrize(("option", "value"), [("--context", 8), ("--context", 2_040), ("--steps", 0)])
def test_settings_that_do_not_fit(cli, checkpoint: Path, option: str, value: int):
    run = cli("profile", "--model", checkpoint, *SMALL, option, value)
    assert run.code == 2
    assert run.err.startswith(f"drumline: {option}: must be")
