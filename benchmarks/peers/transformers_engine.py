"""transformers: static batches, padded on the left. `python -m benchmarks.peers.transformers_engine FOLDER DTYPE`."""

import sys
import time
from collections.abc import Sequence

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.base import CHAT, About, SamplingName, Timing, Work
from benchmarks.peers.worker import answer


class Clock(BaseStreamer):
    """Notes when each token of a lone request came; the first call is the prompt's."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """A token, or the prompt."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


class TransformersEngine:
    """What a plain loop over `generate` gives: a batch runs to its longest answer, and only asked-for tokens count."""

    def __init__(self, folder: str, dtype: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self._model.train(False)
        self.about = About(
            {"transformers": transformers.__version__, "torch": torch.__version__},
            f"{dtype}, padded static batches, {torch.get_num_threads()} threads",
        )

    def run(self, work: Sequence[Work], rows: int, sampling: SamplingName) -> Timing:
        """Batches of `rows` requests, in order."""
        torch.manual_seed(0)
        clock = Clock() if len(work) == 1 else None
        started = time.perf_counter()
        for first in range(0, len(work), rows):
            self._generate(work[first : first + rows], sampling, clock)
        wall_s = time.perf_counter() - started
        times = clock.times[1:] if clock else []
        return Timing(
            output_tokens=sum(request.max_tokens for request in work),
            prompt_tokens=sum(len(request.prompt_ids) for request in work),
            wall_s=wall_s,
            decode_tokens_per_s=(len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None,
        )

    def _generate(self, batch: Sequence[Work], sampling: SamplingName, clock: Clock | None) -> None:
        longest = max(len(request.prompt_ids) for request in batch)
        tokens = max(request.max_tokens for request in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for line, request in enumerate(batch):
            ids[line, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[line, longest - len(request.prompt_ids) :] = 1
        self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
            streamer=clock,
            **({"do_sample": False} if sampling == "greedy" else {"do_sample": True, **CHAT}),
        )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    answer(lambda: TransformersEngine(sys.argv[1], sys.argv[2]))
