import json
import re
from pathlib import Path

import pytest

from benchmarks.run import main
from tests.checkpoints import llama, random_model, save

MEASURES = ("greedy-16", "one-row", "prefill-4x128")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama that transformers loads as well; its window holds 128 + 64."""
    return save(tmp_path_factory.mktemp("bench") / "tiny", random_model(llama(max_position_embeddings=512)))


def test_ours_and_transformers_in_one_run(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]):
    work = tmp_path / "tiny.jsonl"
    lines = [{"prompt_ids": list(range(3, 30 + 5 * number)), "max_tokens": 3 + number} for number in range(4)]
    work.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folders = ["--results", tmp_path, "--plots", tmp_path / "plots", "--scratch", tmp_path / "scratch"]
    command = ["--model", checkpoint, "--precision", "float32", "--dtype", "float32", "--workload", work, *folders]
    peer = ["--peer", "llama-server=missing"]  # which reads GGUF files: it fails, is noted, and the rest goes on
    arguments = [str(word) for word in (*command, *peer, "--quick", "--name", "tiny", "--only", *MEASURES)]
    main(arguments)
    data = json.loads((tmp_path / "tiny.json").read_text())

    assert list(data) == ["schema", "settings", "machine", "measures", "engines", "runs", "start", "open_loop"]
    assert {"cpu", "cores", "features", "memory_bytes", "load_average_1min"} <= data["machine"].keys()
    assert list(data["engines"]) == ["drumline", "drumline, no drafts", "transformers", "llama-server"]
    assert "no drafts" in data["engines"].pop("drumline, no drafts")["note"]
    assert list(data["runs"].pop("drumline, no drafts")) == ["one-row"]
    assert data["engines"].pop("llama-server") == {"error": "llama-server reads GGUF files, not tiny"}
    assert list(data["runs"]) == ["drumline", "transformers"]
    for engine, about in data["engines"].items():
        assert {engine, "torch"} <= about["versions"].keys()
        assert "float32" in about["note"]
        assert "error" not in about
        assert sorted(data["runs"][engine]) == sorted(MEASURES)
        (greedy,), (alone,) = data["runs"][engine]["greedy-16"], data["runs"][engine]["one-row"]
        assert (greedy["output_tokens"], greedy["prompt_tokens"]) == (18, 138)
        assert greedy["tokens_per_s"] == pytest.approx(18 / greedy["wall_s"])
        assert alone["decode_tokens_per_s"] == alone["tokens_per_s"] > 64 / alone["wall_s"] * 0.9
        assert data["runs"][engine]["prefill-4x128"][0]["prompt_tokens"] == 512
    assert (tmp_path / "plots" / "throughput.png").exists()
    out = capsys.readouterr().out
    assert "mixed4, greedy, 16 rows" in " ".join(out.split())
    assert "ours" in out

    main(arguments)  # what is there is not measured again, and does not change
    runs = json.loads((tmp_path / "tiny.json").read_text())["runs"]
    assert {engine: runs[engine] for engine in data["runs"]} == data["runs"]
    assert re.findall(r"(\S+): starting", capsys.readouterr().out) == ["llama-server"]


def test_a_peer_of_another_name_is_refused(tmp_path: Path, checkpoint: Path):
    arguments = ["--model", checkpoint, "--peer", "other=/bin/true", "--only", "none", "--results", tmp_path]
    with pytest.raises(SystemExit, match="must be vllm=PYTHON or llama-server=BINARY"):
        main([str(word) for word in arguments])
