"""Parts that every screen of a terminal has: how far the run is, and figures in two columns."""

from __future__ import annotations

from collections.abc import Iterable

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BAR_WIDTH = 40


def progress_row(done: float, target: int, left: str, *, what: str = "") -> Table:
    """A bar, tokens of the run's tokens, and what is `left`; `what` replaces the tokens."""
    row = Table.grid(padding=(0, 1))
    row.add_row(
        ProgressBar(total=target, completed=min(done, target), width=BAR_WIDTH),
        what or f"{min(done, target):,.0f} of {target:,} tokens",
        Text(left, style="bold"),
    )
    return row


def figures_table(rows: Iterable[tuple[str, str, str, str]], *, padding: int = 3) -> Table:
    """Two columns of names and values."""
    table = Table.grid(padding=(0, padding))
    for left, value, right, other in rows:
        cells = ((left, "dim"), (value, "bold"), (right, "dim"), (other, "bold"))
        table.add_row(*(Text(text, style=style) for text, style in cells))
    return table
