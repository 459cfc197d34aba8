"""Ours: the scheduler as an embedder runs it. `python -m benchmarks.peers.drumline_engine --help`."""

import argparse
import asyncio
import importlib.util
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.base import About, SamplingName, Timing, Work
from benchmarks.peers.worker import answer
from drumline.model.openmp import share_pool
from drumline.scheduler.cli import SPIN_COUNT

if TYPE_CHECKING:
    from drumline import Request, Result
    from drumline.scheduler.engine import Statistics


class DrumlineEngine:
    """Loads the model, enters a scheduler once and answers a token, so that ready means ready."""

    def __init__(self, model: Path, precision: str, backend: str, step_tokens: int, draft_tokens: int) -> None:
        from drumline import Request, load_model  # after the environment is set

        self._model = load_model(model, precision=precision)
        self._backend = None if backend == "auto" else backend
        self._step_tokens, self._draft_tokens = step_tokens, draft_tokens
        asyncio.run(self._serve([Request(prompt_ids=(0,), max_tokens=1)], 1))
        packages = [name for name in ("drumline", "torch", "numba") if importlib.util.find_spec(name)]
        self.about = About({name: version(name) for name in packages}, self._note())

    def run(self, work: Sequence[Work], rows: int, sampling: SamplingName) -> Timing:
        """All requests queued at once; seeds are the requests' numbers. `details` is what `drumline bench` reports."""
        from drumline import Request
        from drumline.scheduler.cli.bench import report_of
        from drumline.scheduler.cli.workload import with_sampling

        requests = [Request(prompt_ids=request.prompt_ids, max_tokens=request.max_tokens) for request in work]
        results, statistics, wall_s = asyncio.run(self._serve(with_sampling(requests, sampling, seed=0), rows))
        times = results[0].choices[0].token_times_s
        alone = len(results) == 1 and len(times) > 1
        report = report_of(results, statistics, wall_s)
        return Timing(
            output_tokens=report.pop("output_tokens"),
            prompt_tokens=report.pop("prompt_tokens"),
            wall_s=wall_s,
            decode_tokens_per_s=(len(times) - 1) / (times[-1] - times[0]) if alone else None,
            details=report,
        )

    async def _serve(self, requests: "Sequence[Request]", rows: int) -> "tuple[list[Result], Statistics, float]":
        from drumline.scheduler.cli.workload import make_scheduler, run_all
        from drumline.scheduler.config import EngineSettings

        settings = EngineSettings(rows, self._step_tokens, self._backend, self._draft_tokens)
        async with make_scheduler(self._model, requests, settings) as scheduler:
            started = asyncio.get_running_loop().time()
            results = await run_all(scheduler, requests, lambda: None)
            wall_s = asyncio.get_running_loop().time() - started
            return results, scheduler.statistics(), wall_s

    def _note(self) -> str:
        import torch

        exact = "exact" if self._model.exact else "not exact"
        drafts = f"{self._draft_tokens or 'no'} drafts"
        engine = f"backend {self._backend or 'auto'}, {drafts}, {torch.get_num_threads()} threads"
        return f"{self._model.precision}, {exact}, {engine}"


def main() -> None:
    """Read the options and answer until stdin closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--step-tokens", type=int, default=256)
    parser.add_argument("--draft-tokens", type=int, required=True)
    chosen = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    share_pool()
    answer(lambda: DrumlineEngine(**vars(chosen)))


if __name__ == "__main__":
    main()
