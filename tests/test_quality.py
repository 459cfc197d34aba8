"""The measure of a precision's quality: zero for float32 itself, right for a known shift, and drawn."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import quality
from drumline.model.reference import uncached_logits
from tests.tiny import tiny_model

PIECES = [list(range(3, 30)), list(range(40, 60))]


def _only(found: list[quality.Quality]) -> quality.Quality:
    (one,) = found
    return one


def test_a_model_does_not_diverge_from_itself() -> None:
    model = tiny_model()
    found = _only(quality.compare(model, {"float32": model}, "prose", PIECES))
    assert (found.divergence, found.perplexity_change, found.tokens) == (0, 0, 47)
    losses = [
        -float(uncached_logits(model, ids)[:-1].log_softmax(-1)[range(len(ids) - 1), ids[1:]].sum()) for ids in PIECES
    ]
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / 45), rel=1e-5)


def test_the_divergence_is_that_of_the_definition() -> None:
    judge, model = tiny_model(), tiny_model(precision="int8")
    found = _only(quality.compare(judge, {"int8": model}, "prose", PIECES))
    total = 0.0
    for ids in PIECES:
        for expected, given in zip(uncached_logits(judge, ids)[:-1], uncached_logits(model, ids)[:-1], strict=True):
            total += torch.nn.functional.kl_div(
                given.log_softmax(-1), expected.log_softmax(-1), reduction="sum", log_target=True
            ).item()
    assert found.divergence == pytest.approx(total / 45, rel=1e-3)
    assert found.divergence > 0


def test_a_worse_model_reads_worse() -> None:
    judge = tiny_model()
    torch.manual_seed(0)
    noisy = replace(judge, weights=judge.weights.map(lambda tensor: tensor + 0.05 * torch.randn_like(tensor)))
    models = {"int8": tiny_model(precision="int8"), "noisy": noisy}
    close, far = quality.compare(judge, models, "prose", PIECES)
    assert far.divergence > 3 * close.divergence


def test_both_texts_are_long_enough_and_it_draws(smollm2: object, tmp_path: Path) -> None:
    found = [
        quality.Quality(precision, text, 4_096, 0.001, 20.0, 0.002)
        for precision in quality.PRECISIONS
        for text in quality.texts()
    ]
    quality.draw(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    tokenizer = smollm2.tokenizer  # type: ignore[attr-defined]
    assert all(len(tokenizer.encode(text)) >= 8 * quality.PIECE for text in quality.texts().values())
