"""Which codec and H are soonest at a loss, by uplink: what `config validate --device` says, as a table.

    python -m benchmarks.fastest noloco_node/configs/consumer-8gb.yaml --device "RTX 4060" --round-trip 100

Tokens to a loss are the laboratory's, tokens a second come from the plan (`sizing/utilisation.py`). How far that may be
believed stands below: its speeds beside those of the simulator, over the grid of links, codecs, numbers under way, H
and F that `benchmarks.utilisation --grid` has simulated.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.command import command, not_negative, positive
from benchmarks.utilisation import Point, planned
from noloco_node.config.load import Config, load_config
from noloco_node.simulator.report import table_of
from noloco_node.sizing.advice import expect
from noloco_node.sizing.devices import device_by_name
from noloco_node.sizing.quickest import Quickest
from noloco_node.sizing.utilisation import Link

UPLINKS = (1.0, 5.0, 20.0, 50.0, 100.0, 200.0, 1000.0)
GRID = Path(__file__).parent / "results" / "utilisation-grid.json"
BITS = 8.0


def row_of(config: Config, device: str, mbit: float, round_trip: float) -> list[str]:
    """One uplink."""
    link = Link(mbit * 1e6 / BITS, round_trip)
    found = expect(config, link, device_by_name(device, config.run.inner.precision).flop_per_second)
    best = [_words(each) for each in found.quickest]
    busy = f"{found.outlook.share:.0%}"
    return [f"{mbit:g}", busy, *(best + ["nothing sooner was measured"] * 2)[:2]]


def _words(best: Quickest) -> str:
    if not best.settings:
        return "the present ones"
    settings = ", ".join(setting.removeprefix("run.outer.").removeprefix("run.") for setting in best.settings)
    return settings if best.time is None else f"{settings}: {best.time:.2f}"


def beside_the_simulator(rows: list[dict[str, Any]]) -> str:
    """The plan's share of the device's time over the simulator's, by how many are under way."""
    names = {field.name for field in fields(Point)}
    ratios: dict[str, list[float]] = {}
    for row in rows:
        point = Point(**{name: value for name, value in row.items() if name in names})
        under_way = "auto" if point.in_flight is None else str(point.in_flight)
        ratios.setdefault(under_way, []).append(planned(point).share / row["simulated"])
    lines = [
        [count, str(len(found)), f"{statistics.median(found):.2f}", f"{min(found):.2f} to {max(found):.2f}"]
        for count, found in ratios.items()
    ]
    return table_of([["microbatches under way", "points", "planned over simulated, median", "range"], *lines])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--device", default="RTX 4060")
    parser.add_argument("--round-trip", type=not_negative, default=100.0, metavar="MS")
    parser.add_argument("--uplinks", type=positive, nargs="+", default=list(UPLINKS), metavar="MBIT")
    options = parser.parse_args()
    config = load_config(options.config, options.settings)
    rows = [row_of(config, options.device, mbit, options.round_trip / 1e3) for mbit in options.uplinks]
    head = [
        "uplink, Mbit/s",
        "a device works now",
        "codec and H: time to the loss beside now",
        "with other settings too",
    ]
    print(table_of([head, *rows]))
    print()
    print(beside_the_simulator(json.loads(GRID.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    command(main)
