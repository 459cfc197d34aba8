"""A whole worker in one place: embedded broker, scheduler, metrics page, MQTT edge. `serve` and `demo` run it."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry

from drumline.metrics.exporter import Exporter
from drumline.metrics.pages import Pages
from drumline.metrics.process import register_process
from drumline.model.errors import InvalidRequest
from drumline.model.language_model import LanguageModel
from drumline.scheduler.cli.health import Health
from drumline.scheduler.cli.loop import in_thread
from drumline.scheduler.cli.options import progress_console
from drumline.scheduler.cli.tracing import TraceSettings, Tracing, trace_page
from drumline.scheduler.config import STALL_S, VERSION, EngineSettings
from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.live_page import html_page, live_json
from drumline.scheduler.log import Event
from drumline.scheduler.mqtt.address import BrokerAddress
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.connection import ProtocolLevel
from drumline.scheduler.mqtt.gateway import Gateway
from drumline.scheduler.mqtt.jobs import OnChange
from drumline.scheduler.mqtt.options import GatewayOptions
from drumline.scheduler.mqtt.quotas import Quotas
from drumline.scheduler.mqtt.topics import Topics
from drumline.scheduler.scheduler import Scheduler

_log = logging.getLogger("drumline")


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
    http: tuple[str, int] | None = None
    """Where people look at the worker in a browser, if they may."""
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
    stall_s: float = STALL_S
    show_text: bool = False
    trace: TraceSettings = field(default_factory=TraceSettings)


@dataclass(frozen=True)
class Worker:
    """The running parts."""

    model: LanguageModel
    scheduler: Scheduler
    gateway: Gateway
    exporter: Exporter
    page: Exporter | None
    """The server of the page for browsers."""
    broker: BrokerAddress
    embedded: EmbeddedBroker | None


def _address(embedded: EmbeddedBroker | None, protocol: ProtocolLevel) -> BrokerAddress:
    if embedded is None:
        raise InvalidRequest("broker", "is missing")
    return BrokerAddress(embedded.host, embedded.port if protocol == 5 else embedded.port_v311)


@asynccontextmanager
async def run_worker(
    load: Callable[[], LanguageModel], settings: WorkerSettings, health: Health | None = None
) -> AsyncIterator[Worker]:
    """Start the parts in the order in which they need one another, and stop them in reverse.

    The probes answer first, then `load` loads the model, in a thread: meanwhile the event loop runs, and a cancellation
    ends the start at once. Leaving the block drains the jobs, publishes their results and says `offline`; leaving it by
    an exception does not wait for the jobs. Raises `InvalidRequest`, `BrokerError`, `OSError` (a port), and
    what `load` raises.
    """
    health = health or Health()
    registry = CollectorRegistry()
    register_process(registry)
    async with AsyncExitStack() as stack:
        pages = _pages(registry, health, settings.show_text)
        pages.add("/trace", trace_page(lambda: health.tracing, health.ready))
        exporter = stack.enter_context(Exporter(pages, *settings.metrics))
        page = None
        if settings.http is not None:
            seen = _pages(registry, health, settings.show_text)
            seen.add("/", html_page())
            page = stack.enter_context(Exporter(seen, *settings.http))
        own_broker = EmbeddedBroker() if settings.broker is None else None
        _log.info(Event("starting", worker=settings.name, version=VERSION, metrics=f"{exporter.url}/metrics"))
        scheduler = await _start_engine(load, settings, registry, health, stack)
        health.tracing = Tracing(scheduler.trace, settings.name, settings.trace)
        stack.enter_context(health.tracing.switched_by_signal())
        embedded = None if own_broker is None else await stack.enter_async_context(own_broker)
        address = settings.broker or _address(embedded, settings.protocol)
        health.starting = "the journal is being opened"
        journal = await _open_journal(settings, scheduler, stack)
        gateway = _gateway(settings, scheduler, journal, address)
        health.gateway, health.journal = gateway, journal
        health.starting = None
        await stack.enter_async_context(gateway)
        try:
            yield Worker(scheduler.model, scheduler, gateway, exporter, page, address, embedded)
        finally:
            health.draining = True


def _pages(registry: CollectorRegistry, health: Health, show_text: bool) -> Pages:
    """What both servers answer, also while the model is loaded."""
    live = live_json(
        lambda: health.scheduler, show_text=show_text, starting=health.ready, draining=lambda: health.draining
    )
    return Pages(registry, health=health.health, ready=health.ready, pages={"/live.json": live})


async def _start_engine(
    load: Callable[[], LanguageModel],
    settings: WorkerSettings,
    registry: CollectorRegistry,
    health: Health,
    stack: AsyncExitStack,
) -> Scheduler:
    model = await in_thread(load)
    _log.info(Event("model loaded", model=model.name, precision=model.precision, window=model.window))
    engine = asdict(settings.engine)
    scheduler = Scheduler(model, name=settings.name, registry=registry, stall_s=settings.stall_s, **engine)
    scheduler.instruments.watch(ready=lambda: not health.ready(), healthy=lambda: not health.health())
    health.starting = "kernels are being loaded, or compiled for this CPU"
    with progress_console.status("starting (the first time, kernels are compiled for this CPU)"):
        await stack.enter_async_context(scheduler)
    health.scheduler = scheduler
    return scheduler


async def _open_journal(settings: WorkerSettings, scheduler: Scheduler, stack: AsyncExitStack) -> Journal | None:
    if settings.journal is None:
        return None
    told = scheduler.instruments
    journal = Journal(**vars(settings.journal), on_commit=told.journal_commit, on_up=told.journal_up)
    return await stack.enter_async_context(journal)


def _gateway(
    settings: WorkerSettings, scheduler: Scheduler, journal: Journal | None, address: BrokerAddress
) -> Gateway:
    return Gateway(
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
            show_text=settings.show_text,
        ),
        observer=scheduler.instruments,
    )
