"""The `drumline` command. Errors are one line on stderr and exit code 2."""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import typer

from drumline.model.errors import DrumlineError
from drumline.model.openmp import share_pool
from drumline.scheduler.cli import logs
from drumline.scheduler.cli.loop import handled
from drumline.scheduler.log import Event

# How often an OpenMP thread that waits looks again before it sleeps. With the default, two threads on two cores that
# another process shares wait for each other: a step of 16 rows took 404 ms beside one busy process, 216 ms with this
# (104 against 109 ms when quiet). Read when libgomp is loaded, hence set before the commands are imported.
SPIN_COUNT = "1000"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0, or 1 where a comparison differs, or 2 after one clear line about what is wrong."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    share_pool()
    given = list(sys.argv[1:] if arguments is None else arguments)
    with logs.on_stderr(), _signals_before_there_is_a_loop():
        _run(given)


def _signals_before_there_is_a_loop() -> AbstractContextManager[None]:
    """While the imports take their seconds SIGTERM is a Ctrl-C, and SIGUSR2 does nothing: there is nothing to trace."""
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return handled(SIGTERM=signal.default_int_handler, SIGUSR2=signal.SIG_IGN)


def _run(given: list[str]) -> None:
    try:
        from drumline.scheduler.cli.app import app  # takes seconds: an interruption meanwhile is no traceback either

        code = app(args=given or ["--help"], prog_name="drumline", standalone_mode=False)
    except typer.TyperException as error:
        _complain(error.format_message())
    except DrumlineError as error:
        _complain(str(error))
    except OSError as error:
        text = error.strerror or str(error) or type(error).__name__
        _complain(f"{error.filename}: {text}" if error.filename else text)
    except (KeyboardInterrupt, asyncio.CancelledError, typer.Abort):
        _say("interrupted", logging.WARNING)
        _end_at_once(130)
    else:
        sys.exit(code or 0)


def _complain(message: str) -> None:
    _say(" ".join(message.split()), logging.ERROR)
    sys.exit(2)


def _say(message: str, level: int) -> None:
    """The last line of a command, in the form of those before."""
    if logs.writes_json():
        logging.getLogger("drumline").log(level, Event("ended", reason=message))
    else:
        print(f"drumline: {message}", file=sys.stderr)


def _end_at_once(code: int) -> None:
    """Without waiting for a thread that loads a model or compiles: nothing stops it, and it has nothing to save."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
