"""What the traffic was for."""

from __future__ import annotations

from collections.abc import Mapping


def bytes_by_kind(by_method: Mapping[str, int]) -> dict[str, int]:
    """Traffic by what it carries instead of by method: microbatches, exchange, state (copies of it too), other."""
    kinds = {"microbatch": "microbatches", "outer": "exchange", "state": "state", "copy": "state"}
    totals: dict[str, int] = {}
    for method, count in by_method.items():
        kind = kinds.get(method.split(".")[0], "other")
        totals[kind] = totals.get(kind, 0) + count
    return totals
