"""Asking a running worker over HTTP."""

import http.client
import json
import urllib.error
import urllib.request
from email.message import Message

from drumline.model.errors import EngineFailed
from drumline.scheduler.cli.top_screen import plain


def ask(url: str, timeout_s: float, method: str = "GET") -> tuple[bytes, Message]:
    """The body of the answer, and its headers; raises `EngineFailed` with why not, in the worker's own words if any."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=timeout_s) as response:
            return response.read(), response.headers
    except urllib.error.HTTPError as error:
        with error:
            raise EngineFailed(f"{url}: {plain(_told(error))}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # the last: what answers speaks no HTTP
        reason = getattr(error, "reason", error)
        raise EngineFailed(f"{url}: {plain(str(reason).strip()) or type(reason).__name__}") from None


def _told(error: urllib.error.HTTPError) -> str:
    if error.code == http.HTTPStatus.NOT_FOUND:
        return "there is no such page; give the address that `drumline serve` has for --metrics"
    try:
        document = json.loads(error.read())
        return "; ".join(map(str, document["reasons"])) if "reasons" in document else str(document["error"])
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return f"{error.code} {error.reason}"
