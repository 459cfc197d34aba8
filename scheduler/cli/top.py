"""`drumline top`: a worker's rows, queue and rates in a terminal."""

import json
import locale
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Annotated

import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from drumline.model.errors import EngineFailed, InvalidRequest
from drumline.scheduler.cli import options
from drumline.scheduler.cli.ask import ask
from drumline.scheduler.cli.loop import handled
from drumline.scheduler.cli.top_screen import Counters, InAscii, Marks, screen
from drumline.scheduler.live_view import LiveView

TIMEOUT_S = 5.0
PIPED_WIDTH = 110
LEAST_INTERVAL_S = 0.1
AGAIN, END = b".", b"q"
"""What wakes the drawing: to draw again, or to end."""


@dataclass(frozen=True)
class Seen:
    """A worker at one moment."""

    view: LiveView
    counters: Counters


def top(
    url: options.WorkerUrl = options.DEFAULT_URL,
    once: Annotated[bool, typer.Option("--once", help="Print what is seen now, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: as one JSON object.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
) -> None:
    """Look at a running worker: its rows as lanes, queue, rates, percentiles, outcomes. q or Ctrl-C ends it.

    Where the output is no terminal it is printed once.
    """
    url = options.worker_url(url)
    if not LEAST_INTERVAL_S <= interval <= 3600:
        raise InvalidRequest("--interval", f"must be from {LEAST_INTERVAL_S} to 3600 seconds, not {interval:g}")
    if as_json and not once:
        raise InvalidRequest("--json", "needs --once")
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    if once or not console.is_terminal or console.is_dumb_terminal:
        seen = look(url)
        if as_json:
            print(json.dumps(seen.view.model_dump() | {"counters": asdict(seen.counters)}))
        else:
            console.print(_screen(console, seen, None, _marks(console)))
        return
    _watch(console, url, interval)


def _marks(console: Console) -> Marks:
    """Of the output and of the user's locale: in the C locale Python writes UTF-8, which the terminal may not read."""
    return Marks.for_encoding(console.encoding, locale.getencoding())


def look(url: str) -> Seen:
    """Ask a worker how it is; raises `EngineFailed` with the reason where it does not say."""
    view, _ = ask(f"{url}/live.json", TIMEOUT_S)
    page, _ = ask(f"{url}/metrics", TIMEOUT_S)
    try:
        seen = LiveView.from_json(view)
        return Seen(seen, _counters(page.decode(), seen.name))
    except (InvalidRequest, ValueError, OverflowError):
        raise EngineFailed(f"{url}: what answers there is no drumline worker") from None


def _counters(page: str, name: str) -> Counters:
    """Of the scheduler of this name; raises `ValueError` or `OverflowError` for what is no metrics page."""
    values: dict[tuple[str, ...], int] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("scheduler", None) == name and sample.name.endswith("_total"):
                values[(sample.name.removeprefix("drumline_"), *labels.values())] = int(sample.value)
    by_reason = {key[1]: number for key, number in values.items() if key[0] == "rejected_total" and number}
    return Counters(
        outcomes={key[1]: number for key, number in values.items() if key[0] == "requests_total"},
        rejected=by_reason,
        generated_tokens=values.get(("generated_tokens_total",), 0),
        computed_tokens=values.get(("prompt_tokens_total", "computed"), 0),
        reused_tokens=values.get(("prompt_tokens_total", "reused"), 0),
        preemptions=values.get(("preemptions_total",), 0),
    )


class _Looker(threading.Thread):
    """Looks again and again, so that keys and resizes never wait for a worker that does not answer."""

    def __init__(self, url: str, interval_s: float, wake: int) -> None:
        super().__init__(name="drumline-top", daemon=True)
        self._url, self._interval_s, self._wake = url, interval_s, wake
        self.seen: Seen | None = None
        self.trouble = ""
        """Why the last look saw nothing."""
        self.answered_at = time.monotonic()

    def run(self) -> None:
        """Until the process ends."""
        while True:
            try:
                self.seen, self.trouble, self.answered_at = look(self._url), "", time.monotonic()
            except EngineFailed as error:
                self.trouble = str(error)
            with suppress(OSError):  # nobody listens any more
                os.write(self._wake, AGAIN)
            time.sleep(self._interval_s)


def _watch(console: Console, url: str, interval_s: float) -> None:
    """Draw until q, Ctrl-C, SIGTERM or a lost terminal."""
    marks = _marks(console)
    with (
        _woken_by_signals() as (woken, wake),
        _keys() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        looker = _Looker(url, interval_s, wake)
        looker.start()
        while True:
            live.update(_drawn(console, looker, url, marks), refresh=True)
            ready, _, _ = select.select([woken, *keys], [], [], 1.0)  # a second at most, for the age of what is shown
            if woken in ready and END in os.read(woken, 4096):
                return
            if keys and keys[0] in ready and os.read(keys[0], 64)[:1] in (b"q", b"Q", b"\x04", b""):
                return


def _drawn(console: Console, looker: _Looker, url: str, marks: Marks) -> RenderableType:
    seen, trouble = looker.seen, looker.trouble
    if not trouble:
        return Text(f"looking at {url}") if seen is None else _screen(console, seen, console.height, marks)
    age_s = time.monotonic() - looker.answered_at
    lost = Text(f"no answer for {age_s:.0f} s from {trouble}", "bold red", no_wrap=True, overflow="ellipsis")
    shown = lost if seen is None else Group(lost, _screen(console, seen, console.height - 1, marks))
    return InAscii.where_needed(shown, marks)


def _screen(console: Console, seen: Seen, height: int | None, marks: Marks) -> RenderableType:
    return screen(seen.view, seen.counters, console.width, height, marks)


@contextmanager
def _keys() -> Iterator[list[int]]:
    """The terminal that keys come from, each at once and unseen; none where there is no such terminal."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield []
        return
    import termios  # not on Windows
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    single = termios.tcgetattr(keyboard)
    single[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell with our screen
    termios.tcsetattr(keyboard, termios.TCSADRAIN, single)
    try:
        yield [keyboard]
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


@contextmanager
def _woken_by_signals() -> Iterator[tuple[int, int]]:
    """A pipe that wakes `select`: with `END` where a signal ends us, with `AGAIN` where the terminal has another size.

    Nothing is raised in a handler: it could hit any line, also those that put the terminal back.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def waking(word: bytes) -> Callable[[int, FrameType | None], None]:
        def wake(number: int, frame: FrameType | None) -> None:
            with suppress(BlockingIOError):
                os.write(writing, word)

        return wake

    end = waking(END)
    try:
        with handled(SIGINT=end, SIGTERM=end, SIGHUP=end, SIGWINCH=waking(AGAIN)):
            yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)
