"""llama-server (llama.cpp), spoken to over HTTP on this machine. A server is started for each number of slots."""

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self
from urllib.error import URLError
from urllib.request import Request, urlopen

from benchmarks.peers.base import CHAT, About, PeerFailed, SamplingName, Timing, Work

TOKENS_PER_SLOT = 1_024
START_TIMEOUT_S = 60.0


class LlamaServer:
    """One slot a row. The prompt cache is off: every engine computes every prompt."""

    def __init__(self, binary: Path, gguf: Path, log: Path) -> None:
        if gguf.suffix != ".gguf":
            raise PeerFailed(f"llama-server reads GGUF files, not {gguf.name}")
        self._binary, self._gguf, self._log = binary, gguf, log
        self._process: subprocess.Popen[bytes] | None = None
        self._rows = self._port = 0
        self._threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.about = About(
            {"llama.cpp": self._version()}, f"{gguf.stem.rpartition('.')[2]}, {self._threads} threads, a slot a row"
        )
        started = time.perf_counter()
        self._serve(1)
        self.ready_s = time.perf_counter() - started

    def run(self, work: Sequence[Work], rows: int, sampling: SamplingName, timeout_s: float) -> Timing:
        """See `Peer.run`; all requests are posted at once."""
        if rows != self._rows:
            self._serve(rows)
            self._ask(Work(work[0].prompt_ids, 4), sampling, START_TIMEOUT_S)
        started = time.perf_counter()
        with ThreadPoolExecutor(len(work)) as clients:
            answers = list(clients.map(lambda request: self._ask(request, sampling, timeout_s), work))
        wall_s = time.perf_counter() - started
        alone = len(answers) == 1 and answers[0]["tokens_predicted"] > 1
        return Timing(
            output_tokens=sum(answer["tokens_predicted"] for answer in answers),
            prompt_tokens=sum(len(request.prompt_ids) for request in work),
            wall_s=wall_s,
            decode_tokens_per_s=answers[0]["timings"]["predicted_per_second"] if alone else None,
        )

    def _version(self) -> str:
        """The build that the binary names; where it was built outside a git tree, that of ggml beside it as well."""
        printed = subprocess.run([self._binary, "--version"], capture_output=True, text=True, check=False)
        build = re.search(r"version: (.+)", printed.stdout + printed.stderr)
        libraries = sorted(file.name for file in self._binary.parent.glob("libggml.so.*.*.*"))
        return ", ".join([build[1] if build else "unknown build", *libraries])

    def _serve(self, rows: int) -> None:
        self.__exit__()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command: list[str | Path] = [
            *(self._binary, "-m", self._gguf, "--host", "127.0.0.1", "--port", str(self._port)),
            *("-c", str(TOKENS_PER_SLOT * rows), "-np", str(rows), "-t", str(self._threads)),
            *("--no-webui", "--no-cache-prompt"),
        ]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.perf_counter() + START_TIMEOUT_S
        while not self._healthy():
            if self._process.poll() is not None or time.perf_counter() > deadline:
                self.__exit__()
                raise PeerFailed("llama-server did not start: " + " | ".join(self._log.read_text().splitlines()[-3:]))
            time.sleep(0.05)
        self._rows = rows

    def _healthy(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self._port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    def _ask(self, request: Work, sampling: SamplingName, timeout_s: float) -> dict[str, Any]:
        body = {
            "prompt": request.prompt_ids,
            "n_predict": request.max_tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            **({"temperature": 0} if sampling == "greedy" else {**CHAT, "min_p": 0}),
        }
        address = f"http://127.0.0.1:{self._port}/completion"
        posted = Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urlopen(posted, timeout=timeout_s) as answer:
                fields: dict[str, Any] = json.load(answer)
        except (URLError, OSError) as error:
            raise PeerFailed(f"llama-server: {error}") from error
        return fields

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
