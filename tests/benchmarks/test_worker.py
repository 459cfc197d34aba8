import sys
from pathlib import Path

import pytest

from benchmarks.peers.base import About, PeerFailed, Timing, Work
from benchmarks.peers.worker import WorkerPeer

WORK = [Work((1, 2, 3), 4), Work((5,), 6)]


def start(log: Path) -> WorkerPeer:
    return WorkerPeer(sys.executable, "tests.benchmarks.echo_engine", [], log, start_timeout_s=60)


def test_an_engine_answers_each_run(tmp_path: Path):
    with start(tmp_path / "log") as peer:
        assert peer.about == About({"echo": "1"}, "nothing is computed")
        assert peer.ready_s > 0
        assert peer.run(WORK, 2, "greedy", 30) == Timing(10, 4, 0.5, details={"rows": 2})
        chat = peer.run(WORK, 7, "chat", 30)
        assert (chat.output_tokens_per_s, chat.prompt_tokens_per_s, chat.details) == (5.0, 2.0, {"rows": 7})


def test_what_goes_wrong_is_told_and_the_engine_goes_on(tmp_path: Path):
    with start(tmp_path / "log") as peer:
        with pytest.raises(PeerFailed, match="ValueError: 13 rows"):
            peer.run(WORK, 13, "greedy", 30)
        assert peer.run(WORK, 2, "greedy", 30).output_tokens == 10


def test_an_engine_that_dies_leaves_its_last_words(tmp_path: Path):
    with start(tmp_path / "log") as peer:
        with pytest.raises(PeerFailed, match=r"the process ended: .*the last words"):
            peer.run(WORK, 666, "greedy", 30)
        with pytest.raises(PeerFailed):
            peer.run(WORK, 2, "greedy", 30)


def test_an_engine_that_does_not_start(tmp_path: Path):
    with pytest.raises(PeerFailed, match=r"No module named benchmarks\.peers\.missing"):
        WorkerPeer(sys.executable, "benchmarks.peers.missing", [], tmp_path / "log")
