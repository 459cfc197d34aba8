"""What a rich table shows, as text."""

from io import StringIO

from rich.console import Console
from rich.table import Table


def shown(table: Table) -> str:
    """Wide enough that nothing is wrapped."""
    console = Console(file=StringIO(), width=250)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()
