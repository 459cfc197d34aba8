"""The `drumline` command. Errors are one line on stderr and exit code 2."""

import sys
from collections.abc import Sequence

import typer

from drumline.model.errors import DrumlineError
from drumline.scheduler.cli import bench, demo, generate, ledger, serve, submit, verify

app = typer.Typer(
    name="drumline",
    help="Batched generation for small language models: asyncio, MQTT, Prometheus.",
    no_args_is_help=True,
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
    try:
        code = app(args=arguments, standalone_mode=False)
    except typer.TyperException as error:
        _complain(error.format_message())
    except (DrumlineError, OSError) as error:
        _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        print("drumline: interrupted", file=sys.stderr)
        sys.exit(130)
    else:
        sys.exit(code or 0)


def _complain(message: str) -> None:
    print("drumline: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
