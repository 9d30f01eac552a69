"""Tables of means over seeds, for the terminal and in Markdown."""

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def cell(values: Sequence[float], digits: int, sign: str = "") -> str:
    """The mean, with the standard deviation if there are several values."""
    text = f"{statistics.mean(values):{sign}.{digits}f}"
    return text if len(values) == 1 else f"{text}±{statistics.stdev(values):.{digits}f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that ends with a line break."""
    lines = ["| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines) + "\n"


def show(console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, at least 160 columns wide."""
    table = Table(title=title)
    for i, heading in enumerate(head):
        table.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(file=console.file, width=max(160, console.width), quiet=console.quiet).print(table)
