"""Starts workers quickly: imports everything once, then forks a process for each, which runs the `drumline` command.

A child is a process like any other (its own event loop, threads and files, all begun after the fork), but for the two
seconds of imports. Nothing may have started a thread before the fork, which is checked.

Reads a JSON command a line: `{"spawn": [arguments], "log": path}` answers `{"pid": …}`,
`{"poll": pid}` answers `{"code": null while it runs, else the exit code, −9 after a SIGKILL}`.
"""

import ctypes
import json
import os
import signal
import sys
from typing import Any, NoReturn

from drumline.scheduler.cli import SPIN_COUNT, main

PR_SET_PDEATHSIG = 1


def prepare() -> None:
    """Import what `serve` will need, in the order in which the command does."""
    from drumline.model.openmp import share_pool

    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    share_pool()
    import drumline.model.backends.cpu_backend
    import drumline.scheduler.cli.app
    import drumline.scheduler.mqtt.gateway  # noqa: F401


def spawn(arguments: list[str], log: str) -> int:
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"{threads} threads before the fork")
    child = os.fork()
    if child == 0:
        run(arguments, log)
    return child


def run(arguments: list[str], log: str) -> NoReturn:
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for old, new in ((nothing, 0), (said, 1), (said, 2)):
            os.dup2(old, new)
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        main(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def poll(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def serve() -> None:
    print(json.dumps({"ready": os.getpid()}), flush=True)
    living: set[int] = set()
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        if "spawn" in command:
            pid = spawn(command["spawn"], command["log"])
            living.add(pid)
            print(json.dumps({"pid": pid}), flush=True)
        else:
            pid = command["poll"]
            code = poll(pid)
            if code is not None:
                living.discard(pid)
            print(json.dumps({"code": code}), flush=True)
    for pid in living:  # the test is over, or was killed itself
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    prepare()
    serve()
