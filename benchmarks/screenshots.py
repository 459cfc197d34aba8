"""Pictures of the live page for the README: a real worker under a mixed load, seen by a real browser.

python -m benchmarks.screenshots [--folder docs/images] [--dark]
"""

import argparse
import asyncio
import io
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.browser import Tab, open_tab, running_browser
from benchmarks.served import served
from drumline.client import Client
from drumline.model.errors import DrumlineError

ROWS = 8
COLOURS = 128
"""A page of few colours needs no more, and a third of the bytes."""
LOAD_S = 62.0
"""Before the pictures: the sparklines show a minute."""
ARRIVALS = 1.1
"""Jobs a second, now and then a burst of `BURST`."""
BURST = 7
LAST_BURST_S = 3.0
"""So long before the pictures: some wait then."""
BUSY = f"""(([...phases], all) => phases.length === all && Number(waiting.textContent) > 0
  && phases.filter(cell => cell.textContent === 'decode').length > all / 2)
  (document.querySelectorAll('.lane:not(.free) > :nth-child(5)'), {ROWS})"""
"""In the page: every row is taken, most of them decode, and some jobs wait."""
DEVICES = ("kitchen-display", "workshop-radio", "greenhouse", "reading-lamp")
QUESTIONS = (
    "What is the capital of France?", "Name three herbs for a soup.", "How do I sharpen a chisel?",
    "When are tomatoes ripe?", "Tell a short story about a drummer.", "Why does bread rise?",
)  # fmt: skip
LETTER = "Sum this letter up in a sentence. The greenhouse is warm in the morning, and the tomatoes grow well. "


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description="Take pictures of the live page.")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    parser.add_argument("--dark", action="store_true", help="in dark colours, as page-dark.png and page-phone-dark.png")
    asked = parser.parse_args()
    with running_worker() as (broker, page), running_browser() as devtools:
        asyncio.run(_take(broker, page, devtools, asked.folder, "dark" if asked.dark else "light"))


@contextmanager
def running_worker() -> Iterator[tuple[int, str]]:
    """`drumline serve` of the packaged model: the port of its broker, and where its page is."""
    options = ("--rows", str(ROWS), "--metrics", "127.0.0.1:0", "--http", "127.0.0.1:0", "--name", "home")
    with served(*options, "--log-level", "error", ready=r"page +(http://\S+)") as (port, page):
        yield port, page[1]


async def _take(broker: int, page: str, devtools: str, folder: Path, colours: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    suffix = "" if colours == "light" else f"-{colours}"
    async with open_tab(devtools) as tab:
        await tab.prefer(colours)
        await tab.visit(page)
        load = asyncio.create_task(_load(broker))
        await asyncio.wait([load], timeout=LOAD_S)
        await tab.resize(1200, 980)
        await _shoot(tab, folder / f"page{suffix}.png")
        await tab.resize(390, 1250, phone=True)
        await _shoot(tab, folder / f"page-phone{suffix}.png")
        load.cancel()
        with suppress(asyncio.CancelledError):
            await load


async def _shoot(tab: Tab, file: Path) -> None:
    await tab.until(BUSY)
    await tab.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    picture = Image.open(io.BytesIO(await tab.screenshot())).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    print(file)


async def _load(port: int) -> None:
    """Jobs of several devices until it is cancelled."""
    draw = random.Random(3)
    clients = [Client("127.0.0.1", port, name=name) for name in DEVICES]
    async with clients[0], clients[1], clients[2], clients[3], asyncio.TaskGroup() as jobs:
        for at, many in _arrivals(draw):
            await asyncio.sleep(at)
            for _ in range(many):
                jobs.create_task(_one(draw.choice(clients), _job(draw), draw.random()))
        await asyncio.Event().wait()


def _arrivals(draw: random.Random) -> Iterator[tuple[float, int]]:
    """Seconds since the one before, and how many come."""
    passed = 0.0
    while (gap := draw.expovariate(ARRIVALS)) + passed < LOAD_S - LAST_BURST_S:
        passed += gap
        yield gap, BURST if draw.random() < 1 / 12 else 1
    yield LOAD_S - LAST_BURST_S - passed, 2 * BURST
    while True:
        yield 0.2, 1


def _job(draw: random.Random) -> dict[str, Any]:
    """A question, or a letter to be summed up; its answer of 16 to 220 tokens."""
    prompt = draw.choice(QUESTIONS) if draw.random() < 3 / 4 else LETTER * draw.randint(4, 16)
    job: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": round(min(220, max(16, draw.lognormvariate(4.3, 0.7)))),
        "priority": draw.choices(("high", "normal", "low"), (1, 4, 2))[0],
        "ignore_eos": draw.random() < 1 / 2,
    }
    if draw.random() < 1 / 10:
        job["deadline_s"] = 2.0
    return job


async def _one(client: Client, job: dict[str, Any], kind: float) -> None:
    """Send it and wait; one in twelve is given up after a second."""
    with suppress(DrumlineError):
        sent = await client.submit(**job)
        if kind < 1 / 12:
            await asyncio.sleep(1.0)
            await sent.cancel()
        await sent.result()


if __name__ == "__main__":
    main()
