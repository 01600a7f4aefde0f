"""As much of PromQL as it takes to find the metrics and labels that an expression names, and to narrow it down."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_METRIC = re.compile(r"(?<![\w:\"])((?:noloco|process)[_:][\w:]*|up)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric in an expression."""

    name: str
    matched: frozenset[str]
    """Labels that it is chosen by."""


def selectors(expression: str) -> list[Selector]:
    """Every metric that an expression names, in its order."""
    found = _METRIC.finditer(expression)
    return [Selector(each[1], frozenset(_MATCHER.findall(each[2] or ""))) for each in found]


def grouping_labels(expression: str) -> set[str]:
    """Every label that an expression groups or joins by."""
    lists = (part.split(",") for part in _GROUPING.findall(expression))
    return {label.strip() for labels in lists for label in labels if label.strip()}


def labels_of_result(expression: str) -> set[str]:
    """Labels of an aggregation's series: the first `by`. ValueError where the expression is none."""
    first = re.match(r"\w+ by \(([^)]*)\)", expression)
    if first is None:
        raise ValueError(f"no aggregation with `by` at the front: {expression}")
    return {label.strip() for label in first[1].split(",") if label.strip()}


def narrowed(expression: str, matchers_of: Callable[[str], str]) -> str:
    """The expression with `matchers_of(name)` added to every metric that it names."""

    def with_matchers(metric: re.Match[str]) -> str:
        own = metric[2]
        return f"{metric[1]}{{{own + ',' if own else ''}{matchers_of(metric[1])}}}"

    return _METRIC.sub(with_matchers, expression)
