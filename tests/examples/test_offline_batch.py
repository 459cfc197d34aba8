import re
from pathlib import Path

import pytest

from tests.processes import ROOT, run_python

pytestmark = pytest.mark.usefixtures("one_thread")

PROGRAM = ROOT / "examples" / "offline_batch.py"


@pytest.fixture
def batch(import_example, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: object) -> str:
        import_example("offline_batch").main([str(argument) for argument in arguments])
        return capsys.readouterr().out

    return run


def figures(output: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z][a-z/, ]+): (\S+)", output, re.MULTILINE))


def test_runs_more_prompts_than_rows(checkpoint: Path):
    run = run_python(PROGRAM, "--model", checkpoint, "--rows", "4", "--max-tokens", "16")
    assert (run.returncode, run.stderr) == (0, "")
    output = run.stdout
    answers = re.findall(r"^\[(\w+): (\d+) \+ (\d+) tokens\] ", output, re.MULTILINE)
    assert [int(prompt) for _, prompt, _ in answers] == [7, 24, 25, 41, 19, 16]  # one token a byte
    budgets = (16, 4, 16, 8, 8, 12)
    for (reason, _, generated), budget in zip(answers, budgets, strict=True):
        assert int(generated) == budget if reason == "budget" else reason == "eos"
    found = figures(output)
    assert (found["jobs"], found["prompt tokens"]) == ("6", "132")
    assert int(found["generated tokens"]) == sum(int(generated) for *_, generated in answers)
    assert 1 < float(found["rows live, mean"]) <= 4
    assert 0 <= float(found["padding"].rstrip("%")) < 100
    assert float(found["tokens/s"]) > 0


def test_the_same_answers_in_one_row(batch, checkpoint: Path):
    """Sampled with seeds, so alone or together makes no difference to what is said."""
    four, one = (batch("--model", checkpoint, "--max-tokens", 12, "--rows", rows) for rows in (4, 1))
    assert four.partition("\njobs:")[0] == one.partition("\njobs:")[0] != ""
    assert figures(one)["rows live, mean"] == "1.00"


def test_a_missing_model_is_one_line(import_example):
    with pytest.raises(SystemExit) as error:
        import_example("offline_batch").main(["--model", "/nowhere"])
    assert error.value.code == "/nowhere: no such file or folder"
