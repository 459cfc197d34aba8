"""Jobs seen live: one lane a job that fills as tokens come; plain lines where the output is no terminal."""

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

BAR = 24
STYLES = {"waiting": "dim", "running": "cyan", "done": "green"}


@dataclass
class Lane:
    """One job on the screen: its token budget, and what has come of it."""

    name: str
    prompt: str
    budget: int
    tokens: int = 0
    text: str = ""
    stop_reason: str | None = None

    @property
    def state(self) -> str:
        """`waiting`, `running` or `done`."""
        return "done" if self.stop_reason else "running" if self.tokens else "waiting"


class Lanes:
    """A context manager that shows lanes while they change."""

    def __init__(self, console: Console, lanes: list[Lane]) -> None:
        self._console, self._lanes = console, lanes
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=12, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live.is_started:
            self._live.stop()

    def add(self, index: int, text: str, tokens: int) -> None:
        """New tokens of a job."""
        lane = self._lanes[index]
        if not lane.tokens:
            self._say(f"{lane.name}  first token    {lane.prompt[:60]}")
        lane.tokens += tokens
        lane.text += text

    def finish(self, index: int, stop_reason: str, tokens: int) -> None:
        """A job's end."""
        lane = self._lanes[index]
        lane.stop_reason, lane.tokens = stop_reason, tokens
        self._say(f"{lane.name}  {stop_reason:<7} {tokens:>4} tokens")

    def _say(self, line: str) -> None:
        if not self._live.is_started:
            self._console.print(line, highlight=False, markup=False, emoji=False)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1), expand=True)
        for width in (6, 7, BAR, 9):
            table.add_column(width=width, no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="crop")
        for lane in self._lanes:
            style = STYLES[lane.state]
            filled = min(BAR, round(BAR * lane.tokens / lane.budget))
            bar = Text("█" * filled, style) + Text("░" * (BAR - filled), "dim")
            newest = " ".join(lane.text.split())[-max(20, self._console.width - 56) :] or lane.prompt
            table.add_row(
                lane.name,
                Text(lane.stop_reason or lane.state, style),
                bar,
                f"{lane.tokens:>4}/{lane.budget}",
                Text(newest, "" if lane.text else "dim"),
            )
        return table
