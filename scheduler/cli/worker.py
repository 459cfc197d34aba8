"""A whole worker in one place: embedded broker, scheduler, metrics page, MQTT edge. `serve` and `demo` run it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from drumline.metrics.exporter import Exporter
from drumline.metrics.pages import Pages
from drumline.metrics.process import register_process
from drumline.model.errors import InvalidRequest
from drumline.model.language_model import LanguageModel
from drumline.scheduler.cli.options import progress_console
from drumline.scheduler.config import VERSION, EngineSettings
from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.mqtt.address import BrokerAddress
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.connection import ProtocolLevel
from drumline.scheduler.mqtt.gateway import Gateway
from drumline.scheduler.mqtt.jobs import OnChange
from drumline.scheduler.mqtt.options import GatewayOptions
from drumline.scheduler.mqtt.quotas import Quotas
from drumline.scheduler.mqtt.topics import Topics
from drumline.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class JournalSettings:
    """Where jobs are kept; for how many seconds, and in how many bytes, those that have ended."""

    path: Path
    keep_s: float = 7 * 86_400.0
    keep_bytes: float = 256 * 2**20


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is started with. `broker` None embeds one of its own."""

    broker: BrokerAddress | None
    metrics: tuple[str, int]
    engine: EngineSettings = field(default_factory=EngineSettings)
    name: str = "main"
    prefix: str = "drumline/v1"
    protocol: ProtocolLevel = 5
    reply_prefixes: tuple[str, ...] = ()
    drain_s: float = 30.0
    journal: JournalSettings | None = None
    on_change: OnChange = "restart"
    quotas: Quotas = field(default_factory=Quotas)
    retire: bool = False
    home_assistant: str | None = None


@dataclass(frozen=True)
class Worker:
    """The running parts."""

    scheduler: Scheduler
    gateway: Gateway
    exporter: Exporter
    broker: BrokerAddress
    embedded: EmbeddedBroker | None


def _address(embedded: EmbeddedBroker | None, protocol: ProtocolLevel) -> BrokerAddress:
    if embedded is None:
        raise InvalidRequest("broker", "is missing")
    return BrokerAddress(embedded.host, embedded.port if protocol == 5 else embedded.port_v311)


@asynccontextmanager
async def run_worker(model: LanguageModel, settings: WorkerSettings) -> AsyncIterator[Worker]:
    """Start the parts in the order in which they need one another, and stop them in reverse.

    Leaving the block drains the jobs, publishes their results and says `offline`; leaving it by an exception does not
    wait for the jobs. Raises `InvalidRequest`, `BrokerError`, `OSError` (the metrics port).
    """
    async with AsyncExitStack() as stack:
        embedded = None
        if settings.broker is None:
            embedded = await stack.enter_async_context(EmbeddedBroker())
        address = settings.broker or _address(embedded, settings.protocol)
        scheduler = Scheduler(model, name=settings.name, **asdict(settings.engine))
        with progress_console.status("starting (the first time, kernels are compiled for this CPU)"):
            await stack.enter_async_context(scheduler)
        journal = None
        if settings.journal is not None:
            told = scheduler.instruments
            journal = await stack.enter_async_context(
                Journal(**vars(settings.journal), on_commit=told.journal_commit, on_up=told.journal_up)
            )
        gateway = Gateway(
            scheduler,
            address,
            journal=journal,
            worker=settings.name,
            version=VERSION,
            topics=Topics(settings.prefix),
            options=GatewayOptions(
                protocol=settings.protocol,
                drain_s=settings.drain_s,
                reply_prefixes=settings.reply_prefixes,
                on_change=settings.on_change,
                quotas=settings.quotas,
                retire=settings.retire,
                home_assistant=settings.home_assistant,
            ),
            observer=scheduler.instruments,
        )

        def health() -> list[str]:
            return [] if scheduler.healthy else ["engine"]

        def ready() -> list[str]:
            parts = {
                "engine": scheduler.ready,
                "broker": gateway.connected,
                "journal": journal is None or journal.failure is None,
            }
            return [name for name, is_ready in parts.items() if not is_ready]

        scheduler.instruments.watch(ready=lambda: not ready(), healthy=lambda: not health())
        register_process(scheduler.registry)
        pages = Pages(scheduler.registry, health=health, ready=ready)
        exporter = stack.enter_context(Exporter(pages, *settings.metrics))
        await stack.enter_async_context(gateway)
        yield Worker(scheduler, gateway, exporter, address, embedded)
