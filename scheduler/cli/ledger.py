"""`drumline ledger`: what a model and its pool take, before anything runs."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from drumline.model.errors import InvalidRequest
from drumline.scheduler.cli import options

IN_MEGABYTES = ("weight_bytes", "kv_bytes", "total_bytes")


def ledger(
    model: options.ModelPath = None,
    rows: options.Rows = 16,
    tokens: Annotated[int | None, typer.Option(help="Tokens a row. Default: the window.")] = None,
    window: options.Window = None,
    precision: options.PrecisionName = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Print the bytes of weights and of keys and values: 2 · layers · rows · kv_heads · tokens · head_dim · bytes."""
    for name, value in (("--rows", rows), ("--tokens", tokens)):
        if value is not None and value < 1:
            raise InvalidRequest(name, "must be at least 1")
    loaded = options.open_model(model, precision, window)
    entry = loaded.ledger(rows, tokens)
    figures = {
        **asdict(entry),
        "kv_bytes": entry.kv_bytes,
        "kv_bytes_per_token": entry.kv_bytes_per_token,
        "total_bytes": entry.total_bytes,
    }
    if as_json:
        print(json.dumps({"model": loaded.name, "precision": loaded.precision, **figures}))
        return
    table = Table(title=f"{loaded.name}, {loaded.precision}", show_header=False)
    for name, value in figures.items():
        table.add_row(
            name,
            f"{value:,}" + (f"  ({value / 1e6:,.1f} MB)" if name in IN_MEGABYTES else ""),
        )
    Console().print(table)
