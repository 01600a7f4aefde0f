"""What is wrong with a setting, and what may be meant instead, in a person's words rather than pydantic's."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

from pydantic_core import ErrorDetails

from noloco_node.config.run_spec import ED25519_PEER_ID, RUN_NAME
from noloco_node.errors import near_words, suggestion

MAX_SHOWN = 60

_KINDS = {
    "string": "must be text",
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "tuple": "must be a list, as in [one, another]",
    "list": "must be a list, as in [one, another]",
    "dict": "must be a group of names and values",
    "path": "must be the name of a file or folder",
}
"""The wording of an error by the beginning of pydantic's name for an error of type or of parsing."""
_PATTERNS = {
    RUN_NAME: "must be at most 64 small letters, digits, '.', '_' and '-', of which the first is a letter or a digit",
    ED25519_PEER_ID: "must be a peer id: 52 letters and digits, the first of them 12D3KooW",
}


def value_in_words(value: object) -> str:
    """A value as it may have been written in a file."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return f"the date {value.isoformat()} (in quotes it would be text)"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def allowed_in_words(details: ErrorDetails) -> str:
    """What a setting takes: `must be ...`."""
    kind, _, what = details["type"].partition("_")
    context = details.get("ctx", {})
    if what in ("type", "parsing", "from_float", "parsing_size") and kind in _KINDS:
        return _KINDS[kind]
    if details["type"] == "string_pattern_mismatch" and context.get("pattern") in _PATTERNS:
        return _PATTERNS[context["pattern"]]
    if details["type"] in ("string_too_short", "string_too_long"):
        bound = f"at least {context['min_length']}" if what == "too_short" else f"at most {context['max_length']}"
        return f"must have {bound} letters"
    if details["type"] == "too_short":
        return f"must name at least {context['min_length']}"
    return details["msg"].replace("Input should be", "must be").replace("String should", "must").rstrip(".")


def did_you_mean(setting: str, siblings: Sequence[str], known: Iterable[str]) -> str:
    """The nearest names to one that does not exist, those of its own group and equal ones elsewhere first. If there is
    none, they are what its group has. `known` are all dotted names, of groups too."""
    group, _, leaf = setting.rpartition(".")

    def in_group(cutoff: float) -> list[str]:
        return [f"{group}.{name}" if group else name for name in near_words(leaf, siblings, most=2, cutoff=cutoff)]

    of_leaf: dict[str, list[str]] = {}
    for name in known:
        of_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    meant = in_group(0.75) + of_leaf.get(leaf, []) + in_group(0.6)
    if not meant:
        meant = [name for near in near_words(leaf, of_leaf, most=2, cutoff=0.75) for name in of_leaf[near]]
    if meant:
        return suggestion(list(dict.fromkeys(meant))[:3])
    return f"known here: {', '.join(siblings)}" if siblings else ""
