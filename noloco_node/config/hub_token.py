"""Tells whether this process shows a hub the token that its user is logged in with.

A run names its text and its tokenizer, and a stranger may have written the run. With the token the stranger would
choose among all that the user may read, private data sets included.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Literal, cast

SETTING = "node.hub_token"
OPTION = "--hub-token"
VARIABLE = "HF_HUB_DISABLE_IMPLICIT_TOKEN"
"""The hub's library reads this variable when it is loaded, here and in every process that this one starts."""


def settle(raw: Mapping[str, Any]) -> None:
    """Have this process and those that it starts send the token only where a configuration, as it was written, says so.

    A library may look for the token by itself, so the choice is made for the whole process.
    """
    node: object = raw.get("node")
    sent = isinstance(node, dict) and cast("dict[str, object]", node).get(SETTING.removeprefix("node.")) is True
    os.environ[VARIABLE] = "0" if sent else "1"
    constants: Any = sys.modules.get("huggingface_hub.constants")
    if constants is not None:
        constants.HF_HUB_DISABLE_IMPLICIT_TOKEN = not sent


def hub_token() -> Literal[False] | None:
    """What a library of the hub is given as its `token`: False sends none, None the one that it finds."""
    return None if os.environ.get(VARIABLE) == "0" else False


def remedy() -> str:
    """What else to do where a hub gives nothing, to stand behind other remedies; empty where the token was sent."""
    if hub_token() is None:
        return ""
    return f"; a private or gated one comes only with your own token, which {OPTION} sends"
