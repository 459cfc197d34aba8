"""Headless Chromium over its DevTools protocol: as much as looking at a page needs."""

import asyncio
import base64
import itertools
import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

PROGRAM = "chromium"
# As root, Chromium runs without its sandbox only; the rest keeps it from talking to anybody on its own.
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--no-default-browser-check", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
PATIENCE_S = 20.0
LARGEST_MESSAGE = 64 * 2**20


@contextmanager
def running_browser() -> Iterator[str]:
    """A browser while the block runs; yields HOST:PORT of its DevTools. Raises `FileNotFoundError` without Chromium."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise FileNotFoundError(f"{PROGRAM} is not installed")
    with tempfile.TemporaryDirectory(prefix="drumline-browser-", ignore_cleanup_errors=True) as folder:
        command = [program, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8")
        with process:
            try:
                yield _devtools(process)
            finally:
                process.kill()


def _devtools(process: subprocess.Popen[str]) -> str:
    seen = []
    for line in process.stderr or ():
        seen.append(line)
        if match := re.search(r"DevTools listening on ws://([^/]+)/", line):
            return match[1]
    raise OSError(f"{PROGRAM} did not start: {''.join(seen)}")


def _new_target(devtools: str) -> str:
    """Where an empty tab takes calls."""
    asked = urllib.request.Request(f"http://{devtools}/json/new", method="PUT")
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
        return str(json.load(answer)["webSocketDebuggerUrl"])


@asynccontextmanager
async def open_tab(devtools: str) -> AsyncIterator["Tab"]:
    """An empty tab of the browser, closed with the block."""
    target = await asyncio.to_thread(_new_target, devtools)
    async with connect(target, max_size=LARGEST_MESSAGE) as socket:
        tab = Tab(socket)
        reading = asyncio.create_task(tab.read())
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.call(f"{domain}.enable")
            yield tab
            await tab.call("Page.close")
        finally:
            reading.cancel()


class Tab:
    """A page in a browser, and what it said and asked for since it was opened."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        """Uncaught exceptions, errors and warnings of the console, violations of the content security policy."""
        self.requests: list[str] = []
        """URLs, data URLs among them."""

    async def read(self) -> None:
        """Take what the browser says, until it closes the connection."""
        with suppress(ConnectionClosed):
            async for message in self._socket:
                told = json.loads(message)
                if "id" in told:
                    self._waiting.pop(told["id"]).set_result(told)
                else:
                    self._note(told["method"], told["params"])

    def _note(self, event: str, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(told["args"]))
        elif event == "Log.entryAdded":
            self.complaints.append(told["entry"]["text"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One call of the protocol; raises `RuntimeError` where the browser refuses it."""
        number = next(self._numbers)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        told = await asyncio.wait_for(answered, PATIENCE_S)
        if "error" in told:
            raise RuntimeError(f"{method}: {told['error']['message']}")
        result: dict[str, Any] = told["result"]
        return result

    async def visit(self, url: str) -> None:
        """Go to a page."""
        await self.call("Page.navigate", url=url)

    async def evaluate(self, script: str) -> Any:
        """The value of an expression in the page, promises awaited; raises `RuntimeError` where it throws."""
        told = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{script}: {told['exceptionDetails']}")
        return told["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression holds, looked at every 20 ms in the page; raises `TimeoutError`."""
        look = f"new Promise(held => {{ const look = () => {script} ? held() : setTimeout(look, 20); look(); }})"
        await self.evaluate(look)

    async def resize(self, width: int, height: int, *, scale: float = 1.0, phone: bool = False) -> None:
        """The window in CSS pixels, and how many of the picture's pixels are one of them."""
        settings = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        await self.call("Emulation.setDeviceMetricsOverride", **settings)

    async def prefer(self, colours: str) -> None:
        """`light` or `dark`, and nothing that moves: a picture shows no bar on its way."""
        preferences = {"prefers-color-scheme": colours, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in preferences.items()]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self) -> bytes:
        """The window as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])
