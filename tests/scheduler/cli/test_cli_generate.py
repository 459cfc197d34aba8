import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

from drumline import Request, SamplingParams, load_model
from tests.drive import generate
from tests.processes import CLI, run_python

FOOTER = r"\[(\w+): (\d+) \+ (\d+) tokens, first after [\d.]+ s, [\d.]+ tokens/s, seed (\d+)\]\n"


def footer(err: str) -> tuple[str, int, int, int]:
    """Stop reason, prompt tokens, generated tokens, seed."""
    reason, *numbers = re.fullmatch(FOOTER, err).groups()
    return (reason, *map(int, numbers))


def answer(checkpoint: Path, **fields: object) -> str:
    """What the scheduler says."""
    (result,) = asyncio.run(generate(load_model(checkpoint), Request(**fields)))
    return result.text


def test_stdout_holds_the_answer_alone(cli, checkpoint: Path):
    """As a process of its own, and in this one."""
    arguments = ("generate", "--model", checkpoint, "--max-tokens", "6", "hello")
    process, run = run_python(*CLI, *arguments), cli(*arguments)
    assert (process.returncode, run.code) == (0, 0)
    assert process.stdout == run.out
    assert footer(process.stderr)[:3] == footer(run.err)[:3] == ("budget", 5, 6)
    assert run.out.endswith("\n")


def test_it_is_the_schedulers_answer(cli, checkpoint: Path):
    run = cli("generate", "--model", checkpoint, "--max-tokens", 6, "--temperature", 0.9, "--seed", 5, "hi")
    sampling = SamplingParams(temperature=0.9, seed=5)
    assert run.out == answer(checkpoint, prompt="hi", max_tokens=6, sampling=sampling) + "\n"
    assert footer(run.err)[-1] == 5


def test_a_seed_repeats_an_answer(cli, checkpoint: Path):
    arguments = ("generate", "--model", checkpoint, "--max-tokens", 12, "--temperature", 1.5, "hello")
    first = cli(*arguments)
    again = cli(*arguments, "--seed", footer(first.err)[-1])
    other = cli(*arguments, "--seed", footer(first.err)[-1] + 1)
    assert again.out == first.out != other.out


def test_a_prompt_becomes_a_message_where_there_is_a_template(cli, checkpoint: Path, tmp_path: Path):
    chatty = shutil.copytree(checkpoint, tmp_path / "chatty")
    (chatty / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    arguments = ("generate", "--model", chatty, "--max-tokens", 2, "hello")
    assert footer(cli(*arguments).err)[1] == len("[user] hello")
    assert footer(cli(*arguments, "--raw").err)[1] == len("hello")


def test_a_budget_of_zero_is_an_empty_answer(cli, checkpoint: Path):
    run = cli("generate", "--model", checkpoint, "--max-tokens", 0, "hello")
    assert (run.code, run.out, footer(run.err)[:3]) == (0, "\n", ("budget", 5, 0))


def test_a_file_of_requests(cli, checkpoint: Path, workload, tmp_path: Path):
    """One line is refused, the others are answered as if it were not there."""
    lines = [
        {"prompt": "short", "max_tokens": 3},
        {"id": "long", "prompt": "x" * 60, "max_tokens": 4},
        {"id": "chosen", "prompt_ids": [1, 2, 3], "max_tokens": 5, "n": 2, "sampling": {"temperature": 1, "seed": 3}},
        {"id": "chat", "messages": [{"role": "user", "content": "hi"}]},
    ]
    output = tmp_path / "answers.jsonl"
    files = ("--input", workload(lines), "--output", output)
    run = cli("generate", "--model", checkpoint, *files, "--rows", 2, "--window", 32)
    assert run == (1, "", f"drumline: 2 of 4 requests did not complete: see {output}\n")

    answers = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [(found["id"], found["status"]) for found in answers] == [
        ("line-1", "completed"),
        ("long", "rejected"),
        ("chosen", "completed"),
        ("chat", "rejected"),
    ]
    first, long, chosen, chat = answers
    assert first["text"] == answer(checkpoint, prompt="short", max_tokens=3)
    assert (first["stop_reason"], first["usage"]["generated_tokens"]) == ("budget", 3)
    message = "has 60 tokens, the window holds 32; overflow='slide' keeps the last of them"
    assert long["error"] == {"code": "invalid", "field": "prompt", "message": message}
    assert len(chosen["choices"]) == 2
    assert chosen["usage"]["generated_tokens"] == 10
    assert "no chat template" in chat["error"]["message"]


def test_a_file_whose_requests_all_complete_exits_0(cli, checkpoint: Path, workload, tmp_path: Path):
    files = ("--input", workload([{"prompt": "a", "max_tokens": 2}]), "--output", tmp_path / "out.jsonl")
    assert cli("generate", "--model", checkpoint, *files) == (0, "", "")


def test_a_folder_that_is_not_there(cli, checkpoint: Path, workload, tmp_path: Path):
    output = tmp_path / "nowhere" / "out.jsonl"
    run = cli("generate", "--model", checkpoint, "--input", workload([{"prompt": "a"}]), "--output", output)
    assert run == (2, "", f"drumline: {output}: No such file or directory\n")


def test_a_mistake_leaves_an_earlier_output_alone(cli, checkpoint: Path, workload, tmp_path: Path):
    output = tmp_path / "out.jsonl"
    output.write_text("precious")
    files = ("--input", workload([{"prompt": "a"}]), "--output", output)
    assert cli("generate", "--model", checkpoint, *files, "--rows", 0).code == 2
    assert output.read_text() == "precious"


@pytest.mark.parametrize("option", [("--temperature", 0.5), ("--max-tokens", 256), ("--raw",), ("--seed", 1)])
def test_options_of_a_prompt_are_no_options_of_a_file(cli, checkpoint: Path, workload, tmp_path: Path, option):
    """A line has its own; leaving the option out in silence would be another answer than was asked for."""
    files = ("--input", workload([{"prompt": "a"}]), "--output", tmp_path / "out.jsonl")
    run = cli("generate", "--model", checkpoint, *files, *option)
    assert run == (2, "", f"drumline: {option[0]}: goes with a prompt; a line of --input has its own\n")


def test_the_output_must_not_be_the_input(cli, checkpoint: Path, workload):
    path = workload([{"prompt": "short", "max_tokens": 3}])
    before = path.read_bytes()
    run = cli("generate", "--model", checkpoint, "--input", path, "--output", path)
    assert run == (2, "", "drumline: --output: must not be the input\n")
    assert path.read_bytes() == before
