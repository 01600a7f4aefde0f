"""Grafana's dashboards held to Grafana's own types, as its foundation SDK has them:

    python deploy/monitoring/schema.py FILE...

A dashboard is read by the SDK and written again: what it does not know is lost on the way, and named. Then each value
is compared with the type that the SDK declares for it, since reading does not look. deploy/check installs the SDK.
"""

from __future__ import annotations

import enum
import json
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog import runtime
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

SDK = "grafana_foundation_sdk."


def faults(dashboard: dict[str, Any]) -> list[str]:
    """What Grafana's types do not let through, by its place."""
    try:
        read = Dashboard.from_json(dashboard)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"it cannot be read: {error!r}"]
    written = json.loads(json.dumps(read, cls=JSONEncoder))
    return [*lost(dashboard, written, "dashboard"), *untyped(read, type(read), "dashboard"), *unknown_panels(read)]


def lost(given: object, written: object, place: str) -> Iterator[str]:
    """What is in `given` and not in `written`; defaults may be added."""
    if isinstance(given, dict) and isinstance(written, dict):
        for name, value in given.items():
            if name not in written:
                yield f"{place}.{name} is not known"
            else:
                yield from lost(value, written[name], f"{place}.{name}")
    elif isinstance(given, list) and isinstance(written, list) and len(given) == len(written):
        for number, (one, other) in enumerate(zip(given, written, strict=True)):
            yield from lost(one, other, f"{place}[{number}]")
    elif given != written:
        yield f"{place} is {given!r}, and was read as {written!r}"


def untyped(value: object, kind: Any, place: str) -> Iterator[str]:
    """Values that are not of the declared type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = [each for each in inner if each is not types.NoneType]
        found = [list(untyped(value, each, place)) for each in kinds]
        if all(found) and not (value is None and len(kinds) < len(inner)):
            yield from min(found, key=len)
    elif origin is typing.Literal:
        if value not in inner:
            yield f"{place} is {value!r}, none of {inner}"
    elif origin is list:
        if isinstance(value, list):
            for number, each in enumerate(value):
                yield from untyped(each, inner[0], f"{place}[{number}]")
        else:
            yield f"{place} is {value!r}, no list"
    elif origin is dict:
        if not isinstance(value, dict):
            yield f"{place} is {value!r}, no names and values"
    elif kind in (object, Any):
        yield from _of_class(value, type(value), place)
    elif issubclass(kind, enum.Enum):
        if value not in [each.value for each in kind]:
            yield f"{place} is {value!r}, none of {[each.value for each in kind]}"
    else:
        yield from _of_class(value, kind, place)


def _of_class(value: object, kind: Any, place: str) -> Iterator[str]:
    number = kind is float and isinstance(value, int) and not isinstance(value, bool)
    truth = isinstance(value, bool) and kind is not bool
    if truth or not (number or isinstance(value, kind)):
        yield f"{place} is {value!r}, no {kind.__name__}"
    elif type(value).__module__.startswith(SDK) and not isinstance(value, enum.Enum):
        for name, hint in typing.get_type_hints(type(value)).items():
            yield from untyped(getattr(value, name), hint, f"{place}.{name}")


def unknown_panels(dashboard: Any) -> Iterator[str]:
    """Panels of a type that Grafana does not have: nothing else of them is checked by it."""
    for panel in dashboard.panels or ():
        if isinstance(panel, Panel) and runtime.panelcfg_config(panel.type_val) is None:
            yield f"panel '{panel.title}' is of the type '{panel.type_val}', which Grafana does not have"


def broken(dashboard: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same dashboard with one fault each, and what that is."""
    at = next(number for number, panel in enumerate(dashboard["panels"]) if panel["type"] != "row")

    def changed(what: str, *path: Any, value: object) -> tuple[str, dict[str, Any]]:
        copy = json.loads(json.dumps(dashboard))
        place = copy["panels"][at]
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        return what, copy

    yield changed("a panel of an unknown type", "type", value="statt")
    yield changed("a key with a typo", "gridpos", value={})
    yield changed("a width that is text", "gridPos", "w", value="4")
    yield changed("a query with a typo", "targets", 0, "expression", value="up")
    yield changed("targets that are no list", "targets", value={"refId": "A"})
    yield changed("an option with a typo", "options", "colourMode", value="none")
    yield changed("an option with an unknown value", "options", "colorMode", value="loud")


def main(files: list[str]) -> int:
    """0 where all dashboards pass, and each of them fails once it is broken."""
    register_default_plugins()
    found: list[str] = []
    for name in files:
        dashboard = json.loads(Path(name).read_text(encoding="utf-8"))
        found += [f"{name}: {fault}" for fault in faults(dashboard)]
        found += [f"{name}: {what} is not seen" for what, copy in broken(dashboard) if not faults(copy)]
    for fault in found:
        print(fault)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
