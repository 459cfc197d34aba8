"""An engine that computes nothing: `python -m tests.benchmarks.echo_engine`. Standard library alone, so it is fast."""

import os
import sys
from collections.abc import Sequence

from benchmarks.peers.base import About, SamplingName, Timing, Work
from benchmarks.peers.worker import answer


class EchoEngine:
    """Answers with the sums of what it was asked; 13 rows are refused, 666 end the process."""

    about = About({"echo": "1"}, "nothing is computed")

    def run(self, work: Sequence[Work], rows: int, sampling: SamplingName) -> Timing:
        print("a library's chatter on stdout")
        if rows == 13:
            raise ValueError("13 rows")
        if rows == 666:
            print("the last words", file=sys.stderr, flush=True)
            os._exit(1)
        return Timing(
            output_tokens=sum(request.max_tokens for request in work),
            prompt_tokens=sum(len(request.prompt_ids) for request in work),
            wall_s=2.0 if sampling == "chat" else 0.5,
            details={"rows": rows},
        )


if __name__ == "__main__":
    answer(EchoEngine)
