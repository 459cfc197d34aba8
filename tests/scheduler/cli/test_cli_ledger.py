import json
from pathlib import Path


def test_figures_as_json(cli, checkpoint: Path):
    run = cli("ledger", "--model", checkpoint, "--rows", 8, "--tokens", 100, "--precision", "float32", "--json")
    assert (run.code, run.err) == (0, "")
    figures = json.loads(run.out)
    weights = figures.pop("weight_bytes")
    assert figures == {
        "model": "tiny",
        "precision": "float32",
        "layers": 2,
        "rows": 8,
        "kv_heads": 2,
        "tokens": 100,
        "head_dim": 8,
        "element_bytes": 4,
        "scale_bytes": 0,
        "kv_bytes": 2 * 2 * 8 * 2 * 100 * 8 * 4,
        "kv_bytes_per_token": 256,
        "total_bytes": weights + 204_800,
    }
    stored = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert weights == stored - _header_bytes(checkpoint)


def _header_bytes(checkpoint: Path) -> int:
    """A safetensors file is eight bytes of length, that long a header, and the tensors."""
    (file,) = checkpoint.glob("*.safetensors")
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def test_tokens_default_to_the_window_and_precision_halves_them(cli, checkpoint: Path):
    options = ("--model", checkpoint, "--rows", 1, "--json")
    full = json.loads(cli("ledger", *options, "--precision", "float32").out)
    half = json.loads(cli("ledger", *options, "--precision", "bfloat16", "--window", 1024).out)
    assert (full["tokens"], full["element_bytes"]) == (2048, 4)
    assert (half["tokens"], half["element_bytes"]) == (1024, 2)
    assert full["kv_bytes"] == 4 * half["kv_bytes"]
    assert full["weight_bytes"] == 2 * half["weight_bytes"]


def test_the_table(cli, checkpoint: Path):
    run = cli("ledger", "--model", checkpoint, "--rows", 16, "--precision", "float32")
    assert (run.code, run.err) == (0, "")
    assert "8,388,608  (8.4 MB)" in run.out
