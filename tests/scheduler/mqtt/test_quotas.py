"""What one client may have: counted, freed, refused by name."""

from pathlib import Path

import pytest

from drumline import InvalidRequest
from drumline.scheduler.mqtt.quotas import Quota, QuotaExceeded, Quotas, Usage, read_quotas


def usage(now: list[float], **quota: object) -> Usage:
    return Usage(Quotas(clients={"a": Quota(**quota)}), lambda: now[0])


def test_jobs_are_counted_until_they_end():
    used = usage([0.0], jobs=2)
    used.accepted("a")
    used.check("a", lambda _: 0)
    used.accepted("a")
    with pytest.raises(QuotaExceeded) as caught:
        used.check("a", lambda _: 0)
    assert (caught.value.bound, caught.value.limit, caught.value.used) == ("jobs", 2, 2)
    used.check("b", lambda _: 10**9)  # another client has no bound
    used.ended("a", 5)
    used.check("a", lambda _: 0)


def test_tokens_are_forgotten_after_a_minute():
    now = [0.0]
    used = usage(now, tokens_per_minute=100)
    used.accepted("a")
    used.ended("a", 60)
    used.check("a", lambda _: 39)
    with pytest.raises(QuotaExceeded, match="tokens_per_minute: the limit of this client is 100, it has 100"):
        used.check("a", lambda _: 40)
    now[0] = 30.0
    used.accepted("a")
    used.ended("a", 40)
    with pytest.raises(QuotaExceeded):
        used.check("a", lambda _: 0)
    now[0] = 60.0
    used.check("a", lambda _: 0)
    now[0] = 90.0
    used.check("a", lambda _: 99)
    assert used._spent == {}


def test_live_jobs_and_classes():
    used = usage([0.0], live=1, priority="normal")
    assert used.may_run("a")
    used.started("a")
    assert not used.may_run("a")
    used.stopped("a")
    assert used.may_run("a")
    assert [used.capped("a", priority) for priority in ("low", "normal", "high")] == ["low", "normal", "normal"]
    assert used.capped("b", "high") == "high"
    assert not used._live
    assert not used._jobs


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "Invalid JSON"),
        ('{"default": {"jobs": 0}}', "default.jobs"),
        ('{"clients": {"a": {"colour": 1}}}', "clients.a.colour"),
        ('{"default": {"priority": "urgent"}}', "default.priority"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str, complaint: str):
    path = tmp_path / "quotas.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        read_quotas(path)
    assert caught.value.field == "--quotas"
    assert complaint in caught.value.limit


def test_a_file(tmp_path: Path):
    path = tmp_path / "quotas.json"
    path.write_text('{"default": {"jobs": 5}, "clients": {"a": {"live": 2, "priority": "low"}}}')
    quotas = read_quotas(path)
    assert (quotas.of("b").jobs, quotas.of("a").jobs, quotas.of("a").live) == (5, None, 2)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_quotas(tmp_path / "none")
