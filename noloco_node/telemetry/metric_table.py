"""Every metric of a node, and of a seed, as `metrics.md` beside this has it: the table that is shown as a page, too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

TEXT = files("noloco_node.telemetry").joinpath("metrics.md").read_text(encoding="utf-8")
SEED = "# Metrics of a seed"
"""Below this heading stand the metrics of a seed that knows its run: the whole swarm, as far as its nodes answer."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `unit` is Prometheus' base unit, or what is counted."""

    name: str
    """The name as it is scraped; that of a histogram without `_bucket`, `_sum` and `_count`."""
    kind: str
    """`counter`, `gauge`, `histogram` or `info`."""
    unit: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]
    """Upper bounds, of a histogram."""
    known: tuple[str, ...]
    """Values of its one label that are there from the start, at 0, so that the first rise is one."""
    sources: tuple[str, ...]
    """The events and the fields that it is made of: `inner_step.loss`. Empty where more than that is done."""


def _rows(text: str) -> Iterator[Metric]:
    for line in text.splitlines():
        if line.startswith("| `"):
            name, kind, unit, labels, sources, meaning = (cell.strip() for cell in line.strip("|").split(" | "))
            kind, _, bounds = kind.partition(": ")
            yield Metric(
                name=name.strip("`"),
                kind=kind,
                unit=unit.strip("–"),
                help=meaning,
                labels=tuple(re.findall(r"`(\w+)`", labels)),
                buckets=tuple(map(float, bounds.split(", "))) if bounds else (),
                known=tuple(filter(None, labels.partition(": ")[2].split(", "))),
                sources=tuple(re.findall(r"`([\w.]+)`", sources)),
            )


_OF_A_NODE, _, _OF_A_SEED = TEXT.partition(SEED)
TABLE: dict[str, Metric] = {metric.name: metric for metric in _rows(_OF_A_NODE)}
SEED_TABLE: dict[str, Metric] = {metric.name: metric for metric in _rows(_OF_A_SEED)}
HOP_SECONDS = TABLE["noloco_hop_duration_seconds"].buckets
