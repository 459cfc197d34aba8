import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from drumline.scheduler.cli import main
from tests.checkpoints import llama, random_model, save


class Run(NamedTuple):
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama without a chat template; its window is long, so that a job can be caught while it runs."""
    return save(tmp_path_factory.mktemp("cli") / "tiny", random_model(llama(max_position_embeddings=2048)))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], one_thread: None) -> Callable[..., Run]:
    """Run a command in this process, through its real `main`."""

    def run(*arguments: object) -> Run:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        return Run(end.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def workload(tmp_path: Path) -> Callable[..., Path]:
    """Write JSON lines (or lines as they are) and return the file."""

    def write(lines: Sequence[dict | str]) -> Path:
        path = tmp_path / "work.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        return path

    return write
