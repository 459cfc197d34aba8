"""What a worker says of itself: birth, life and will."""

from collections.abc import Callable

from drumline.model.errors import EngineFailed
from drumline.scheduler.engine import Engine
from drumline.scheduler.mqtt.codec import WorkerState, WorkerStatus
from drumline.scheduler.mqtt.connection import Message
from drumline.scheduler.mqtt.outbox import Outbox
from drumline.scheduler.mqtt.rate import Rate


class Status:
    """The status of one worker, retained at `topic`; `waiting` counts accepted jobs that the engine does not have."""

    def __init__(
        self,
        engine: Engine,
        outbox: Outbox,
        topic: str,
        worker: str,
        model: str,
        version: str,
        started_at: float,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._outbox, self.topic, self._clock = engine, outbox, topic, clock
        self._worker, self._model, self._version, self._started_at = worker, model, version, started_at
        self.state: WorkerState = "online"
        self.waiting: Callable[[], int] = int
        self._told: WorkerStatus | None = None
        self._told_at = clock()
        self._tokens = Rate(clock())
        self._tokens_per_s = 0.0

    def tell(self) -> None:
        """Say how it is."""
        self._tokens_per_s = self._tokens.measure(self._clock(), self._engine.statistics().generated_tokens)
        self._told, self._told_at = self._now(self.state), self._clock()
        self._outbox.put("status", self.message(self.state), key="status")

    def tell_news(self, stale_s: float) -> None:
        """Say it where it changed, or was said so long ago."""
        if self._clock() - self._told_at >= stale_s or self._now(self.state) != self._told:
            self.tell()

    def message(self, state: WorkerState) -> Message:
        """The status as a message."""
        return Message(self.topic, self._now(state).encode(), qos=1, retain=True)

    def check_alone(self, message: Message) -> None:
        """Raise `EngineFailed` where a worker that was started after us has our name: it has our sessions, and each of
        us would take them from the other for ever. Brokers do not always say so."""
        try:
            told = WorkerStatus.model_validate_json(message.payload)
        except ValueError:
            return
        if told.status != "offline" and told.started_at > self._started_at:
            raise EngineFailed(f"another worker named {self._worker} was started")

    def _now(self, state: WorkerState) -> WorkerStatus:
        statistics = self._engine.statistics()
        return WorkerStatus(
            worker=self._worker,
            status=state,
            queue_depth=statistics.queued + self.waiting(),
            rows_live=statistics.live,
            rows=statistics.rows,
            model=self._model,
            version=self._version,
            started_at=self._started_at,
            tokens_per_s=0.0 if state == "offline" else self._tokens_per_s,
        )
