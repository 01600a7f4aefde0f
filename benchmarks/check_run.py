"""Does a finished run of the main job keep its promises? Prints each with its figure; exit code 1 if one is broken.

make swarm && python -m benchmarks.check_run runs/tiny-*
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from benchmarks.command import command, folder_with, parser_of
from noloco_node.telemetry.events import Evaluation, read_events
from noloco_node.telemetry.summary import Summary


def checks(folder: Path) -> list[tuple[str, str, bool]]:
    """Promise, figure, and whether it holds."""
    summary = Summary.model_validate_json((folder / "summary.json").read_text(encoding="utf-8"))
    finals = [
        event.loss
        for file in sorted((folder / "nodes").glob("*/events.jsonl"))
        for event in read_events(file)
        if isinstance(event, Evaluation) and event.final
    ]
    mean_replica, merged = statistics.mean(finals), summary.validation_loss_merged or float("inf")
    spreads = [point.replica_divergence for point in summary.replica_divergence]
    books = summary.microbatches
    stage_peers = summary.nodes // summary.stages - 1
    rounds, partners = summary.outer_steps_taken.values(), summary.distinct_partners.values()
    return [
        ("validation loss below 2.4 nats/byte", f"{mean_replica:.4f}", mean_replica < 2.4),
        ("at least 25 outer steps a node", f"{min(rounds)} to {max(rounds)}", min(rounds) >= 25),
        (
            f"every node averaged with all {stage_peers} stage peers",
            f"at least {min(partners)}",
            min(partners) == stage_peers,
        ),
        (
            "last replica divergence at most half of its maximum",
            f"{spreads[-1]:.2e} of {max(spreads):.2e}",
            spreads[-1] <= max(spreads) / 2,
        ),
        (
            "merged model not worse than the mean replica by 0.01",
            f"{merged - mean_replica:+.4f}",
            merged <= mean_replica + 0.01,
        ),
        (
            "drawn = trained + dropped + held",
            f"{books.drawn} = {books.trained} + {books.dropped} + {books.held_at_end}",
            books.drawn == books.trained + books.dropped + books.held_at_end,
        ),
        ("no node died", ", ".join(summary.died) or "none", not summary.died),
    ]


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__, out=False)
    parser.add_argument("folder", type=folder_with("summary.json"), nargs="+")
    broken = 0
    for folder in parser.parse_args().folder:
        for promise, figure, holds in checks(folder):
            print(f"{'ok  ' if holds else 'FAIL'} {promise:<55} {figure}")
            broken += not holds
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    command(main)
