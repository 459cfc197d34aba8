"""`/live.json`, a scheduler as people look at it, and `live.html`, the page that shows it in a browser."""

import asyncio
import re
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import Future
from hashlib import sha256
from http import HTTPStatus
from importlib.resources import files

from drumline.metrics.pages import Asked, Page, Response, as_json
from drumline.scheduler.live_view import LiveView
from drumline.scheduler.scheduler import Scheduler

ANSWER_S = 2.0
"""How long the event loop may take to look; it comes back within milliseconds, however long a step takes."""


def live_json(
    current: Callable[[], Scheduler | None],
    *,
    show_text: bool = False,
    patience_s: float = ANSWER_S,
    starting: Callable[[], list[str]] = list,
    draining: Callable[[], bool] = lambda: False,
) -> Page:
    """`Scheduler.live` of the `current` one as a page.

    503 with the reasons where there is none yet, for which `starting` has them, or where the event loop does not answer
    in `patience_s`. A worker knows that it is `draining` before its scheduler does.

    Called on the scheduler's event loop, to which the page comes back from its server's threads.
    """
    loop = asyncio.get_running_loop()

    def answer(asked: Asked) -> Response:
        scheduler = current()
        if scheduler is None:
            return _unavailable(*starting())
        seen: Future[LiveView] = Future()

        def look() -> None:
            if not seen.set_running_or_notify_cancel():
                return  # too late: nobody waits any more
            try:
                view = scheduler.live(show_text=show_text)
                drains = draining() and view.state == "ready"
                seen.set_result(view.model_copy(update={"state": "draining"}) if drains else view)
            except Exception as error:
                seen.set_exception(error)

        try:
            loop.call_soon_threadsafe(look)
        except RuntimeError:
            return _unavailable("the event loop has ended")
        try:
            view = seen.result(patience_s)
        except TimeoutError:
            seen.cancel()
            return _unavailable(f"the event loop did not answer within {patience_s:g} s", *scheduler.health())
        return Response(view.model_dump_json().encode(), "application/json")

    return Page(answer)


def _unavailable(*reasons: str) -> Response:
    return as_json({"ok": False, "reasons": reasons}, HTTPStatus.SERVICE_UNAVAILABLE)


def html_page() -> Page:
    """The page for browsers. It asks for `live.json` beside it, so both go on one server.

    It may run its own script, and talk to nobody else: the content security policy names the hashes of both.
    """
    document = files("drumline.scheduler").joinpath("live.html").read_bytes()
    policy = (
        f"default-src 'none'; style-src {_hash(document, b'style')}; script-src {_hash(document, b'script')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"  # text never becomes HTML
    )
    headers = (("Content-Security-Policy", policy), ("Referrer-Policy", "no-referrer"))
    return Page(lambda asked: Response(document, "text/html; charset=utf-8", headers=headers))


def _hash(document: bytes, tag: bytes) -> str:
    """The one inline element of this tag, as a policy names it."""
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), document, re.DOTALL)
    return f"'sha256-{b64encode(sha256(content).digest()).decode()}'"
