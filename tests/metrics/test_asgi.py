"""The pages within a host's own server: a real one."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from drumline.metrics.asgi import make_asgi_app
from drumline.metrics.pages import Asked, Page, Pages, Response, as_json
from tests.metrics.scraping import OPENMETRICS, busy, http


@asynccontextmanager
async def served(pages: Pages, root_path: str = "") -> AsyncIterator[str]:
    """The URL where uvicorn serves them, on this loop."""
    config = uvicorn.Config(make_asgi_app(pages), lifespan="off", log_config=None, root_path=root_path)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # whoever comes before the server is up waits here
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    busy(registry, "main")
    return registry


def well() -> list[str]:
    return []


@pytest.mark.parametrize("root_path", ["", "/drumline"])
async def test_every_page_at_the_root_and_mounted(registry: CollectorRegistry, root_path: str) -> None:
    pages = Pages(registry, health=well, ready=lambda: ["broker"])
    async with served(pages, root_path) as url:
        status, headers, body = await asyncio.to_thread(http, f"{url}/metrics")
        assert (status, headers["Content-Type"]) == (200, pages.respond("GET", "/metrics").content_type)
        assert body == pages.respond("GET", "/metrics").body
        assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
        status, headers, nothing = await asyncio.to_thread(http, f"{url}/metrics", "HEAD")
        assert (status, nothing, int(headers["Content-Length"])) == (200, b"", len(body))
        query = "name[]=drumline_request_seconds_bucket"
        _, _, body = await asyncio.to_thread(http, f"{url}/metrics?{query}", Accept=OPENMETRICS)
        (family,) = text_string_to_metric_families(body.decode())
        assert {sample.exemplar.labels["job_id"] for sample in family.samples if sample.exemplar} == {"main-1"}
        status, _, body = await asyncio.to_thread(http, f"{url}/readyz")
        assert (status, json.loads(body)) == (503, {"ok": False, "reasons": ["broker"]})
        assert (await asyncio.to_thread(http, f"{url}/nowhere"))[0] == 404
        assert (await asyncio.to_thread(http, f"{url}/metrics", "POST", b"x"))[0] == 405


async def test_a_slow_page_holds_up_neither_the_loop_nor_a_probe(registry: CollectorRegistry) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(asked: Asked) -> Response:
        begun.set()
        assert go_on.wait(30)
        return as_json("done")

    async with served(Pages(registry, health=well, ready=well, pages={"/slow": Page(slow)})) as url:
        waiting = asyncio.create_task(asyncio.to_thread(http, f"{url}/slow"))
        assert await asyncio.to_thread(begun.wait, 30)
        assert (await asyncio.to_thread(http, f"{url}/healthz"))[0] == 200
        assert not waiting.done()
        go_on.set()
        assert (await waiting)[2] == b'"done"\n'


async def test_what_is_not_http_is_unknown(registry: CollectorRegistry) -> None:
    async def never(*_: object) -> None:
        raise AssertionError

    app = make_asgi_app(Pages(registry, health=well, ready=well))
    with pytest.raises(ValueError, match="scope: only http is served, not websocket"):
        await app({"type": "websocket"}, never, never)
