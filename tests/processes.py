"""Programs of ours as processes of their own: run to the end, or left running while a test talks to them; and where the
programs of others are."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATIENCE_S = 60.0
SBIN = "/usr/sbin:/usr/local/sbin"
CLI = ("-m", "drumline.scheduler.cli")
# A tiny model gains nothing from a second thread, and a user's terminal settings are no part of a test.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
ENVIRONMENT["OMP_NUM_THREADS"] = "1"


def run_python(
    *arguments: str | Path, cwd: Path = ROOT, timeout: float = PATIENCE_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` to its end."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=ENVIRONMENT | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
    )


@contextmanager
def running_python(*arguments: str | Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`python ARGUMENTS` while the block runs; whatever is left of it then is killed."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=ENVIRONMENT | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The first line of stdout that holds `pattern`; fails where the output ends before."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"no line matches {pattern!r} in {seen}; stderr: {process.stderr.read()}")


def finish(process: subprocess.Popen[str], timeout: float = PATIENCE_S) -> tuple[int, str, str]:
    """Wait for the end: exit code, and what is left of stdout and stderr."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def program(name: str) -> str:
    """Where it is; skips the test where it is missing, unless CI says that it must be there."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}")
    if found is not None:
        return found
    if os.environ.get("DRUMLINE_REQUIRE_EXTERNAL") == "1":
        pytest.fail(f"{name} is not installed")
    pytest.skip(f"{name} is not installed")
