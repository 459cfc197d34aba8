"""An engine in a Python process of its own: JSON lines over stdin and stdout. Standard library alone."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from benchmarks.peers.base import About, Engine, PeerFailed, SamplingName, Timing, Work

ROOT = Path(__file__).resolve().parents[2]


def answer(open_engine: Callable[[], Engine]) -> None:
    """The worker's side: say when the engine is ready, then answer each line of stdin until it closes."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stdout

    def reply(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=replies, flush=True)

    engine = open_engine()
    reply(asdict(engine.about))
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            work = [Work.from_json(fields) for fields in asked["work"]]
            reply(asdict(engine.run(work, asked["rows"], asked["sampling"])))
        except Exception as error:
            reply({"error": f"{type(error).__name__}: {error}"})


class WorkerPeer:
    """The asking side: `python -m module arguments…`, whose stderr goes to `log`."""

    def __init__(
        self,
        python: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 420,
    ) -> None:
        self._log = log
        started = time.perf_counter()
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [python, "-m", module, *arguments],
                cwd=ROOT,
                env=os.environ | {"HF_HUB_OFFLINE": "1"} | dict(environment or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        try:
            self.about = About(**self._read(start_timeout_s))
        except BaseException:
            self.__exit__()
            raise
        self.ready_s = time.perf_counter() - started

    def run(self, work: Sequence[Work], rows: int, sampling: SamplingName, timeout_s: float) -> Timing:
        """See `Peer.run`."""
        asked = {"work": [request.to_json() for request in work], "rows": rows, "sampling": sampling}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("is gone") from None
        return Timing(**self._read(timeout_s))

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        watchdog = threading.Timer(timeout_s, self._process.kill)
        watchdog.daemon = True
        watchdog.start()
        line = self._process.stdout.readline()
        expired = not watchdog.is_alive()
        watchdog.cancel()
        if not line:
            raise self._failed(f"did not answer within {timeout_s:.0f} s" if expired else "ended")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise PeerFailed(message["error"])
        return message

    def _failed(self, how: str) -> PeerFailed:
        last = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()][-3:]
        return PeerFailed(f"the process {how}: " + " | ".join(last))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
