"""The `drumline` command. Errors are one line on stderr and exit code 2."""

import asyncio
import logging
import sys
from collections.abc import Sequence

import typer

from drumline.model.errors import DrumlineError
from drumline.scheduler.cli import bench, demo, generate, ledger, serve, submit, verify

app = typer.Typer(
    name="drumline",
    help="Batched generation for small language models: asyncio, MQTT, Prometheus.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("serve")(serve.serve)
app.command("submit")(submit.submit)
app.command("generate")(generate.generate)
app.command("bench")(bench.bench)
app.command("verify")(verify.verify)
app.command("ledger")(ledger.ledger)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0, or 1 where a comparison differs, or 2 after one clear line about what is wrong."""
    # What it warns of reaches us as an exception, too, and that is the one line.
    logging.getLogger("drumline.mqtt.aiomqtt").setLevel(logging.ERROR)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=given or ["--help"], prog_name="drumline", standalone_mode=False)
    except typer.TyperException as error:
        _complain(error.format_message())
    except DrumlineError as error:
        _complain(str(error))
    except OSError as error:
        text = error.strerror or str(error) or type(error).__name__
        _complain(f"{error.filename}: {text}" if error.filename else text)
    except (KeyboardInterrupt, asyncio.CancelledError, typer.Abort):
        print("drumline: interrupted", file=sys.stderr)
        sys.exit(130)
    else:
        sys.exit(code or 0)


def _complain(message: str) -> None:
    print("drumline: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
