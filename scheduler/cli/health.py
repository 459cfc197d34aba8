"""What `/healthz` and `/readyz` say of a worker, from its very start to its end."""

from drumline.scheduler.cli.tracing import Tracing
from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.mqtt.gateway import Gateway
from drumline.scheduler.scheduler import Scheduler


class Health:
    """Answers with whatever of the worker there is already; its parts are set as they come. For any thread."""

    def __init__(self) -> None:
        self.starting: str | None = "the model is being loaded"
        """What the start waits for; None once it is over."""
        self.draining = False
        self.scheduler: Scheduler | None = None
        self.gateway: Gateway | None = None
        self.journal: Journal | None = None
        self.tracing: Tracing | None = None
        self._ended: tuple[str, ...] = ()

    def ended(self, reason: str) -> None:
        """A part that the worker cannot do without is no more."""
        self._ended += (reason,)

    def health(self) -> list[str]:
        """Why the worker should be started anew; empty where it comes on."""
        return [*self._ended, *(self.scheduler.health() if self.scheduler else [])]

    def ready(self) -> list[str]:
        """Why a job that were sent now would not be taken and answered; empty where it would."""
        reasons = self.health()
        if self.draining:
            return [*reasons, "draining: what runs is finished, nothing new is taken"]
        if self.starting is not None:
            reasons.append(self.starting)
        if self.gateway is not None and not self.gateway.connected:
            reasons.append("the broker is not connected")
        if self.journal is not None and self.journal.failure is not None:
            reasons.append(f"the journal takes no writes: {self.journal.failure}")
        if not reasons and self.scheduler is not None and not self.scheduler.ready:
            reasons.append("the engine takes no requests")
        return reasons
