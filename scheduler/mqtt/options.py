"""Settings of the MQTT edge."""

from dataclasses import dataclass, field

from drumline.scheduler.mqtt.codec import MAX_SUBMIT_BYTES
from drumline.scheduler.mqtt.connection import ProtocolLevel
from drumline.scheduler.mqtt.jobs import OnChange
from drumline.scheduler.mqtt.outbox import MAX_MESSAGE_BYTES
from drumline.scheduler.mqtt.quotas import Quotas


@dataclass(frozen=True)
class Limits:
    """Bounds of the edge. A terminal message above `result_bytes` is sent in parts; `unfinished_jobs` is how many a
    worker without a journal of its own takes at once."""

    submit_bytes: int = MAX_SUBMIT_BYTES
    result_bytes: int = MAX_MESSAGE_BYTES
    unfinished_jobs: int = 10_000


@dataclass(frozen=True)
class GatewayOptions:
    """Settings of the edge; times in seconds.

    `reply_prefixes` are allowed for response topics beside the client's own subtree; `session_expiry_s` is how long the
    broker keeps jobs for us while we are away, and `retire` says that at the end it need not; every `progress_s` the
    journal is told how far the jobs have come. `home_assistant` is the discovery prefix to announce the worker under;
    `show_text` lets prompts and answers into the log.
    """

    protocol: ProtocolLevel = 5
    limits: Limits = field(default_factory=Limits)
    reply_prefixes: tuple[str, ...] = ()
    keepalive_s: int = 30
    session_expiry_s: int = 3600
    refresh_s: float = 0.5
    status_s: float = 5.0
    drain_s: float = 30.0
    flush_s: float = 10.0
    progress_s: float = 1.0
    quotas: Quotas = field(default_factory=Quotas)
    on_change: OnChange = "restart"
    retire: bool = False
    home_assistant: str | None = None
    show_text: bool = False
