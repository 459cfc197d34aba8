"""The checkers themselves: each must see a mistake that is planted for it, or a green `make check` says nothing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

BIN = Path(sys.executable).parent


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.check
def test_mypy_sees_a_planted_type_error(tmp_path: Path):
    planted = tmp_path / "planted.py"
    planted.write_text("from drumline import Request\n\nRequest(prompt='a').max_tokens.upper()\n")
    seen = run(str(BIN / "mypy"), str(planted))
    assert seen.returncode == 1
    assert 'planted.py:3: error: "int" has no attribute "upper"' in seen.stdout


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("import scheduler", "TID251"),
        ("from model.config import GOLDEN", "TID251"),
        ("from . import config", "TID252"),
        ("import os", "F401"),
    ],
)
def test_ruff_sees_a_planted_import(line: str, rule: str):
    source = f'"""Planted."""\n\n{line}\n'
    name = str(ROOT / "src" / "drumline" / "planted.py")
    command = (str(BIN / "ruff"), "check", "--force-exclude", "--stdin-filename", name, "-")
    seen = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, timeout=60, check=False)
    assert seen.returncode == 1
    assert rule in seen.stdout


@pytest.mark.parametrize(
    ("folder", "imported"),
    [("model", "cache_pool"), ("model", "metrics"), ("cache_pool", "metrics"), ("metrics", "model")],
)
def test_import_linter_sees_a_planted_import(tmp_path: Path, folder: str, imported: str):
    for name in ("pyproject.toml", "src", "model", "cache_pool", "metrics", "scheduler"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    (tmp_path / folder / "planted.py").write_text(f'"""Planted."""\n\nimport drumline.{imported}\n')
    program = (
        "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    )
    seen = run(sys.executable, "-c", program, cwd=tmp_path)
    assert seen.returncode == 1, seen.stdout
    assert f"drumline.{folder}.planted -> drumline.{imported}" in seen.stdout
