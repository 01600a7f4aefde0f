"""Pages of docs/ that are made from the code. `make reference` writes them: python -m deploy.reference"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from noloco_node.config.data_spec import MixedSource
from noloco_node.config.environment import variable_of
from noloco_node.config.experiments import HuntSpec, LabSpec, SimSpec, VariantSpec
from noloco_node.config.node_settings import LocalSwarmSettings, NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.config.settings import Settings
from noloco_node.errors import EXIT_MEANINGS
from noloco_node.telemetry.events import AnyEvent, Distribution, Event, Strangers

DOCS = Path(__file__).parent.parent / "docs"
DASH = "–"
BOUNDLESS = 10**18
"""A bound that only keeps arithmetic harmless."""


def pages() -> Mapping[Path, str]:
    """Every made page and what it holds."""
    made = {"settings.md": _settings(), "events.md": _events(), "exit-codes.md": _exit_codes()}
    return {DOCS / name: "\n".join(lines) + "\n" for name, lines in made.items()}


def _settings() -> Iterator[str]:
    yield from _head("Settings", "the settings' own classes in `config/`")
    yield "Look a setting up by its full name; `noloco-node config show CONFIG` prints all with their values. Any can"
    yield "be given on the command line, `--set run.inner.learning_rate=3e-3`. Numbers are finite; a dash is not set."
    yield from ("", "## `run`", "", "All peers share it: the run id is made of it, and a joiner gets it from a peer.")
    yield from _group(RunSpec, "run")
    yield from ("", "### Each of `run.data.mixture`", "", _sentence(MixedSource.__doc__), "")
    yield from _table(MixedSource, "")
    yield from ("", "## `node`", "", "What one machine chooses for its node. Each setting has a variable:")
    yield f"`{variable_of('port')}` stands for `node.port`."
    yield "The command line wins over the environment, and that over the file."
    yield from _group(NodeSettings, "node")
    yield from ("", "## `local_swarm`", "", "The layout of `noloco-node swarm`: all daemons on this machine.")
    yield from _group(LocalSwarmSettings, "local_swarm")
    yield from ("", "## `lab`", "", "What `noloco-node lab` compares. No daemon reads it.")
    yield from _group(LabSpec, "lab")
    yield from ("", "### Each of `lab.variants`", "", _sentence(VariantSpec.__doc__), "")
    yield from _table(VariantSpec, "")
    for kind, group in (("swarm", SimSpec), ("hunt", HuntSpec)):
        yield from ("", f"## `sim` of `sim.kind: {kind}`", "", _sentence(group.__doc__))
        yield from _group(group, "sim")


def _group(group: type[Settings], prefix: str) -> Iterator[str]:
    """Its own settings as a table, then each of its groups under a heading."""
    inner = {name: kind for name, field in group.model_fields.items() if (kind := _group_of(field)) is not None}
    if inner.keys() != group.model_fields.keys():
        yield ""
        yield from _table(group, f"{prefix}.")
    for name, kind in inner.items():
        yield from ("", f"### `{prefix}.{name}`", "", _sentence(kind.__doc__))
        yield from _group(kind, f"{prefix}.{name}")


def _table(group: type[BaseModel], prefix: str) -> Iterator[str]:
    schema: dict[str, Any] = group.model_json_schema()["properties"]
    yield from ("| setting | allowed | default | meaning |", "|---|---|---|---|")
    for name, field in group.model_fields.items():
        if _group_of(field) is not None:
            continue
        meaning = _sentence(field.description) or DASH
        yield _row(f"`{prefix}{name}`", _allowed(schema[name]), _default(field), meaning)


def _group_of(field: FieldInfo) -> type[Settings] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Settings) else None


def _allowed(schema: Mapping[str, Any]) -> str:
    """What a JSON schema lets through, in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_allowed(each) for each in schema["anyOf"] if each.get("type") != "null"))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return ", ".join(f"`{value}`" for value in values)
    match schema.get("type"):
        case "integer" | "number" as kind:
            return ("whole number" if kind == "integer" else kind) + _bounds(schema)
        case "string":
            return "path" if schema.get("format") == "path" else "text"
        case "boolean":
            return "`true`, `false`"
        case "array":
            return "list: " + (_allowed(schema["items"]) if "type" in schema["items"] else "groups, below")
        case "object":
            return "names and values"
        case _:
            return "any value"


def _bounds(schema: Mapping[str, Any]) -> str:
    words = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below", "maximum": "to"}
    given = {name: schema[name] for name in words if name in schema and schema[name] < BOUNDLESS}
    if schema["type"] == "integer" and "exclusiveMinimum" in given:
        given["minimum"] = given.pop("exclusiveMinimum") + 1
    found = [f"{word} {given[name]:,}".removesuffix(".0") for name, word in words.items() if name in given]
    return f" {' '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value: object = field.get_default(call_default_factory=True)
    if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        return "the four algorithms"
    if value is None or value in ((), {}):
        return DASH
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`"


def _events() -> Iterator[str]:
    yield from _head("Events of a node", "`telemetry/events.py`")
    yield "A node appends them to `events.jsonl` in its run folder, one JSON object a line. `event` says which it is;"
    yield "`time` is wall time in seconds since 1970. Later versions may add fields: pass over what you do not know."
    yield "All else that a node shows (its display, pages, metrics and reports) is made from these."
    union = typing.get_args(typing.get_args(AnyEvent)[0])
    for kind in union:
        yield from ("", f"## `{kind.model_fields['event'].default}`", "", _sentence(kind.__doc__), "")
        yield from _fields(kind, skip=frozenset({"event", *Event.model_fields}))
    yield from ("", "## Within them")
    for kind in (Strangers, Distribution):
        yield from ("", f"### {kind.__name__}", "", _sentence(kind.__doc__), "")
        yield from _fields(kind, skip=frozenset())


def _fields(kind: type[BaseModel], skip: frozenset[str]) -> Iterator[str]:
    """Fields in a table, and below it those whose name says all."""
    meanings = dict.fromkeys(kind.model_fields, "") | _docstrings(kind)
    fields = {name: field for name, field in kind.model_fields.items() if name not in skip}
    named = {n: (f"`{f.serialization_alias or n}`", _type(f.annotation, meanings[n])) for n, f in fields.items()}
    if told := [_row(*cells, meanings[name]) for name, cells in named.items() if meanings[name]]:
        yield from ("| field | type | meaning |", "|---|---|---|", *told, "")
    if plain := [" ".join(cells) for name, cells in named.items() if not meanings[name]]:
        yield f"Others: {'; '.join(plain)}."


def _docstrings(kind: type[BaseModel]) -> dict[str, str]:
    """The text under each field of a class that does not keep it itself."""
    body = typing.cast("ast.ClassDef", ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]).body
    found: dict[str, str] = {}
    for node, after in itertools.pairwise(body):
        text = after.value if isinstance(after, ast.Expr) else None
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(text, ast.Constant):
            found[node.target.id] = _sentence(str(text.value))
    return found


def _type(annotation: object, meaning: str = "") -> str:
    """A field's type as a reader of JSON knows it; words that the meaning explains are not said twice."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    plain = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`", type(None): "null"}
    if origin is typing.Literal:
        values = [f"`{value}`" for value in inner]
        return "one of these" if all(value in meaning for value in values) else ", ".join(values)
    if origin in (list, tuple):
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return f"{_type(inner[1])} by name"
    if inner:
        return " or ".join(_type(each) for each in inner)
    return plain[annotation] if annotation in plain else getattr(annotation, "__name__", str(annotation))


def _exit_codes() -> Iterator[str]:
    yield from _head("Exit codes", "`errors.py`")
    yield "The same for every command. [Troubleshooting](troubleshooting.md) says what to do about each."
    yield from ("", "| code | name | meaning |", "|---|---|---|")
    for code, meaning in EXIT_MEANINGS.items():
        yield _row(f"[{code.value}](troubleshooting.md#{code.value}-{code.name.lower()})", f"`{code.name}`", meaning)


def _head(title: str, source: str) -> Iterator[str]:
    yield from (f"# {title}", "", f"This page is made from {source}; after a change there: `make reference`.", "")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
