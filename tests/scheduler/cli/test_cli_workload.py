"""Workload files, and what `bench` and `verify` make of their lines."""

import pytest

from drumline import InvalidRequest, SamplingParams
from drumline.scheduler.cli.workload import read_workload, with_sampling

GOOD = {"id": "a", "prompt": "one", "max_tokens": 3}


def test_lines_without_an_id_are_named_by_their_number(workload):
    path = workload([GOOD, "", {"prompt_ids": [1, 2]}, "   "])
    assert [(request.id, request.prompt, request.prompt_ids) for request in read_workload(path)] == [
        ("a", "one", None),
        ("line-3", None, (1, 2)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "work.jsonl:2: request: Invalid JSON"),
        ("[]", "work.jsonl:2: request: "),
        ({"id": "b"}, "work.jsonl:2: prompt: give exactly one of"),
        ({"id": "b", "prompt": "x", "prompt_ids": [1]}, "work.jsonl:2: prompt: give exactly one of"),
        ({"id": "b", "prompt": "x", "max_tokns": 3}, "work.jsonl:2: max_tokns: "),
        ({"id": "b", "prompt": "x", "max_tokens": -1}, "work.jsonl:2: max_tokens: "),
        ({"id": "b", "prompt": "x", "max_tokens": "3"}, "work.jsonl:2: max_tokens: "),
        ({"id": "b c", "prompt": "x"}, "work.jsonl:2: id: "),
        ({"id": "b", "prompt": "x", "sampling": {"top_p": 0}}, "work.jsonl:2: sampling.top_p: "),
        ({"id": "a", "prompt": "x"}, "work.jsonl:2: id: a stands on an earlier line"),
    ],
)
def test_a_broken_line_is_named(cli, checkpoint, workload, line, message):
    path = workload([GOOD, line])
    with pytest.raises(InvalidRequest) as error:
        read_workload(path)
    assert str(error.value).startswith(message)
    for command in (("bench", path), ("verify", path), ("generate", "--input", path, "--output", path.parent / "out")):
        run = cli(*command, "--model", checkpoint)
        assert (run.code, run.out, run.err) == (2, "", f"drumline: {error.value}\n")


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "work.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(InvalidRequest, match=r"^work\.jsonl:1: "):
        read_workload(path)


def test_an_empty_file_is_refused(workload):
    with pytest.raises(InvalidRequest, match="holds no request"):
        read_workload(workload([""]))


def test_sampling_by_name_seeds_by_line_and_a_lines_own_wins(workload):
    own = {"temperature": 0.5, "seed": 99}
    path = workload([GOOD, {"prompt": "x", "sampling": own}, {"prompt": "y"}])
    requests = read_workload(path)
    chat = with_sampling(requests, "chat", 100)
    assert [request.sampling for request in chat] == [
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=100),
        SamplingParams(temperature=0.5, seed=99),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=102),
    ]
    greedy = with_sampling(requests, "greedy", 7)
    found = [(request.sampling.greedy, request.sampling.seed) for request in greedy]
    assert found == [(True, 7), (False, 99), (True, 9)]
    assert all(request.ignore_eos for request in (*chat, *greedy))
    assert [request.max_tokens for request in chat] == [3, 128, 128]


def test_a_lines_own_sampling_without_a_seed_can_be_repeated(workload):
    """Otherwise two submits of one line would draw two seeds, and `verify` would call that a difference."""
    requests = read_workload(workload([GOOD, {"prompt": "x", "sampling": {"temperature": 1.0}}]))
    (_, own) = with_sampling(requests, "greedy", 7)
    assert own.sampling == SamplingParams(temperature=1.0, seed=8)
