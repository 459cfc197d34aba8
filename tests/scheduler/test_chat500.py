"""The generated workload: always the same, valid, and as mixed as it says."""

import hashlib
import json
from pathlib import Path

from benchmarks import chat500
from drumline.scheduler.cli.workload import read_workload
from tests.processes import ROOT, run_python


def test_the_program_prints_what_the_command_line_reads(tmp_path: Path):
    run = run_python(str(ROOT / "benchmarks" / "chat500.py"), cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    path = tmp_path / "chat500.jsonl"
    path.write_text(run.stdout, encoding="utf-8")
    requests = read_workload(path)
    assert len({request.id for request in requests}) == 500
    assert [json.loads(line) for line in run.stdout.splitlines()] == chat500.requests()


def test_it_never_changes():
    text = json.dumps(chat500.requests(), sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "98c4c5832737e48a"


def test_it_is_mixed():
    requests = chat500.requests()
    assert len({len(request["messages"]) for request in requests}) >= 5
    assert 1 / 4 < sum("temperature" not in request["sampling"] for request in requests) / 500 < 1 / 2
    asked = {name for request in requests for name in (*request, *request["sampling"])}
    assert asked >= {"stop_ids", "logprobs", "min_tokens", "top_k", "top_p", "min_p", "banned_ids", "logit_bias"}
    assert asked >= {"repetition_penalty", "presence_penalty", "frequency_penalty"}
