"""`drumline serve`: the worker that devices talk to over MQTT."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import typer

from drumline.metrics.exporter import parse_address
from drumline.model.errors import InvalidRequest
from drumline.model.language_model import LanguageModel
from drumline.scheduler.cli import options
from drumline.scheduler.cli.worker import Worker, WorkerSettings, run_worker
from drumline.scheduler.mqtt.connection import parse_broker_url

Metrics = Annotated[str, typer.Option("--metrics", help="HOST:PORT of /metrics, /healthz and /readyz.")]
DEFAULT_METRICS = "127.0.0.1:9464"


def serve(
    model: options.ModelPath = None,
    broker: Annotated[str | None, typer.Option(help="mqtt://[user:password@]HOST:PORT.")] = None,
    embedded_broker: Annotated[
        bool, typer.Option("--embedded-broker", help="Start a private broker: mosquitto if installed, else iotcore.")
    ] = False,
    name: Annotated[str, typer.Option(help="The worker's name, in its status topic and its metrics.")] = "main",
    prefix: Annotated[str, typer.Option(help="What every topic starts with.")] = "drumline/v1",
    mqtt: options.Mqtt = "5",
    rows: options.Rows = 16,
    step_tokens: options.StepTokens = 256,
    window: options.Window = None,
    precision: options.PrecisionName = "auto",
    backend: options.BackendName = "torch",
    metrics: Metrics = DEFAULT_METRICS,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that SIGTERM leaves to running jobs.")] = 30.0,
    threads: options.Threads = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log every refusal and reconnection.")] = False,
) -> None:
    """Serve a model over MQTT until SIGTERM or Ctrl-C, which finish what runs first; a second one stops at once."""
    if (broker is None) != embedded_broker:
        raise InvalidRequest("--broker", "give either --broker mqtt://HOST:PORT or --embedded-broker")
    settings = WorkerSettings(
        broker=None if broker is None else parse_broker_url(broker),
        metrics=metrics_address(metrics),
        rows=rows,
        step_tokens=step_tokens,
        backend=backend,
        name=name,
        prefix=prefix,
        protocol=options.mqtt_protocol(mqtt),
        drain_s=drain,
    )
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    options.use_threads(threads)
    run_loop(_serve(options.open_model(model, precision, window), settings))


def metrics_address(text: str) -> tuple[str, int]:
    """HOST:PORT of the metrics page; raises `InvalidRequest`."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise InvalidRequest("--metrics", str(error)) from None


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run the command's loop on uvloop where there is one. Only the command line chooses a loop; the library never."""
    if sys.platform == "win32":
        asyncio.run(main)
        return
    import uvloop  # not on Windows

    uvloop.run(main)


async def _serve(model: LanguageModel, settings: WorkerSettings) -> None:
    stop, task = asyncio.Event(), asyncio.current_task()
    end_at_once = stop.set if task is None else task.cancel
    _on_signals(end_at_once)  # nothing runs yet that could be finished
    async with run_worker(model, settings) as worker:
        _on_signals(stop.set)
        _announce(model, worker, settings)
        await stop.wait()
        _on_signals(end_at_once)
        print("draining: running jobs finish, no new ones are taken", file=sys.stderr, flush=True)


def _on_signals(action: Callable[[], object]) -> None:
    """What SIGTERM and Ctrl-C do from now on."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, action)


def _announce(model: LanguageModel, worker: Worker, settings: WorkerSettings) -> None:
    broker = f"mqtt://{worker.broker.host}:{worker.broker.port}"
    if worker.embedded is not None:
        broker += f" ({worker.embedded.kind}, embedded; MQTT 3.1.1 on port {worker.embedded.port_v311})"
    print(
        f"drumline serves {model.name} ({model.precision}, {settings.rows} rows of {model.window} tokens)\n"
        f"  broker   {broker}\n"
        f"  jobs     {settings.prefix}/clients/<client>/submit\n"
        f"  metrics  {worker.exporter.url}/metrics",
        flush=True,
    )
