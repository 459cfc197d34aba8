"""A client of the metrics page, and a registry with something to tell."""

import urllib.error
import urllib.request
from http.client import HTTPMessage

from prometheus_client import CollectorRegistry

from drumline.metrics.instruments import Instruments

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def http(url: str, method: str = "GET", data: bytes | None = None, **headers: str) -> tuple[int, HTTPMessage, bytes]:
    asked = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data, method=method, headers=asked)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def busy(registry: CollectorRegistry, name: str) -> Instruments:
    """The instruments of a scheduler that has finished a job."""
    instruments = Instruments(registry, name)
    instruments.identify(version="0.1.0", model="tiny", precision="float32", backend="torch")
    instruments.step(3, 40, 0.25, {"plan": 0.001, "forward": 0.01, "sample": 0.002, "commit": 0.001})
    instruments.token_gaps(0.012, 3, f"{name}-1")
    instruments.request_done("completed", 0.1, 0.2, 1.5, 11, 5, f"{name}-1")
    instruments.prompt_computed(11)
    return instruments
