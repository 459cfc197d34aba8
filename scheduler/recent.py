"""What has just been: tokens of the last minute, second by second, and the last answers."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from drumline.scheduler.job import GenerationJob
from drumline.scheduler.live_view import LiveAnswer, Percentiles
from drumline.scheduler.request import Result

SECONDS = 60
ANSWERS = 256
MOST_SHOWN = 20
"""Answers that a view shows; its percentiles are of all that are remembered."""
TEXT_LENGTH = 160


class Recent:
    """Bounded in time and number. Called on the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.answers: deque[tuple[float, LiveAnswer]] = deque(maxlen=ANSWERS)
        """When each ended, on the scheduler's clock, and how; the newest last."""
        self._seconds: deque[tuple[int, int, int]] = deque(maxlen=SECONDS + 1)

    def tokens(self, prompt: int, generated: int) -> None:
        """A step computed so many tokens of prompts, and chose so many."""
        second = int(self._clock())
        if self._seconds and self._seconds[-1][0] == second:
            _, prompt_before, generated_before = self._seconds.pop()
            prompt, generated = prompt + prompt_before, generated + generated_before
        self._seconds.append((second, prompt, generated))

    def as_dict(self, show_text: bool) -> dict[str, Any]:
        """What a `LiveView` says of it."""
        return {
            "generated_by_second": self._by_second((second, generated) for second, _, generated in self._seconds),
            "prompt_by_second": self._by_second((second, prompt) for second, prompt, _ in self._seconds),
            "first_token_s": self._percentiles(lambda answer: answer.first_token_s),
            "inter_token_s": self._percentiles(lambda answer: answer.inter_token_s),
            "total_s": self._percentiles(lambda answer: answer.total_s),
            "answers": self._newest(show_text),
        }

    def _by_second(self, counted: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        tokens, now = dict(counted), int(self._clock())
        return tuple(tokens.get(second, 0) for second in range(now - SECONDS, now))

    def ended(self, job: GenerationJob, result: Result) -> None:
        """A job has its result."""
        timings, usage = result.timings, result.usage
        times_s = result.choices[0].token_times_s
        answer = LiveAnswer(
            job=job.label,
            tenant=job.request.tenant,
            priority=job.request.priority,
            status=result.status,
            stop_reason=result.stop_reason,
            prompt_tokens=usage.prompt_tokens,
            generated_tokens=usage.generated_tokens,
            queued_s=timings.queued_s,
            first_token_s=timings.first_token_s,
            inter_token_s=(times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else None,
            total_s=timings.total_s,
            ended_ago_s=0.0,
            text=result.text[:TEXT_LENGTH],
        )
        self.answers.append((self._clock(), answer))

    def _newest(self, show_text: bool) -> tuple[LiveAnswer, ...]:
        """Answers as they are shown now, the newest first."""
        now = self._clock()
        return tuple(
            answer.model_copy(update={"ended_ago_s": now - at, "text": answer.text if show_text else None})
            for at, answer in list(self.answers)[: -MOST_SHOWN - 1 : -1]
        )

    def _percentiles(self, value: Callable[[LiveAnswer], float | None]) -> Percentiles | None:
        """Of one value of the answers remembered; None where no answer has it."""
        values = [given for _, answer in self.answers if (given := value(answer)) is not None]
        if not values:
            return None
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return Percentiles(p50=p50, p90=p90, p99=p99)
