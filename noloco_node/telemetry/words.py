"""Figures in words for a person, the same on every screen and in every line of the log; and what a command says before
it is silent for seconds, which looks like a process that hangs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from noloco_node.errors import SHOWN


def as_loss(value: float | None) -> str:
    """A loss in nats per token, without its unit."""
    return "–" if value is None else f"{value:.4f}"


def as_scientific(value: float | None) -> str:
    """A figure that may be of any size."""
    return "–" if value is None else f"{value:.2e}"


def as_rate(value: float | None) -> str:
    """Tokens a second, without the unit."""
    return "–" if value is None else f"{value:,.0f}"


def as_lag(tokens: float | None) -> str:
    """Tokens by which one is behind another: `1,200`, or `300 ahead` where it is further."""
    if tokens is None:
        return "–"
    return f"{-tokens:,.0f} ahead" if tokens <= -0.5 else f"{abs(tokens):,.0f}"


def as_long(seconds: float | None) -> str:
    """A time of seconds to weeks, roughly: `40 s`, `12 min`, `3.5 h`; a question mark where it is not known."""
    if seconds is None:
        return "?"
    if seconds < 120.0:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200.0 else f"{seconds / 3600:,.1f} h"


def as_bytes(count: float) -> str:
    """A size in the decimal unit that leaves one to three digits: `37.0 GB`, `13.2 MB`, `512 B`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} B"


def an_hour(count: float, seconds: float) -> str:
    """What a count of bytes in so many seconds comes to: `1.3 GB/h`."""
    return f"{as_bytes(3600.0 * count / max(1.0, seconds))}/h"


def as_nodes(per_stage: Sequence[int]) -> str:
    """How many nodes serve which stage: `4 (stage 0: 2, stage 1: 2)`."""
    total, empty = sum(per_stage), [stage for stage, count in enumerate(per_stage) if not count]
    if len(per_stage) <= SHOWN:
        listed = ", ".join(f"stage {stage}: {count}" for stage, count in enumerate(per_stage))
        return f"{total} ({listed})"
    without = f"none at {as_stages(empty)}" if empty else "each has some"
    return f"{total} at {len(per_stage)} stages, {without}"


def as_stages(stages: Sequence[int]) -> str:
    """`stage 1`, or `stages 0, 1 and 3`."""
    if len(stages) == 1:
        return f"stage {stages[0]}"
    return f"stages {', '.join(map(str, stages[:-1]))} and {stages[-1]}"


def as_many(count: int, what: str) -> str:
    """`1 replica`, or `3 replicas`."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def as_trained(clock: float, target: int) -> str:
    """How far a run is: `12,288 of 49,152 tokens`. What its nodes train while they come to its end is told apart."""
    done = f"{min(clock, target):,.0f} of {target:,} tokens"
    beyond = clock - target
    return f"{done}, and {beyond:,.0f} beyond its end" if beyond >= 0.5 else done


def as_clock_time(when: float, style: str = "%H:%M:%S") -> str:
    """A local time in this style, `14:05:09` if none is given, of a wall time that may be anybody's word."""
    try:
        return time.strftime(style, time.localtime(when))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"


def as_utc(when: float) -> str:
    """A date and a time to the minute, for people in other time zones as well: `2026-11-27 16:23 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(when))


def as_node(peer_id: str, name: str = "") -> str:
    """A node by the end of its peer id, after the name that its volunteer gave it, which another may bear as well."""
    return f"{name} …{peer_id[-6:]}" if name else f"…{peer_id[-6:]}"


def shortened(text: str, most: int) -> str:
    """A text of at most so many letters; a longer one ends behind a whole word, with a mark."""
    if len(text) <= most:
        return text
    kept = text[: most - 1]
    end = max(kept.rfind(" "), kept.rfind("\n"))
    return f"{kept[:end] if end > 0 else kept}…"


def printable(text: str) -> str:
    """What a stranger says, or writes into a run folder, does not speak to the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def one_line(text: str) -> str:
    """The text on one line, without control characters."""
    return printable(" ".join(text.splitlines()))


def plain_text(text: str) -> str:
    """The text without control characters; it may have several lines."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


SLOW_TO_LOAD = "torch"


def say_asking(peers: Sequence[str], log_format: str = "text") -> None:
    """Before peers are asked for their run; without any it is `say_loading`. Nothing beside a log of JSON, in which it
    would be no line."""
    if not peers:
        say_loading(log_format)
    elif log_format == "text":
        whom = "the peer" if len(peers) == 1 else f"{len(peers)} peers"
        say(f"asking {whom} at {', '.join(peers)} for the run: some seconds, half a minute where one is dead")


def say_loading(log_format: str = "text") -> None:
    """Before torch and transformers are loaded, where they are not yet. Nothing beside a log of JSON."""
    if log_format == "text" and SLOW_TO_LOAD not in sys.modules:
        say("loading torch and transformers: some seconds, from a cold disk more")


def say_drawing() -> None:
    """Before a report is made."""
    say("reading the run folder and drawing: some seconds")


def say(line: str) -> None:
    """To the person, beside what the command gives."""
    print(line, file=sys.stderr, flush=True)
