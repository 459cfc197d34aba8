"""Which engines a run compares, and how each is started."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.base import Peer
from benchmarks.peers.llama_server import LlamaServer
from benchmarks.peers.worker import WorkerPeer
from drumline.scheduler.config import DRAFT_TOKENS

OURS = "drumline"
NO_DRAFTS = "drumline, no drafts"
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Spec:
    """An engine that can be started: alone, in its own process. `dtypes` are the ones worth a trial."""

    name: str
    start: Callable[[str], Peer]
    dtypes: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class OurSettings:
    """How ours is run."""

    model: Path
    precision: str = "auto"
    backend: str = "auto"
    step_tokens: int = 256
    draft_tokens: int = DRAFT_TOKENS

    def arguments(self) -> list[str]:
        """The options of `drumline_engine`."""
        options = {
            "--model": self.model,
            "--precision": self.precision,
            "--backend": self.backend,
            "--step-tokens": self.step_tokens,
            "--draft-tokens": self.draft_tokens,
        }
        return [str(word) for pair in options.items() for word in pair]


def start_ours(python: str, ours: OurSettings, log: Path, environment: Mapping[str, str] | None = None) -> Peer:
    """Our engine in a process of its own."""
    return WorkerPeer(python, "benchmarks.peers.drumline_engine", ours.arguments(), log, environment)


def transformers_spec(python: str, folder: Callable[[], Path], dtypes: tuple[str, ...], scratch: Path) -> Spec:
    """transformers, from the Python that runs ours."""

    def start(dtype: str) -> Peer:
        module = "benchmarks.peers.transformers_engine"
        return WorkerPeer(python, module, [str(folder()), dtype], scratch / "transformers.log")

    return Spec("transformers", start, dtypes)


def vllm_spec(python: str, folder: Callable[[], Path], dtypes: tuple[str, ...], rows: int, scratch: Path) -> Spec:
    """vLLM, from the Python that has it. Its own advice is followed: all cores, and Intel's OpenMP where it lies."""

    def start(dtype: str) -> Peer:
        environment = {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}
        openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
        if openmp.exists():
            environment["LD_PRELOAD"] = ":".join(filter(None, (os.environ.get("LD_PRELOAD"), str(openmp))))
        arguments = [str(folder()), dtype, str(rows)]
        return WorkerPeer(python, "benchmarks.peers.vllm_engine", arguments, scratch / "vllm.log", environment)

    return Spec("vllm", start, dtypes)


def llama_server_spec(binary: Path, gguf: Path, scratch: Path) -> Spec:
    """llama-server, on the very GGUF."""
    return Spec("llama-server", lambda _: LlamaServer(binary, gguf, scratch / "llama-server.log"))
