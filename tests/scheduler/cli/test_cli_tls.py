"""`serve` and `submit` as processes against a broker that asks for a password over TLS."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.processes import CLI, finish, read_until, run_python, running_python
from tests.scheduler.mqtt.brokers import PASSWORD, Secured, secured


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Secured]:
    async with secured(tmp_path) as running:
        yield running


def test_a_job_between_two_processes(
    cli, checkpoint: Path, tmp_path: Path, broker: Secured, monkeypatch: pytest.MonkeyPatch
):
    """The worker's password comes from a file, the device's from the environment; neither shows in `ps`."""
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    where = broker.named
    to = ("--broker", f"mqtts://me@127.0.0.1:{where.port}", "--tls-ca", where.tls.ca)
    serve = ("serve", "--model", checkpoint, *to, "--password-file", file, "--metrics", "127.0.0.1:0")
    with running_python(*CLI, *serve) as process:
        assert read_until(process, r"broker +(\S+)")[1] == where.url
        read_until(process, r"metrics")
        assert PASSWORD not in Path(f"/proc/{process.pid}/cmdline").read_text()
        submit = ("submit", "hello", *to, "--raw", "--max-tokens", "3")
        run = run_python(*CLI, *submit, DRUMLINE_MQTT_PASSWORD=PASSWORD)
        assert (run.returncode, run.stderr.startswith("[budget: 5 + 3 tokens")) == (0, True), run.stderr
        monkeypatch.setenv("DRUMLINE_MQTT_PASSWORD", "not" + PASSWORD)
        wrong = cli(*submit)
        reason = f"drumline: cannot connect to 127.0.0.1:{where.port}: [code:135] Not authorized\n"
        assert (wrong.code, wrong.err) == (2, reason)
        process.terminate()
        assert finish(process)[0] == 0
