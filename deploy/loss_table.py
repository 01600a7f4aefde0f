"""The table of tokens to a loss that `config validate` draws its advice from, made of docs/results/frontier:
python -m deploy.loss_table"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from noloco_node.sizing.loss_table import TABLE, TELLING

ROOT = Path(__file__).parent.parent
SOURCE = "docs/results/frontier"
TARGET = "published"
"""All are compared at the loss that this variant ends with."""
ELSEWHERE = ("world.",)
"""Settings of the laboratory that no daemon has."""


def made() -> dict[str, Any]:
    """All of the table but its date."""
    held = json.loads((ROOT / SOURCE / "results.json").read_text())
    reported = [result for result in held["results"] if result["purpose"] == "report"]
    (target,) = [_end(group) for group in _groups(reported, TARGET)]
    base = held["run"]
    return {
        "source": SOURCE,
        "parameters": reported[0]["parameters"],
        "replicas": reported[0]["replicas"],
        "tokens": reported[0]["tokens"],
        "seeds": len({result["seed"] for result in reported}),
        "target_loss": round(target, 4),
        "families": [
            _family(list(_groups(reported, variant["name"])), base, target)
            for variant in held["lab"]["variants"]
            if variant["algorithm"] == "noloco" and not any(name.startswith(ELSEWHERE) for name in variant["set"])
        ],
    }


def _groups(results: Sequence[Mapping[str, Any]], variant: str) -> Iterator[list[Mapping[str, Any]]]:
    """Of a variant, the seeds of each point."""
    mine = [result for result in results if result["variant"] == variant]
    for options in {json.dumps(result["options"], sort_keys=True): result["options"] for result in mine}.values():
        yield [result for result in mine if result["options"] == options]


def _family(groups: Sequence[list[Mapping[str, Any]]], base: Mapping[str, Any], target: float) -> dict[str, Any]:
    first = groups[0][0]["options"]
    settings = {name: first.get(name, _of(base, name)) for name in TELLING}
    points = [
        {
            "inner_steps": group[0]["options"]["outer.inner_steps"],
            "tokens": _tokens_to(group, target),
            "loss": round(_end(group), 4),
        }
        for group in groups
    ]
    return {
        "settings": settings,
        "rate": first.get("inner.learning_rate", base["inner"]["learning_rate"]) / base["inner"]["learning_rate"],
        "points": sorted(points, key=lambda point: point["inner_steps"]),
    }


def _of(base: Mapping[str, Any], name: str) -> Any:
    group, _, field = name.partition(".")
    return base[group][field]


def _mean_curve(group: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    curves = [result["curve"] for result in group]
    return [(at[0]["tokens"], statistics.fmean(p["validation_loss"] for p in at)) for at in zip(*curves, strict=True)]


def _end(group: Sequence[Mapping[str, Any]]) -> float:
    return _mean_curve(group)[-1][1]


def _tokens_to(group: Sequence[Mapping[str, Any]], target: float) -> int | None:
    """Where the mean of the seeds first reaches it, between two evaluations in the logarithm of the tokens."""
    curve = _mean_curve(group)
    for (tokens, loss), (later, lower) in itertools.pairwise(curve):
        if lower <= target < loss and tokens > 0:
            share = (loss - target) / (loss - lower)
            return round(math.exp(math.log(tokens) + share * math.log(later / tokens)))
    return None


def main() -> None:
    """Writes it, with the day on which the results were committed."""
    log = ["git", "log", "-1", "--format=%cs", "--", f"{SOURCE}/results.json"]
    date = subprocess.run(log, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    TABLE.write_text(json.dumps({"date": date, **made()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
