"""`drumline serve`: the worker that devices talk to over MQTT."""

import asyncio
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from drumline.metrics.exporter import parse_address
from drumline.model.errors import EngineFailed, InvalidRequest
from drumline.model.language_model import LanguageModel
from drumline.scheduler.cli import logs, options
from drumline.scheduler.cli.health import Health
from drumline.scheduler.cli.loop import on_signals, on_usr2, run_loop
from drumline.scheduler.cli.systemd import telling_systemd
from drumline.scheduler.cli.tracing import DEFAULT_FOLDER, TraceSettings
from drumline.scheduler.cli.worker import JournalSettings, Worker, WorkerSettings, run_worker
from drumline.scheduler.config import DRAFT_TOKENS, STALL_S, EngineSettings
from drumline.scheduler.log import Event
from drumline.scheduler.mqtt.home_assistant import DEFAULT_DISCOVERY_PREFIX
from drumline.scheduler.mqtt.jobs import OnChange
from drumline.scheduler.mqtt.quotas import Quotas, read_quotas
from drumline.scheduler.mqtt.topics import Topics

Metrics = Annotated[
    str, typer.Option("--metrics", help="HOST:PORT of /metrics, /healthz, /readyz, /live.json and /trace.")
]
DEFAULT_METRICS = "127.0.0.1:9464"
DAY_S = 86_400.0

_log = logging.getLogger("drumline")


def serve(
    model: options.ModelPath = None,
    broker: Annotated[str | None, typer.Option(help=options.BROKER_HELP)] = None,
    embedded_broker: Annotated[
        bool, typer.Option("--embedded-broker", help="Start a private broker: mosquitto if installed, else iotcore.")
    ] = False,
    name: Annotated[str, typer.Option(help="The worker's name, in its status topic and its metrics.")] = "main",
    prefix: Annotated[str, typer.Option(help="What every topic starts with.")] = "drumline/v1",
    mqtt: options.Mqtt = "5",
    rows: options.Rows = 16,
    step_tokens: options.StepTokens = 256,
    draft_tokens: options.DraftTokens = DRAFT_TOKENS,
    reuse: options.Reuse = "on",
    window: options.Window = None,
    precision: options.PrecisionName = "auto",
    backend: options.BackendName = "auto",
    metrics: Metrics = DEFAULT_METRICS,
    http: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a page that shows the worker live in a browser; what --metrics has is there, but /trace."
        ),
    ] = None,
    reply_prefix: Annotated[
        list[str] | None,
        typer.Option(help="Where response topics may lie beside the client's own. Repeatable."),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(help="Keep accepted jobs in this file: what is killed goes on at the next start."),
    ] = None,
    journal_days: Annotated[
        float, typer.Option(min=0, help="Ended jobs stay in the journal so long, for those who ask again…")
    ] = 7.0,
    journal_mib: Annotated[float, typer.Option(min=1, help="…as long as they take no more than this.")] = 256.0,
    on_change: Annotated[
        OnChange,
        typer.Option(help="Jobs begun with another model or machine: from their first token again, or failed."),
    ] = "restart",
    quotas: Annotated[Path | None, typer.Option(help="JSON of what each client may have at once.")] = None,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that SIGTERM leaves to running jobs.")] = 30.0,
    retire: Annotated[
        bool, typer.Option("--retire", help="At the end, unsubscribe: jobs sent later do not wait for this worker.")
    ] = False,
    threads: options.Threads = None,
    tls_ca: options.TlsCa = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    password_file: options.PasswordFile = None,
    home_assistant: Annotated[
        bool, typer.Option("--home-assistant", help="Announce the worker to Home Assistant (MQTT discovery).")
    ] = False,
    home_assistant_prefix: Annotated[
        str, typer.Option(help="Home Assistant's discovery prefix.")
    ] = DEFAULT_DISCOVERY_PREFIX,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Record a timeline from the start. Else SIGUSR2 or drumline trace begin one."),
    ] = False,
    trace_folder: Annotated[
        Path, typer.Option(help="Where recordings go; `drumline trace` writes to where it is called.")
    ] = DEFAULT_FOLDER,
    trace_mib: Annotated[float, typer.Option(min=0.1, max=1024, help="A recording ends when it is so large.")] = 64.0,
    stall: Annotated[
        float,
        typer.Option(help="Seconds after which a step counts as hanging, and /healthz says so. Longer than any takes."),
    ] = STALL_S,
    log_level: Annotated[logs.Level, typer.Option(help="info: the worker, its connections, each job's end.")] = "info",
    log_format: Annotated[logs.Format, typer.Option(help="What stderr is: one line an event.")] = "text",
    show_text: Annotated[
        bool,
        typer.Option(
            "--show-text", help="Let prompts and answers be seen: in the log, and how answers begin in /live.json."
        ),
    ] = False,
) -> None:
    """Serve a model over MQTT until SIGTERM or Ctrl-C, which finish what runs first; a second one stops at once.

    With --journal, what is not finished then, or is cut off by a kill or a power cut, goes on at the next start.

    One worker serves a prefix: two of them on one broker would each run every job.
    """
    if (broker is None) != embedded_broker:
        raise InvalidRequest("--broker", "give either --broker mqtt://HOST:PORT or --embedded-broker")
    if broker is None and (tls_ca or tls_cert or tls_key or password_file):
        raise InvalidRequest("--broker", "is missing: the embedded broker takes no TLS files and no password")
    settings = WorkerSettings(
        broker=None if broker is None else options.broker_address(broker, tls_ca, tls_cert, tls_key, password_file),
        metrics=http_address("--metrics", metrics),
        http=None if http is None else http_address("--http", http),
        engine=EngineSettings(rows, step_tokens, options.chosen_backend(backend), draft_tokens, reuse == "on"),
        stall_s=stall,
        name=name,
        prefix=prefix,
        protocol=options.mqtt_protocol(mqtt),
        reply_prefixes=tuple(reply_prefix or ()),
        drain_s=drain,
        journal=None if journal is None else JournalSettings(journal, journal_days * DAY_S, journal_mib * 2**20),
        on_change=on_change,
        quotas=Quotas() if quotas is None else read_quotas(quotas),
        retire=retire,
        home_assistant=discovery_prefix(home_assistant_prefix) if home_assistant else None,
        show_text=show_text,
        trace=TraceSettings(existing_folder(trace_folder), int(trace_mib * 2**20), trace),
    )
    if not 0 < stall < math.inf:
        raise InvalidRequest("--stall", f"must be a number of seconds above 0, not {stall:g}")
    options.use_threads(threads)
    logs.configure(log_level, log_format)
    run_loop(_serve(lambda: options.open_model(model, precision, window), settings))


def discovery_prefix(text: str) -> str:
    """Where Home Assistant looks for devices; raises `InvalidRequest` for what no topic can start with."""
    try:
        return Topics(text).prefix
    except InvalidRequest as error:
        raise InvalidRequest("--home-assistant-prefix", error.limit) from None


def existing_folder(path: Path) -> Path:
    """Raises `InvalidRequest` for what is no folder."""
    if not path.is_dir():
        raise InvalidRequest("--trace-folder", f"must be a folder that exists, not {path}")
    return path


def http_address(option: str, text: str) -> tuple[str, int]:
    """HOST:PORT of an HTTP server; raises `InvalidRequest` that names the option."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise InvalidRequest(option, str(error)) from None


async def _serve(load: Callable[[], LanguageModel], settings: WorkerSettings) -> None:
    stop, task = asyncio.Event(), asyncio.current_task()
    end_at_once = stop.set if task is None else task.cancel
    on_signals(end_at_once)  # nothing runs yet that could be finished
    on_usr2(lambda: _log.warning(Event("no trace", reason="the worker is starting")))
    health = Health()
    async with telling_systemd(health), run_worker(load, settings, health) as worker:
        on_signals(stop.set)
        _announce(worker, settings)
        await _until(stop, worker, health)
        on_signals(end_at_once)
    _log.info(Event("stopped"))


async def _until(stop: asyncio.Event, worker: Worker, health: Health) -> None:
    """Wait for a signal; raises `EngineFailed` if a part breaks before: a worker nobody can reach must not stay."""
    parts = {"the MQTT edge": asyncio.create_task(worker.gateway.wait_ended())}
    if worker.embedded is not None:
        parts["the embedded broker"] = asyncio.create_task(worker.embedded.wait_ended())
    asked = asyncio.create_task(stop.wait())
    waiting: list[asyncio.Task[Any]] = [asked, *parts.values()]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for name, part in parts.items():
            if part.done():
                reason = f"{name} ended: {_first(part.exception()) or 'it gave no reason'}"
                health.ended(reason)
                raise EngineFailed(reason)
    finally:
        for task in waiting:
            task.cancel()


def _first(error: BaseException | None) -> BaseException | None:
    """What a group of errors is about, for the one line that a user reads."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _announce(worker: Worker, settings: WorkerSettings) -> None:
    """Say where everything is: to whoever started us in a terminal, and to the log."""
    model, rows = worker.model, settings.engine.rows
    journal = settings.journal.path if settings.journal else "none: a worker that is killed forgets its jobs"
    broker = worker.broker.url
    if (embedded := worker.embedded) is not None:
        broker += f" ({embedded.kind}, embedded)"
        if embedded.port != embedded.port_v311:
            broker += f", MQTT 5 on port {embedded.port}, 3.1.1 on {embedded.port_v311}"
    told = {"broker": worker.broker.url, "metrics": f"{worker.exporter.url}/metrics"}
    _log.info(Event("ready", worker=settings.name, model=model.name, precision=model.precision, rows=rows, **told))
    if logs.writes_json():  # a log of JSON lines often is made of both streams
        return
    print(
        f"drumline serves {model.name} ({model.precision}, {rows} rows of {model.window} tokens)\n"
        f"  broker   {broker}\n"
        f"  jobs     {settings.prefix}/clients/<client>/submit\n"
        f"  journal  {journal}\n"
        f"  metrics  {worker.exporter.url}/metrics" + (f"\n  page     {worker.page.url}/" if worker.page else ""),
        flush=True,
    )
