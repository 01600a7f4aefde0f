"""What the environment says: settings of `node:` (`NOLOCO_NODE_DEVICE=cuda` stands for `node.device`), and whether this
process shows a hub the token that its user is logged in with.

A run names its text and its tokenizer, and a stranger may have written the run. With the token the stranger would
choose among all that the user may read, private data sets included.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import yaml

from noloco_node.config.files import parse_yaml
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.settings import RENAMED
from noloco_node.errors import near_words, suggestion

logger = logging.getLogger(__name__)

PREFIX = "NOLOCO_NODE_"
_FAMILY = "NOLOCO_"
_OTHERS = ("NOLOCO_CHAOS_",)
"""Variables of the tests begin so."""
_SERVICE_LINK = re.compile(r"_(SERVICE_(HOST|PORT)\w*|PORT(_\d+_(TCP|UDP)\w*)?)$")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """What the environment says of `node:`."""

    values: dict[str, object]
    """By the setting's name within `node:`, not validated."""
    mistakes: dict[str, str]
    """Variables that stand for no setting, and what is wrong with each."""


def variable_of(setting: str) -> str:
    """The variable that stands for a setting of `node:`, which is named without its group."""
    return PREFIX + setting.upper()


def node_environment(environ: Mapping[str, str]) -> NodeEnvironment:
    """Read all variables that begin with NOLOCO_. An empty one counts as not set: that is what a compose file gives
    for a variable that its user left out."""
    settings = {variable_of(name): name for name in NodeSettings.model_fields}
    renamed = {variable_of(old[5:]): new[5:] for old, new in RENAMED.items() if old.startswith("node.")}
    values: dict[str, object] = {}
    mistakes: dict[str, str] = {}
    for variable, text in sorted(environ.items()):
        if not variable.upper().startswith(_FAMILY) or variable.startswith(_OTHERS) or _is_service(variable, text):
            continue
        if variable in renamed:
            logger.warning("%s is called %s now: rename it", variable, variable_of(renamed[variable]))
            if text.strip():
                values.setdefault(renamed[variable], _value(renamed[variable], text.strip()))
        elif variable not in settings:
            mistakes[variable] = _unknown(variable, list(settings))
        elif text.strip():
            values[settings[variable]] = _value(settings[variable], text.strip())
    return NodeEnvironment(values, mistakes)


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that is told its settings in other ways."""
    return {name: text for name, text in environ.items() if not name.startswith(PREFIX)}


def _is_service(variable: str, text: str) -> bool:
    """Kubernetes names the services of a namespace in the environment; one called `noloco-node` would set our port."""
    found = _SERVICE_LINK.search(variable)
    if found is None:
        return False
    return found[0] != "_PORT" or _SERVICE_ADDRESS.match(text) is not None


def _unknown(variable: str, known: list[str]) -> str:
    if variable.upper().startswith("NOLOCO_RUN_") and variable.upper().replace("RUN", "NODE", 1) not in known:
        return "no variable stands for a setting of run:, which all nodes of a run share; it goes into the file"
    own_part = variable.upper().removeprefix(_FAMILY).removeprefix("NODE_")
    near = near_words(own_part, (name.removeprefix(PREFIX) for name in known))
    return "there is no such variable; " + (suggestion([PREFIX + name for name in near]) or "leave it out")


def _value(setting: str, text: str) -> object:
    """The value of a setting in a variable's text. A list's items are parted by spaces or commas. What may be a number
    or a boolean is read as in a file, all else as it stands."""
    kinds = set(_kinds(NodeSettings.model_fields[setting].annotation))
    if tuple in kinds:
        return [item for item in re.split(r"[\s,]+", text.strip("[]")) if item]
    if kinds & {int, float, bool}:
        try:
            return parse_yaml(text)
        except yaml.YAMLError:
            return text
    return text


def _kinds(annotation: object) -> Iterator[object]:
    """The plain types behind an annotation."""
    origin = typing.get_origin(annotation)
    if origin is tuple:
        yield tuple
    elif origin is typing.Literal:
        yield from (type(value) for value in typing.get_args(annotation))
    elif origin is None:
        yield annotation
    else:
        for inner in typing.get_args(annotation):
            yield from _kinds(inner)


HUB_SETTING = "node.hub_token"
HUB_OPTION = "--hub-token"
HUB_VARIABLE = "HF_HUB_DISABLE_IMPLICIT_TOKEN"
"""The hub's library reads this variable when it is loaded, here and in every process that this one starts."""


def settle_hub_token(raw: Mapping[str, Any]) -> None:
    """Have this process and those that it starts send the token only where a configuration, as it was written, says so.

    A library may look for the token by itself, so the choice is made for the whole process.
    """
    node: object = raw.get("node")
    sent = isinstance(node, dict) and cast("dict[str, object]", node).get(HUB_SETTING.removeprefix("node.")) is True
    os.environ[HUB_VARIABLE] = "0" if sent else "1"
    constants: Any = sys.modules.get("huggingface_hub.constants")
    if constants is not None:
        constants.HF_HUB_DISABLE_IMPLICIT_TOKEN = not sent


def hub_token() -> Literal[False] | None:
    """What a library of the hub is given as its `token`: False sends none, None the one that it finds."""
    return None if os.environ.get(HUB_VARIABLE) == "0" else False


def hub_remedy() -> str:
    """What else to do where a hub gives nothing, to stand behind other remedies; empty where the token was sent."""
    if hub_token() is None:
        return ""
    return f"; a private or gated one comes only with your own token, which {HUB_OPTION} sends"
