"""Every alert fires when it should and not when it just should not, says so, and has its paragraph."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from drumline.metrics.dashboard import FIRST_TOKEN_OBJECTIVE_S, panels
from drumline.metrics.definitions import DURATION_BUCKETS
from tests.metrics.prometheus_server import promtool
from tests.processes import ROOT

RULES = ROOT / "metrics" / "alerts.yml"
CASES = [ROOT / "tests" / "metrics" / name for name in ("alerts_test.yml", "alerts_slow_test.yml")]
RUNBOOK = (ROOT / "docs" / "alerts.md").read_text("utf-8")
GROUPS = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule
}


def checked() -> dict[str, set[bool]]:
    """Of each alert, whether a case expects it to fire, and whether one expects that it does not."""
    seen: dict[str, set[bool]] = {}
    for case in (case for path in CASES for case in yaml.safe_load(path.read_text("utf-8"))["tests"]):
        for check in case["alert_rule_test"]:
            seen.setdefault(check["alertname"], set()).add(bool(check.get("exp_alerts")))
    return seen


def anchors() -> dict[str, str]:
    """The paragraphs of the runbook, by the anchors that their headings have."""
    heads = re.split(r"^## (.+)$", RUNBOOK, flags=re.MULTILINE)[1:]
    return {head.lower().replace(" ", "-"): text for head, text in zip(heads[::2], heads[1::2], strict=True)}


def test_promtool_finds_the_rules_in_order():
    run = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """A folder with rules and cases side by side, as the cases name the rules."""
    for path in (RULES, *CASES):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_alerts_fire_when_they_should_and_not_otherwise(bench: Path):
    run = promtool("test", "rules", *(path.name for path in CASES), cwd=bench)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_threshold_that_is_off_would_be_noticed(bench: Path):
    rules = bench / RULES.name
    rules.write_text(rules.read_text("utf-8").replace("oldest_queued_seconds > 60", "oldest_queued_seconds >= 60"))
    run = promtool("test", "rules", CASES[0].name, cwd=bench)
    assert run.returncode != 0
    assert "DrumlineQueueOld" in run.stdout + run.stderr


def test_every_alert_is_seen_to_fire_and_to_keep_still():
    assert checked() == {name: {True, False} for name in ALERTS}


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_and_where(name: str):
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert re.fullmatch(r"[1-9]\d*m", rule["for"])
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert "{{" in rule["annotations"]["summary"], "it must name the worker"
    assert "{{" in rule["annotations"]["description"], "it must tell a value"
    file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert file == "docs/alerts.md"
    assert anchor.replace("-", "") == name.lower()


def test_each_alert_has_its_paragraph_and_each_paragraph_its_alert():
    links = {rule["annotations"]["runbook_url"].partition("#")[2]: name for name, rule in ALERTS.items()}
    paragraphs = anchors()
    assert set(paragraphs) == set(links)
    for anchor, name in links.items():
        opening = f"\n\n`{name}`, {ALERTS[name]['labels']['severity']}"
        assert paragraphs[anchor].startswith(opening), anchor
        assert "\n- Look: " in paragraphs[anchor]
        assert "\n- Do: " in paragraphs[anchor]


def test_the_runbook_names_panels_and_paragraphs_that_are_there():
    named = {name for line in re.findall(r"panels? ((?:\*[^*]+\*(?:, | and )?)+)", RUNBOOK, re.IGNORECASE)
             for name in re.findall(r"\*([^*]+)\*", line)}  # fmt: skip
    assert len(named) > 10
    assert named <= set(panels())
    assert set(re.findall(r"\]\(#([a-z-]+)\)", RUNBOOK)) <= set(anchors())


def test_the_runbooks_numbers_are_those_of_the_rules():
    assert FIRST_TOKEN_OBJECTIVE_S in DURATION_BUCKETS
    assert set(re.findall(r'le="([\d.]+)"', RULES.read_text("utf-8"))) == {str(FIRST_TOKEN_OBJECTIVE_S)}
