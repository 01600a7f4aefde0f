"""What a command says on stderr before it is silent for seconds, which looks like a process that hangs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

ASKING_SECONDS = 30
"""Seconds to load, to start p2pd, and to find that an address is dead; roughly, for a waiting person."""
LOADING_SECONDS = 10
"""Seconds to load what trains; roughly, from a cold disk more."""
SLOW_TO_LOAD = "torch"


def say_asking(peers: Sequence[str], log_format: str = "text") -> None:
    """Before peers are asked for their run; without any it is `say_loading`. Nothing beside a log of JSON, in which it
    would be no line."""
    if not peers:
        say_loading(log_format)
    elif log_format == "text":
        whom = "the peer" if len(peers) == 1 else f"{len(peers)} peers"
        _say(f"asking {whom} at {', '.join(peers)} for the run: up to {ASKING_SECONDS} s")


def say_loading(log_format: str = "text") -> None:
    """Before torch and transformers are loaded, where they are not yet. Nothing beside a log of JSON."""
    if log_format == "text" and SLOW_TO_LOAD not in sys.modules:
        _say(f"loading torch and transformers: about {LOADING_SECONDS} s")


def say_drawing() -> None:
    """Before a report is made."""
    _say("reading the run folder and drawing: some seconds")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
