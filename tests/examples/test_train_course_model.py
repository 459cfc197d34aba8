import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from drumline import load_model
from drumline.model.word_tokenizer import WordTokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "train_course_model.py"
TEXT = "one two three four five six seven eight nine ten\n" * 8


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_course_model", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_trains_saves_and_serves_past_the_window(tmp_path):
    command = [sys.executable, str(PROGRAM), "--folder", str(tmp_path), "--steps", "3"]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, encoding="utf-8", timeout=120
    )
    assert run.returncode == 0, run.stderr
    lines = [line.strip() for line in run.stdout.splitlines()]
    assert [line[:6] for line in lines[:2]] == ["step 1", "step 3"]
    long = lines[next(index for index, line in enumerate(lines) if line.startswith("[long]")) :]
    assert long[1:5] == [
        "stop reason: budget",
        "prompt: 45 tokens, window 32; generated: 24",
        "window full at generated token: 0; recomputes: 23",
        "positions evaluated: 768, uncached: 768",
    ]
    difference = float(lines[-1].rpartition(" ")[2])
    assert difference <= 1e-4

    served = load_model(tmp_path)
    assert (served.slides, served.window) == (True, 32)


def test_training_learns_the_text(example):
    vocabulary = WordTokenizer.from_text(TEXT)
    model = example.train(TEXT, vocabulary, steps=60, seconds=60)
    logits = model(torch.tensor([vocabulary.encode("three four five six")]))["logits"][0, -1]
    assert int(logits.argmax()) == vocabulary.encode("seven")[0]


def test_training_stops_in_time(example, capsys):
    example.train(TEXT, WordTokenizer.from_text(TEXT), steps=1_000_000, seconds=0)
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["step 1"]
