"""The page for browsers in a real one: Chromium, against a real server of a real scheduler."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.browser import Tab, open_tab, running_browser
from drumline import Scheduler
from drumline.metrics.exporter import Exporter
from drumline.metrics.pages import Page, Pages, Response
from drumline.scheduler.live_page import html_page, live_json
from drumline.scheduler.live_view import LiveAnswer, LiveRow, LiveView, Percentiles
from tests.drive import asking, held
from tests.metrics.scraping import http
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

HOSTILE = "<img src=x onerror=\"document.title='owned'\">" + "w" * 80
PHONE = 360


@pytest.fixture(scope="module")
def browser() -> Iterator[str]:
    try:
        with running_browser() as devtools:
            yield devtools
    except FileNotFoundError as error:
        if os.environ.get("DRUMLINE_REQUIRE_EXTERNAL") == "1":
            pytest.fail(f"{error}, and DRUMLINE_REQUIRE_EXTERNAL=1 requires it")
        pytest.skip(str(error))


def served(live: Page, port: int = 0) -> Exporter:
    """The page and what it asks for."""
    pages = {"/": html_page(), "/live.json": live}
    return Exporter(Pages(CollectorRegistry(), health=list, ready=list, pages=pages), port=port)


@asynccontextmanager
async def looking(browser: str, url: str, width: int = 1200) -> AsyncIterator[Tab]:
    """A tab with the page, which must have talked to its own server alone."""
    async with open_tab(browser) as tab:
        await tab.resize(width, 800, phone=width < 600)
        await tab.visit(f"{url}/")
        await tab.until("document.getElementById('age')?.textContent")
        yield tab
        assert {address for address in tab.requests if not address.startswith((f"{url}/", "data:"))} == set()


async def texts(tab: Tab, selector: str) -> list[str]:
    return await tab.evaluate(f"[...document.querySelectorAll({selector!r})].map(node => node.textContent)")


async def cells(tab: Tab, selector: str) -> list[list[str]]:
    """The texts of a table's rows."""
    return await tab.evaluate(
        f"[...document.querySelectorAll({selector!r})].map(row => [...row.cells].map(cell => cell.textContent))"
    )


async def test_it_shows_what_the_scheduler_says(browser: str):
    async with Scheduler(tiny_model(window=64), rows=3, name="drums") as scheduler:
        await (await scheduler.submit(asking(tokens=2, id="done", tenant="garden"))).result()
        gate, _ = await held(scheduler, tokens=9, id="running", tenant="kitchen", priority="high")
        for _ in range(2):
            gate.step()
            await gate.arrived()
        for number in range(3):
            scheduler.submit_nowait(asking(id=f"next-{number}", priority="low"))
        with served(live_json(lambda: scheduler)) as server:
            async with looking(browser, server.url) as tab:
                await tab.until("document.querySelectorAll('.lane').length")
                view = scheduler.live()
                (row,) = view.rows
                shown = await cells(tab, ".lane")
                lane = shown.pop(row.row)
                assert lane[:6] == [str(row.row), "running", "kitchen", "high", "decode", ""]
                assert lane[6] == f"{row.prompt_tokens} + {row.generated_tokens}/{row.budget_tokens}" == "1 + 2/9"
                assert [line[1] for line in shown] == ["free", "free"]
                (label,) = await tab.evaluate(
                    "[...document.querySelectorAll('.lane:not(.free) .bar')].map(bar => bar.ariaLabel)"
                )
                assert label == "1 of 1 prompt tokens computed, 2 of at most 9 generated"
                assert await texts(tab, "#live") == ["1 of 3"]
                assert view.queued == {"low": 3, "normal": 0, "high": 0}
                assert await cells(tab, "#queue tr") == [["high", "0"], ["normal", "0"], ["low", "3"]]
                assert await texts(tab, "#kv-tokens") == [f"{view.kv_tokens} of {view.kv_capacity_tokens} tokens"]
                assert await texts(tab, "#name, #state") == ["drums", "ready"]
                (answer,) = await cells(tab, "#answers tbody tr:first-child")
                assert answer[:6] == ["✓ completed", "done", "garden", "normal", "budget", "8 + 2"]
                assert await texts(tab, ".said td") == [""]
                assert await tab.evaluate("getComputedStyle(document.querySelector('.said')).display") == "none"
                assert tab.complaints == []
        gate.open()


async def test_it_follows_along(browser: str):
    async with Scheduler(tiny_model(window=64), rows=2) as scheduler:
        gate, job = await held(scheduler, tokens=4, id="running")
        with served(live_json(lambda: scheduler, show_text=True)) as server:
            async with looking(browser, server.url) as tab:
                await tab.until("document.querySelector('.lane')?.cells[6].textContent === '1 + 0/4'")
                gate.step()
                await tab.until("document.querySelector('.lane').cells[6].textContent === '1 + 1/4'")
                gate.open()
                result = await job.result()
                await tab.until("document.querySelector('.lane').className === 'lane free'")
                assert await texts(tab, ".said td") == [result.text]
                assert tab.complaints == []


def row(number: int, **fields: object) -> LiveRow:
    numbers = {"prompt_tokens": 1800, "cached_tokens": 900, "generated_tokens": 0, "budget_tokens": 120_000}
    names = {"job": HOSTILE, "tenant": HOSTILE, "priority": "normal", "phase": "shares a prefix"}
    return LiveRow(row=number, choice=number % 2, tokens_per_s=1234.5, age_s=93_784.0, **numbers, **names, **fields)


def crowded() -> LiveView:
    """64 rows, no name of which anybody would choose."""
    answer = LiveAnswer(
        job=HOSTILE, tenant=HOSTILE, priority="high", status="failed", stop_reason="error", prompt_tokens=1800,
        generated_tokens=120_000, queued_s=12_000.0, first_token_s=None, inter_token_s=None, total_s=99_999.0,
        ended_ago_s=99_999.0, text=HOSTILE,
    )  # fmt: skip
    percentiles = Percentiles(p50=0.01, p90=61.0, p99=99_999.0)
    return LiveView(
        name=HOSTILE, model=HOSTILE, precision="int8", backend="cpu", version="0.1.0", state="failed",
        troubles=(HOSTILE,), uptime_s=1e7, capacity=64, rows=tuple(map(row, range(60))),
        queued={"low": 0, "normal": 123_456, "high": 1}, oldest_queued_s=99_999.0, kv_tokens=10**9,
        kv_capacity_tokens=2 * 10**9, generated_by_second=(10**6,) * 60, prompt_by_second=(0,) * 60, finished=10**9,
        steps=1, first_token_s=percentiles, inter_token_s=percentiles, total_s=None, answers=(answer,) * 20,
    )  # fmt: skip


@pytest.mark.parametrize("width", [PHONE, 1200])
async def test_strangers_names_are_text_and_fit(browser: str, width: int):
    document = crowded().model_dump_json().encode()
    with served(Page(lambda asked: Response(document, "application/json"))) as server:
        async with looking(browser, server.url, width) as tab:
            await tab.until("document.querySelectorAll('.lane').length === 64")
            lanes = await cells(tab, ".lane")
            assert lanes[0][1:3] == [HOSTILE, HOSTILE]
            assert lanes[1][1] == f"{HOSTILE} (choice 1)"
            assert await texts(tab, "#name, #troubles") == [HOSTILE, HOSTILE]
            assert (await texts(tab, ".said td"))[0] == HOSTILE
            assert await tab.evaluate("document.images.length") == 0
            assert "owned" not in await tab.evaluate("document.title.split(' · ')[0]")
            assert await tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.complaints == []


async def test_it_says_that_the_worker_is_gone_and_goes_on_when_it_is_back(browser: str):
    async with Scheduler(tiny_model(window=64), rows=2, name="drums") as scheduler:
        with served(live_json(lambda: scheduler)) as server:
            port = server.port
            async with looking(browser, server.url) as tab:
                await tab.until("document.querySelectorAll('.lane').length")
                assert await tab.evaluate("document.getElementById('stale').hidden")
                server.close()
                await tab.until("!document.getElementById('stale').hidden")
                assert "No answer from the worker" in (await texts(tab, "#stale"))[0]
                assert "next try in" in (await texts(tab, "#age"))[0]
                with served(live_json(lambda: scheduler), port):
                    await tab.until("document.getElementById('stale').hidden")


async def test_while_the_worker_starts_it_says_what_for(browser: str):
    with served(live_json(lambda: None, starting=lambda: ["the model is being loaded"])) as server:
        async with looking(browser, server.url) as tab:
            assert "the model is being loaded" in (await texts(tab, "#stale"))[0]


async def test_a_browser_lets_it_run_nothing_but_its_own_script(browser: str):
    async with Scheduler(tiny_model(), rows=1) as scheduler:
        with served(live_json(lambda: scheduler)) as server:
            async with looking(browser, server.url) as tab:
                await tab.evaluate(
                    "document.head.append(Object.assign(document.createElement('style'), {textContent: '*{}'}))"
                )
                await tab.until("true")
                assert "Content Security Policy" in tab.complaints[0]
                with pytest.raises(RuntimeError, match="TrustedHTML"):
                    await tab.evaluate("document.body.innerHTML = '<p>'")
                status, headers, _ = http(f"{server.url}/")
                assert status == 200
                assert headers["Content-Type"] == "text/html; charset=utf-8"
                assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")


async def test_an_event_loop_that_hangs_is_a_503(one_thread: None):
    """The event loop is held by the request itself, which waits for it."""
    async with Scheduler(tiny_model(), rows=1) as scheduler:
        pages = Pages(CollectorRegistry(), health=list, ready=list)
        pages.add("/live.json", live_json(lambda: scheduler, patience_s=0.01))
        with Exporter(pages, port=0) as server:
            status, _, body = http(f"{server.url}/live.json")
    assert status == 503
    assert b"the event loop did not answer within 0.01 s" in body
