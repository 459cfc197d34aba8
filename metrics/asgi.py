"""The pages as an ASGI application, for a host that has an HTTP server of its own.

https://asgi.readthedocs.io/en/latest/specs/www.html
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from drumline.metrics.pages import Pages

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def make_asgi_app(pages: Pages) -> Callable[[Message, Receive, Send], Awaitable[None]]:
    """An application that answers with `pages`, mounted at any path or served by itself.

    What a page does runs on a thread of asyncio's, never on the event loop. Which names the server may be called by is
    for the host to check (the exporter of our own does it on loopback addresses). A scope that is not HTTP is a
    `ValueError`, which is how ASGI says that an application does not know it.
    """

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"scope: only http is served, not {scope['type']}")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        response = await asyncio.to_thread(
            pages.respond,
            scope["method"],
            scope["path"].removeprefix(scope.get("root_path", "")),
            scope["query_string"].decode("latin-1"),
            headers,
        )
        told = (
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            *response.headers,
        )
        encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in told]
        await send({"type": "http.response.start", "status": response.status.value, "headers": encoded})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else response.body})

    return app
