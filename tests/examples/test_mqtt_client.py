import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import CLI, ROOT, finish, read_until, run_python, running_python

PROGRAM = ROOT / "examples" / "mqtt_client.py"


@pytest.fixture(scope="module")
def broker(checkpoint: Path) -> Iterator[str]:
    """A worker on a tiny model, as a user starts it."""
    serve = ("serve", "--model", checkpoint, "--embedded-broker", "--metrics", "127.0.0.1:0", "--rows", "4")
    with running_python(*CLI, *serve) as process:
        yield read_until(process, r"mqtt://\S+")[0]
        process.terminate()
        code, _, errors = finish(process)
        assert code == 0, errors


@pytest.fixture
def device(import_example, broker: str, capsys: pytest.CaptureFixture[str]):
    """The program's exit code and output."""

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            import_example("mqtt_client").main(["--broker", broker, *arguments])
        return end.value.code, capsys.readouterr().out

    return run


def streamed(output: str, number: int) -> str:
    return "".join(ast.literal_eval(chunk) for chunk in re.findall(rf"^\[{number}\] > (.+)$", output, re.MULTILINE))


def reports(output: str) -> list[tuple[int, str, str, int, int, str]]:
    """Number, status, stop reason, prompt tokens, generated tokens, text."""
    pattern = r"^\[(\d)\] (\w+), (\w+): (\d+) \+ (\d+) tokens in [\d.]+ s: .+ -> (.+)$"
    return sorted(
        (int(number), status, reason, int(prompt), int(generated), ast.literal_eval(text))
        for number, status, reason, prompt, generated, text in re.findall(pattern, output, re.MULTILINE)
    )


def test_all_prompts_are_streamed_and_reported(broker: str):
    run = run_python(
        PROGRAM, "--broker", broker, "--name", "sensor-7", "--max-tokens", "8", "one", "two and more", "three"
    )
    assert run.returncode == 0, run.stderr
    found = reports(run.stdout)
    assert [(number, status, reason, prompt) for number, status, reason, prompt, _, _ in found] == [
        (1, "completed", "budget", 3),
        (2, "completed", "budget", 12),
        (3, "completed", "budget", 5),
    ]
    for number, *_, generated, text in found:
        assert generated == 8
        assert streamed(run.stdout, number) == text != ""


def test_the_first_job_is_cancelled_on_request(device):
    code, output = device("--max-tokens", "300", "--cancel-after", "3", "stop me", "let me")
    assert code == 0
    (_, first, reason, _, generated, text), (_, second, *_) = reports(output)
    assert (first, reason, second) == ("cancelled", "cancelled", "completed")
    assert 3 <= generated < 300
    assert streamed(output, 1) == text


def test_a_refused_job_leaves_the_others_alone(device):
    code, output = device("--max-tokens", "4", "x" * 3000, "fine")
    assert code == 1
    assert re.search(r"^\[1\] refused: prompt: has 3000 tokens, the window holds 2048", output, re.MULTILINE)
    assert [(number, status) for number, status, *_ in reports(output)] == [(2, "completed")]


def test_messages_need_a_template(device):
    assert device("--chat", "hello") == (1, "[1] refused: messages: the model tiny has no chat template\n")


def test_a_job_that_nobody_takes(device):
    assert device("--timeout", "0", "hello") == (1, "[1] nobody accepted it within 0 s\n")


def test_a_bad_address_is_one_line(import_example):
    with pytest.raises(SystemExit) as end:
        import_example("mqtt_client").main(["--broker", "http://x", "hello"])
    assert end.value.code == "broker: must read mqtt://host:port or mqtts://host:port"
