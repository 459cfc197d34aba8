"""A `drumline serve` with a private broker, as a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

COMMAND = (sys.executable, "-m", "drumline.scheduler.cli", "serve", "--embedded-broker", "--drain", "0")


@contextmanager
def served(*options: str, ready: str) -> Iterator[tuple[int, re.Match[str]]]:
    """The port of its broker, and what matched `ready` in what it announces; it ends with the block."""
    process = subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, encoding="utf-8")
    try:
        port = 0
        for line in process.stdout or ():
            if match := re.search(r"broker +mqtt://[^:]+:(\d+)", line):
                port = int(match[1])
            if match := re.search(ready, line):
                yield port, match
                break
        else:
            raise SystemExit("the worker did not start")
    finally:
        process.terminate()
        process.wait()
