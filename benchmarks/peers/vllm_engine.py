"""vLLM, in its own Python: `python -m benchmarks.peers.vllm_engine FOLDER DTYPE MAX_ROWS`. Imports nothing of ours."""

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.base import CHAT, About, SamplingName, Timing, Work
from benchmarks.peers.worker import answer

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


class VllmEngine:
    """Prefix caching is off. Sampled requests carry no seed: a generator of their own would cost vLLM time."""

    def __init__(self, folder: str, dtype: str, max_rows: int) -> None:
        import torch  # after the environment is set
        import vllm

        self._params = vllm.SamplingParams
        self._engine: Any = vllm.LLM(
            folder, dtype=dtype, max_model_len=2048, max_num_seqs=max_rows, enable_prefix_caching=False
        ).llm_engine
        self._count = 0
        self.about = About(
            {"vllm": vllm.__version__, "torch": torch.__version__}, f"{dtype}, {torch.get_num_threads()} threads"
        )

    def run(self, work: Sequence[Work], rows: int, sampling: SamplingName) -> Timing:
        """`LLM.generate`'s own loop, with at most `rows` requests handed to the engine at once."""
        waiting = deque(work)
        chosen = {"temperature": 0.0} if sampling == "greedy" else CHAT
        running = generated = 0
        times: list[float] = []
        started = time.perf_counter()
        while waiting or running:
            while waiting and running < rows:
                request = waiting.popleft()
                self._count += 1
                self._engine.add_request(
                    str(self._count),
                    {"prompt_token_ids": list(request.prompt_ids)},
                    self._params(max_tokens=request.max_tokens, ignore_eos=True, **chosen),
                )
                running += 1
            outputs = self._engine.step()
            times.append(time.perf_counter())
            for output in outputs:
                if output.finished:
                    running -= 1
                    generated += len(output.outputs[0].token_ids)
        wall_s = time.perf_counter() - started
        alone = len(work) == 1 and len(times) > 1
        return Timing(
            output_tokens=generated,
            prompt_tokens=sum(len(request.prompt_ids) for request in work),
            wall_s=wall_s,
            decode_tokens_per_s=(generated - 1) / (times[-1] - times[0]) if alone else None,
        )


if __name__ == "__main__":
    answer(lambda: VllmEngine(sys.argv[1], sys.argv[2], int(sys.argv[3])))
