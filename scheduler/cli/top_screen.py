"""How `drumline top` looks: a worker seen once, as lines for a terminal of any width and height."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from drumline.scheduler.live_view import LiveRow, LiveView, Percentiles
from drumline.scheduler.policy import PRIORITIES

WIDE, MIDDLE, NARROW = 100, 70, 55
"""Columns from which lanes show tenant and class, a bar, and the rate; the other lines shrink with them."""
BAR = 16
NOW_S = 5
"""The rate now is that of so many whole seconds: single ones jump."""
HEADINGS = ("row", "request", "tenant", "class", "phase", "", "tokens", "per s", "age")
STYLES = {
    "ready": "green",
    "starting": "yellow",
    "draining": "yellow",
    "failed": "bold red",
    "prefill": "magenta",
    "shares a prefix": "dim",
    "decode": "cyan",
    "completed": "green",
    "cancelled": "yellow",
    "expired": "yellow",
    "rejected": "magenta",
}
CUT = "~"
"""In ASCII, where a text goes on."""
OTHER_LINES = 12
"""What stands around the lanes and the answers."""


@dataclass(frozen=True)
class Counters:
    """Totals since the worker started, as its metrics page has them."""

    outcomes: dict[str, int]
    rejected: dict[str, int]
    """By reason; reasons that never were are left out."""
    generated_tokens: int
    computed_tokens: int
    """Of prompts."""
    reused_tokens: int
    preemptions: int


@dataclass(frozen=True)
class Marks:
    """What bars are drawn with; `for_encoding` chooses what the terminal can show."""

    full: str
    half: str
    empty: str
    levels: str

    @classmethod
    def for_encoding(cls, *encodings: str) -> "Marks":
        """Blocks where all of these are UTF-8, else ASCII."""
        if all(encoding.lower().replace("-", "").startswith("utf") for encoding in encodings):
            return cls("█", "▒", "·", " ▁▂▃▄▅▆▇█")
        return cls("#", "=", ".", " .:-=+*#@")


class InAscii:
    """Something drawn with ASCII alone: of other letters each cell is a `?`."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    @classmethod
    def where_needed(cls, shown: RenderableType, marks: Marks) -> RenderableType:
        """As it is for a terminal that has other marks."""
        return cls(shown) if marks.full.isascii() else shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._shown, options):
            letters = (
                part if part.isascii() else CUT if part == "…" else "?" * cell_len(part) for part in segment.text
            )
            yield segment._replace(text="".join(letters))


def screen(view: LiveView, counters: Counters, width: int, height: int | None, marks: Marks) -> RenderableType:
    """The whole screen; `height` None shows every row and answer."""
    room = None if height is None else max(1, height - OTHER_LINES - len(view.troubles))
    lanes = min(view.capacity, room or view.capacity)
    answers = len(view.answers) if room is None else max(0, room - lanes - 2)
    shown = Group(
        _head(view),
        *(Text(f"  ! {plain(trouble)}", "bold red") for trouble in view.troubles),
        _flow(view, width, marks),
        Text(),
        _lanes(view, lanes, width, marks),
        *([Text(f"  {_more(view, lanes)}", "dim")] if lanes < view.capacity else []),
        Text(),
        _queue(view),
        _percentiles(view, width),
        *_totals(counters),
        *_answers(view, answers, width),
    )
    return InAscii.where_needed(shown, marks)


def plain(text: str) -> str:
    """What somebody else chose, without what a terminal would obey."""
    return "".join(character if character.isprintable() else "·" for character in text)


def _head(view: LiveView) -> Text:
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(plain(view.name), "bold").append("  ").append(view.state, STYLES[view.state])
    served = plain(f"{view.model}  {view.precision} on {view.backend}")
    return head.append(f"  {served}  up {duration(view.uptime_s)}", "dim")


def _flow(view: LiveView, width: int, marks: Marks) -> Text:
    """Tokens a second, over the last seconds and the last minute; how full rows and keys and values are."""
    newest, prompt = (_mean(tokens[-NOW_S:]) for tokens in (view.generated_by_second, view.prompt_by_second))
    used = view.kv_tokens / view.kv_capacity_tokens if view.kv_capacity_tokens else 0.0
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{newest:>5.0f}", "bold").append(" tokens/s out  " if width >= NARROW else "/s out  ")
    line.append(f"{prompt:>5.0f}", "bold").append(" in  ")
    levels = f"rows {len(view.rows)}/{view.capacity}" + (f"  K/V {used:.0%}" if width >= NARROW else "")
    seconds = min(len(view.generated_by_second), width - len(line) - len(levels) - 2)
    if seconds > 0:
        line.append(f"{sparkline(view.generated_by_second[-seconds:], marks)}  ", "cyan")
    return line.append(levels)


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def sparkline(values: Sequence[int], marks: Marks) -> str:
    """One character a value, the highest one full."""
    highest = max(values, default=0)
    steps = len(marks.levels) - 1
    return "".join(marks.levels[-(-value * steps // highest) if highest else 0] for value in values)


def _lanes(view: LiveView, number: int, width: int, marks: Marks) -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(width=3, justify="right")
    table.add_column(ratio=3, no_wrap=True, overflow="ellipsis")
    if width >= WIDE:
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(width=6, no_wrap=True)
    table.add_column(width=15 if width >= MIDDLE else 7, no_wrap=True, overflow="ellipsis")
    if width >= MIDDLE:
        table.add_column(width=BAR, no_wrap=True)
    table.add_column(width=14 if width >= NARROW else 9, justify="right", no_wrap=True, overflow="ellipsis")
    for _ in range(2 if width >= NARROW else 1):
        table.add_column(width=7, justify="right", no_wrap=True)
    table.add_row(*_cells(width, *HEADINGS), style="dim")
    busy = {row.row: row for row in view.rows}
    shown = [*sorted(busy), *(row for row in range(view.capacity) if row not in busy)][:number]
    for number in sorted(shown):
        if number in busy:
            table.add_row(*_lane(busy[number], width, marks))
        else:
            table.add_row(*_cells(width, str(number), "", "", "", "free", marks.empty * BAR, "", "", ""), style="dim")
    return table


def _lane(row: LiveRow, width: int, marks: Marks) -> list[Text]:
    job = plain(row.job) + (f"#{row.choice}" if row.choice else "")
    bar = progress_bar(row, marks)
    phase = Text(row.phase, STYLES[row.phase])
    prompt = f"{row.prompt_tokens}+" if width >= NARROW else ""
    tokens = f"{prompt}{row.generated_tokens}/{row.budget_tokens}"
    rate = f"{row.tokens_per_s:.1f}" if row.tokens_per_s else ""
    cells = (str(row.row), job, plain(row.tenant), row.priority, phase, bar, tokens, rate, duration(row.age_s))
    return _cells(width, *cells)


def progress_bar(row: LiveRow, marks: Marks) -> Text:
    """What is computed of the prompt and generated of the budget, over both together."""
    whole = max(1, row.prompt_tokens + row.budget_tokens)
    prompt = round(BAR * min(row.cached_tokens, row.prompt_tokens) / whole)
    done = round(BAR * (min(row.cached_tokens, row.prompt_tokens) + row.generated_tokens) / whole)
    done = min(BAR, max(prompt, done))
    text = Text(marks.half * prompt, "magenta").append(marks.full * (done - prompt), "cyan")
    return text.append(marks.empty * (BAR - done), "dim")


def _cells(width: int, *cells: str | Text) -> list[Text]:
    """A lane's cells, without those that there is no room for."""
    texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
    number, job, tenant, priority, phase, bar, tokens, rate, age = texts
    who = [tenant, priority] if width >= WIDE else []
    work = [phase, bar] if width >= MIDDLE else [phase]
    return [number, job, *who, *work, tokens, *([rate] if width >= NARROW else []), age]


def _more(view: LiveView, shown: int) -> str:
    busy = max(0, len(view.rows) - shown)
    return f"and {view.capacity - shown} rows more, {busy} of them busy"


def _queue(view: LiveView) -> Text:
    line = Text("queue    ", "bold", no_wrap=True, overflow="ellipsis")
    for priority in reversed(PRIORITIES):
        line.append(f"{priority} {view.queued.get(priority, 0)}  ", "")
    return line.append(f"oldest {duration(view.oldest_queued_s)}" if view.oldest_queued_s else "nobody waits", "dim")


def _percentiles(view: LiveView, width: int) -> Table:
    narrow = width < NARROW
    table = Table.grid(padding=(0, 1 if narrow else 2))
    names = ("first", "between", "total") if narrow else ("first token", "between tokens", "total")
    for name, percentiles in zip(names, (view.first_token_s, view.inter_token_s, view.total_s), strict=True):
        table.add_row(*(Text(part, no_wrap=True) for part in (name, *_three(percentiles))))
    table.columns[0].style = "bold"
    return table


def _three(percentiles: Percentiles | None) -> Iterable[str]:
    if percentiles is None:
        return ("no answer yet",)
    return (f"p50 {duration(percentiles.p50)}", f"p90 {duration(percentiles.p90)}", f"p99 {duration(percentiles.p99)}")


def _totals(counters: Counters) -> Iterable[Text]:
    line = Text("so far   ", "bold", no_wrap=True, overflow="ellipsis")
    for outcome, number in counters.outcomes.items():
        style = STYLES.get(outcome, "red") if number else "dim"
        line.append(f"{plain(outcome)} ", style).append(f"{number}  ", "")
    reasons = ", ".join(f"{plain(reason)} {number}" for reason, number in counters.rejected.items())
    yield line.append(f"({reasons})" if reasons else "", "dim")
    prompt = f"of prompts {counters.computed_tokens} computed, {counters.reused_tokens} reused"
    told = f"{counters.generated_tokens} generated, {prompt}; {counters.preemptions} preemptions"
    yield Text("tokens   ", "bold", no_wrap=True, overflow="ellipsis").append(told, "not bold")


def _answers(view: LiveView, number: int, width: int) -> Iterable[RenderableType]:
    if not number or not view.answers:
        return
    shown = [True, True, width >= MIDDLE, width >= NARROW, True, True]
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for columns in compress((10, 9, 14, 7, 8), shown[1:]):
        table.add_column(width=columns, justify="right" if columns < 9 else "left", no_wrap=True)
    headings = ("answer", "outcome", "ended", "tokens", "first", "total")
    table.add_row(*map(Text, compress(headings, shown)), style="dim")
    for answer in view.answers[:number]:
        cells = (
            Text(plain(answer.job) + (f"  {plain(answer.text)}" if answer.text else "")),
            Text(answer.status, STYLES.get(answer.status, "red")),
            Text(plain(answer.stop_reason)),
            Text(f"{answer.prompt_tokens}+{answer.generated_tokens}"),
            Text("" if answer.first_token_s is None else duration(answer.first_token_s)),
            Text(duration(answer.total_s)),
        )
        table.add_row(*compress(cells, shown))
    yield Text()
    yield table


def duration(seconds: float) -> str:
    """Short: 12 ms, 3.4 s, 2m05s, 7h12m, 3d04h."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{left:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"
