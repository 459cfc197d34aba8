"""What has just been: tokens of the last minute, second by second, and the last answers."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from drumline.metrics.definitions import Priority
from drumline.model.stop_reason import StopReason
from drumline.scheduler.job import GenerationJob
from drumline.scheduler.request import Result, Status

SECONDS = 60
ANSWERS = 256
TEXT_LENGTH = 160


@dataclass(frozen=True)
class RecentAnswer:
    """How a job went; times in seconds from its submit."""

    job: str
    tenant: str
    priority: Priority
    status: Status
    stop_reason: StopReason
    prompt_tokens: int
    generated_tokens: int
    queued_s: float
    first_token_s: float | None
    inter_token_s: float | None
    """Mean time between its tokens; None where there were fewer than two."""
    total_s: float
    ended_at: float
    """On the scheduler's clock."""
    text: str
    """How the answer begins."""


class Recent:
    """Bounded in time and number. Called on the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.answers: deque[RecentAnswer] = deque(maxlen=ANSWERS)
        """The newest last."""
        self._seconds: deque[tuple[int, int, int]] = deque(maxlen=SECONDS + 1)

    def tokens(self, prompt: int, generated: int) -> None:
        """A step computed so many tokens of prompts, and chose so many."""
        second = int(self._clock())
        if self._seconds and self._seconds[-1][0] == second:
            _, prompt_before, generated_before = self._seconds.pop()
            prompt, generated = prompt + prompt_before, generated + generated_before
        self._seconds.append((second, prompt, generated))

    def generated_by_second(self) -> tuple[int, ...]:
        """Tokens chosen in each of the last 60 whole seconds, the newest last."""
        return self._by_second((second, generated) for second, _, generated in self._seconds)

    def prompt_by_second(self) -> tuple[int, ...]:
        """Tokens of prompts computed in each of the last 60 whole seconds, the newest last."""
        return self._by_second((second, prompt) for second, prompt, _ in self._seconds)

    def _by_second(self, counted: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        tokens, now = dict(counted), int(self._clock())
        return tuple(tokens.get(second, 0) for second in range(now - SECONDS, now))

    def ended(self, job: GenerationJob, result: Result) -> None:
        """A job has its result."""
        timings, usage = result.timings, result.usage
        times_s = result.choices[0].token_times_s
        self.answers.append(
            RecentAnswer(
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
                ended_at=self._clock(),
                text=result.text[:TEXT_LENGTH],
            )
        )
