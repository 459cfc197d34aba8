"""`drumline submit`: one job over MQTT, streamed to the terminal."""

import asyncio
import sys
from contextlib import suppress
from typing import Annotated

import typer

from drumline.model.errors import InvalidRequest
from drumline.model.sampling_params import SamplingParams
from drumline.scheduler.cli import options
from drumline.scheduler.cli.loop import run_loop
from drumline.scheduler.mqtt.address import BrokerAddress
from drumline.scheduler.mqtt.client import Client
from drumline.scheduler.mqtt.connection import ProtocolLevel
from drumline.scheduler.mqtt.topics import Topics
from drumline.scheduler.request import Message, Request

CANCEL_TIMEOUT_S = 2.0


def submit(
    prompt: Annotated[str, typer.Argument(help="Sent as a chat message, or as it is with --raw.")],
    broker: Annotated[str, typer.Option(help=options.BROKER_HELP)],
    client: Annotated[str, typer.Option("--client", help="The device's name: a topic level.")] = "cli",
    job_id: Annotated[str | None, typer.Option("--id", help="The job's id. Default: a new one.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Budget of the answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Mass of the tokens kept.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Drawn, and shown, when absent.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds until the job expires.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a worker to accept the job.")] = 10.0,
    mqtt: options.Mqtt = "5",
    prefix: Annotated[str, typer.Option(help="What every topic starts with.")] = "drumline/v1",
    tls_ca: options.TlsCa = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    password_file: options.PasswordFile = None,
) -> None:
    """Send a job to a worker and stream its answer."""
    address = options.broker_address(broker, tls_ca, tls_cert, tls_key, password_file)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    request = Request(
        id=job_id,
        prompt=prompt if raw else None,
        messages=None if raw else (Message(role="user", content=prompt),),
        max_tokens=max_tokens,
        sampling=sampling,
        deadline_s=deadline,
    )
    run_loop(_submit(request, address, client, options.mqtt_protocol(mqtt), Topics(prefix), timeout))


async def _submit(
    request: Request, address: BrokerAddress, name: str, protocol: ProtocolLevel, topics: Topics, timeout: float
) -> None:
    fields = {field: getattr(request, field) for field in request.model_fields_set if field != "processors"}
    async with Client(
        address.host,
        address.port,
        name=name,
        protocol=protocol,
        username=address.username,
        password=address.password,
        tls=address.tls,
        topics=topics,
    ) as client:
        try:
            async with asyncio.timeout(timeout):
                job = await client.submit(**fields)
        except TimeoutError:
            raise InvalidRequest("--broker", f"no worker accepted the job within {timeout:g} s") from None
        try:
            async for chunk in job:
                print(chunk.text, end="", flush=True)
            result = await job.result()
        except asyncio.CancelledError:  # Ctrl-C: nobody reads on, so nobody need write on
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_TIMEOUT_S):
                    await job.cancel()
            raise
    print(flush=True)
    first = "-" if result.timings.first_token_s is None else f"{result.timings.first_token_s:.2f} s"
    print(
        f"[{result.stop_reason}: {result.usage.prompt_tokens} + {result.usage.generated_tokens} tokens, "
        f"first after {first}, seed {result.seed}]",
        file=sys.stderr,
    )
    result.raise_for_status()
