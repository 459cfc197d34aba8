"""From zero to a scraped dashboard, as docs/operations.md has it: what can be checked without running it."""

import re

import yaml

from tests.processes import ROOT

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
