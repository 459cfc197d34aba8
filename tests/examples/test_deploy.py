"""What examples/deploy asks of the worker is what the worker has: options, ports, paths, times, variables."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from http import HTTPStatus
from pathlib import Path

import pytest
import typer
import yaml
from prometheus_client import CollectorRegistry

from drumline.metrics.exporter import parse_address
from drumline.metrics.pages import Pages
from drumline.model.user_cache import ENVIRONMENT
from drumline.scheduler.cli.app import app
from drumline.scheduler.mqtt.address import PASSWORD_VARIABLE
from tests.processes import ROOT

DEPLOY = ROOT / "examples" / "deploy"
UNIT = DEPLOY / "drumline.service"
ROOM_TO_STOP_S = 30.0
"""What the end takes beyond --drain: arrivals 5 s, the last messages 10 s, the journal."""


def serve_options(arguments: list[str]) -> dict[str, object]:
    """The options as `drumline serve` itself reads them."""
    serve = typer.main.get_command(app).commands["serve"]
    with serve.make_context("serve", list(arguments)) as context:
        return dict(context.params)


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False, delimiters=("=",))
    parser.optionxform = str
    parser.read_string(UNIT.read_text().replace("\\\n", " "))
    return parser


def documents() -> dict[str, dict]:
    return {document["kind"]: document for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


@pytest.fixture(scope="module")
def pod() -> dict:
    return documents()["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod: dict) -> dict:
    (container,) = pod["containers"]
    return container


def answered(path: str) -> bool:
    pages = Pages(CollectorRegistry(), health=list, ready=list)
    return pages.respond("GET", path).status == HTTPStatus.OK


def test_the_unit_starts_a_worker():
    service = unit()["Service"]
    program, command, *arguments = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("drumline", "serve")
    options = serve_options(arguments)
    assert float(service["TimeoutStopSec"]) >= options["drain"] + ROOM_TO_STOP_S
    assert float(service["WatchdogSec"]) >= 2 * options["stall"]  # systemd does not know better before we do
    assert options["journal"].parent == Path("/var/lib") / service["StateDirectory"]
    assert service["Environment"] == f"{ENVIRONMENT}=/var/cache/{service['CacheDirectory']}"
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
    assert service.get("MemoryDenyWriteExecute", "no") == "no"


def test_the_unit_says_what_its_environment_file_must_hold():
    text = UNIT.read_text()
    told = set(re.findall(r"^#   (\w+)=", text, re.MULTILINE))
    used = set(re.findall(r"\$\{(\w+)\}", text))
    assert told == used | {PASSWORD_VARIABLE}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize(
    ("before", "after", "complaint"), [("", "", r"\Z"), ("WatchdogSec=", "WatchdogSecs=", ".*Unknown key")]
)
def test_systemd_reads_the_unit_and_would_see_a_mistake(tmp_path: Path, before: str, after: str, complaint: str):
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/drumline/bin/drumline", sys.executable).replace(before, after, 1))
    run = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, timeout=60)
    assert re.match(complaint, run.stdout + run.stderr)


def test_the_pod_starts_a_worker(pod: dict, container: dict):
    command, *arguments = container["args"]
    assert command == "serve"
    options = serve_options(arguments)
    assert pod["terminationGracePeriodSeconds"] >= options["drain"] + ROOM_TO_STOP_S
    host, port = parse_address(options["metrics"])
    assert host == "0.0.0.0"  # the kubelet comes from outside
    assert container["ports"] == [{"name": "metrics", "containerPort": port}]
    assert options["threads"] == int(container["resources"]["requests"]["cpu"])
    (cache,) = [variable["value"] for variable in container["env"] if variable["name"] == ENVIRONMENT]
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    assert options["journal"].is_relative_to(mounts["data"])
    assert Path(cache).is_relative_to(mounts["data"])
    assert options["password_file"].parent == mounts["credentials"]
    assert options["password_file"].name in documents()["Secret"]["stringData"]


def test_the_probes_ask_for_pages_that_there_are(container: dict):
    probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {"metrics"}
    assert all(map(answered, paths.values()))
    assert not answered("/health")


def test_one_worker_serves_a_prefix():
    deployment = documents()["Deployment"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert yaml.safe_load((DEPLOY / "podmonitor.yaml").read_text())["spec"]["selector"]["matchLabels"] == labels


def test_both_ways_of_scraping_lead_to_the_metrics(container: dict):
    annotations = documents()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) == container["ports"][0]["containerPort"]
    (endpoint,) = yaml.safe_load((DEPLOY / "podmonitor.yaml").read_text())["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == container["ports"][0]["name"]
    assert annotations["prometheus.io/path"] == endpoint["path"]
    assert answered(endpoint["path"])


def test_an_option_that_is_gone_would_be_noticed():
    with pytest.raises(typer.TyperException, match="No such option"):
        serve_options(["--verbose"])
