"""A device: sends all its prompts at once over MQTT, shows the answers as they come, and can change its mind.

    drumline serve --embedded-broker                                   # in one terminal; it prints the broker's port
    python examples/mqtt_client.py --broker mqtt://127.0.0.1:PORT --name sensor-1 "What is 7 times 8?" "Say hello."

`--cancel-after N` cancels the first job once N of its tokens have arrived. Exit code 1 where a job was refused or did
not complete (one that was cancelled on request counts as done). A password comes from DRUMLINE_MQTT_PASSWORD or from
the file that DRUMLINE_MQTT_PASSWORD_FILE names.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from drumline import DrumlineError, Message, Result
from drumline.client import BrokerAddress, Client, RemoteJob, Tls, parse_broker_url, with_credentials


async def device(arguments: argparse.Namespace, broker: BrokerAddress) -> bool:
    """Run all prompts on one connection; returns whether all went well."""
    async with Client(
        broker.host,
        broker.port,
        name=arguments.name,
        username=broker.username,
        password=broker.password,
        tls=broker.tls,
    ) as client:
        runs = [run(client, arguments, number) for number in range(1, len(arguments.prompts) + 1)]
        return all(await asyncio.gather(*runs))


async def run(client: Client, arguments: argparse.Namespace, number: int) -> bool:
    """Submit, stream, report."""
    prompt = arguments.prompts[number - 1]
    asked = {"messages": (Message(role="user", content=prompt),)} if arguments.chat else {"prompt": prompt}
    try:
        async with asyncio.timeout(arguments.timeout):
            job = await client.submit(max_tokens=arguments.max_tokens, **asked)
        cancel_after = arguments.cancel_after if number == 1 else None
        await show(job, number, cancel_after)
        result = await job.result()
    except TimeoutError:
        print(f"[{number}] nobody accepted it within {arguments.timeout:g} s")
        return False
    except DrumlineError as error:
        print(f"[{number}] refused: {error}")
        return False
    report(number, prompt, result)
    return result.status == "completed" or (result.status == "cancelled" and cancel_after is not None)


async def show(job: RemoteJob, number: int, cancel_after: int | None) -> None:
    """Print each chunk on a line of its own, for the jobs run side by side."""
    received = 0
    async for chunk in job:
        print(f"[{number}] > {chunk.text!r}", flush=True)
        received += len(chunk.token_ids)
        if cancel_after is not None and received >= cancel_after:
            await job.cancel()
            cancel_after = None


def report(number: int, prompt: str, result: Result) -> None:
    """The authoritative answer, which is the joined chunks."""
    usage, timings = result.usage, result.timings
    print(
        f"[{number}] {result.status}, {result.stop_reason}: {usage.prompt_tokens} + {usage.generated_tokens} tokens "
        f"in {timings.total_s:.2f} s: {prompt!r} -> {result.text!r}"
    )


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Send prompts to a worker over MQTT, all at once.")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--broker", required=True, help="mqtt://[user@]host:port, or mqtts:// for TLS")
    parser.add_argument("--tls-ca", type=Path, help="PEM file: who may vouch for the broker")
    parser.add_argument("--name", default="sensor-1", help="this device's name, a topic level")
    parser.add_argument("--max-tokens", type=int, default=64, help="budget of each answer")
    parser.add_argument("--chat", action="store_true", help="send the prompts as chat messages")
    parser.add_argument("--cancel-after", type=int, metavar="N", help="cancel the first job after N tokens")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds to wait for a worker to accept a job")
    arguments = parser.parse_args(given)
    try:
        broker = with_credentials(parse_broker_url(arguments.broker, Tls(arguments.tls_ca)), os.environ)
        well = asyncio.run(device(arguments, broker))
    except DrumlineError as error:
        sys.exit(str(error))
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
