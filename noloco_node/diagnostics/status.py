"""What a node is doing and what it has contributed, read from its run folder: while it runs, and long after."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from noloco_node import ambient
from noloco_node.accounting.statements import Contribution, read_contribution
from noloco_node.config.files import SMALL_BYTES
from noloco_node.errors import SHOWN, ExitCode, UserError
from noloco_node.identity.keys import load_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import (
    TOLD_SECONDS,
    Account,
    AnyEvent,
    Doing,
    Evaluation,
    Event,
    InnerStep,
    NodeReassigned,
    NodeStarted,
    NodeStopped,
    P2pdRestarted,
    Reachability,
    StateDownload,
    Warned,
    parse_event,
)
from noloco_node.telemetry.words import an_hour, as_bytes, as_clock_time, as_long, as_nodes, one_line, printable

SHOWN_WARNINGS = (
    ("invitation_ends", "invitation"),
    ("clock_wrong", "clock"),
    ("identity_shared", "identity"),
    ("another_life", "birth"),
)
"""Each warning is shown by this line of a node's present."""
SILENT_SECONDS = TOLD_SECONDS + 15.0
"""A node that trains writes its account at least once in `TOLD_SECONDS`; after so many silent seconds it is stuck."""

_KIND = re.compile(rb'"event":"([a-z0-9_]+)"')
_WARNING = re.compile(rb'"what":"([a-z_]+)"')

_CAUSES = {"died": "died", "frozen": "had frozen"}

E = TypeVar("E", bound=Event)


class Events:
    """The last event of each kind in an event file, and the last warning of each, in the file's order.

    By their times a machine whose clock was set back would look as it did before for as long as that.
    """

    def __init__(self, path: Path) -> None:
        lines: dict[bytes, bytes] = {}
        with path.open("rb") as file:
            while line := file.readline(SMALL_BYTES):
                kind = _KIND.search(line)
                if kind and line.endswith(b"\n"):
                    name = kind.group(1) + _warned_of(kind.group(1), line)
                    lines.pop(name, None)
                    lines[name] = line
        self._last = [event for line in lines.values() if (event := _parsed(line)) is not None]

    def last(self, kind: type[E]) -> E | None:
        """The last one of this kind; None where there is none."""
        return next((event for event in self._last if isinstance(event, kind)), None)

    def warning(self, what: str) -> Warned | None:
        """The last one of this."""
        return next((event for event in self._last if isinstance(event, Warned) and event.what == what), None)

    @property
    def time(self) -> float:
        """Wall time of the very last."""
        return self._last[-1].time if self._last else 0.0

    def follows(self, event: Event | None, *earlier: Event | None) -> bool:
        """Whether there is such an event, and it stands behind all of these that there are."""
        return event is not None and all(self._place(one) <= self._place(event) for one in earlier if one is not None)

    def _place(self, event: Event) -> int:
        return next(place for place, one in enumerate(self._last) if one is event)


def _warned_of(kind: bytes, line: bytes) -> bytes:
    what = _WARNING.search(line) if kind == b"warned" else None
    return what.group(1) if what else b""


def _parsed(line: bytes) -> AnyEvent | None:
    try:
        return parse_event(line)
    except ValidationError:  # a line of another version, or one that was tampered with
        return None


def status_lines(path: Path, now: float | None = None) -> list[str]:
    """The lines that `noloco-node status` prints, for a node, or for all nodes with folders in that one, a line each.
    UserError (RUN_FOLDER) if no node has ever run there."""
    now, members = ambient.wall() if now is None else now, node_folders(path)
    if members != [path]:
        return [one_line(line) for line in _swarm(path, members, now)]
    folder = RunFolder(path)
    events = Events(folder.events)
    started = events.last(NodeStarted)
    lines = [
        *_node(path, folder, started, events),
        *_now(folder, events, started, now),
        *_text(events, started, now),
        *_training(events, started),
        *_costs(folder, events, started),
        *_ledger(folder, started),
    ]
    return [one_line(line) for line in lines]


def node_folders(path: Path) -> list[Path]:
    """The folders of the nodes that ran in this one: itself, or those of a local swarm or of a machine's devices.
    UserError (RUN_FOLDER) if no node has ever run there."""
    events = RunFolder(path).events.name
    if (path / events).is_file():
        return [path]
    members = sorted(file.parent for place in ("*", "nodes/*") for file in path.glob(f"{place}/{events}"))
    if not members and _of_a_seed(RunFolder(path)):
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"node.run_folder is '{path}', and no node has run there: it looks like a seed's, which trains nothing and "
            "keeps no events",
            "noloco-node watch ADDRESS, with the address that the seed prints, shows the swarm that it holds together",
        )
    if not members:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"node.run_folder is '{path}', and no node has run there: it has no {events}",
            "name the run folder of a node (--run-folder of `run` and `join`; runs/node where it was not given)",
        )
    return members


def _of_a_seed(folder: RunFolder) -> bool:
    """Tell whether an identity has been in a network here that served no run as a node does. A node keeps its RunSpec,
    even if its events were moved away."""
    return folder.identity.is_file() and folder.peers.is_file() and not folder.run_spec.exists()


def said_now(folder: RunFolder, now: float) -> str:
    """Whether the node of this folder runs, and what it does or waits for, in one line."""
    events = Events(folder.events)
    return one_line(_said(folder, events, events.last(NodeStarted), now))


def _said(folder: RunFolder, events: Events, started: NodeStarted | None, now: float) -> str:
    return next(_now(folder, events, started, now)).removeprefix("now").strip()


def _swarm(path: Path, members: Sequence[Path], now: float) -> Iterator[str]:
    """The nodes of a local swarm, or of a machine's devices."""
    yield f"{len(members)} nodes in {path}"
    runs: dict[str, list[str]] = {}
    for member in members:
        run, line = _member(member, now)
        runs.setdefault(run, []).append(line)
    for run, lines in sorted(runs.items(), key=lambda each: not each[0]):
        yield f"  run               {run or 'none yet'}"
        yield from lines
    yield f"  more of each with: noloco-node status {members[0]}"


def _member(member: Path, now: float) -> tuple[str, str]:
    """The run of one of several nodes, empty where it was never up, and its line."""
    folder, events = RunFolder(member), Events(RunFolder(member).events)
    started, account = events.last(NodeStarted), events.last(Account)
    run = "" if started is None else f"{started.run_name} ({started.run_id})"
    where = "not up yet" if started is None else f"stage {_at(events, started).stage}"
    share = "" if account is None else f", {_share(account)}"
    loss = events.last(InnerStep)
    trained = "" if loss is None else f", training loss {loss.loss:.4f}"
    return run, f"  {member.name:<16}  {where}{share}{trained}; {_said(folder, events, started, now)}"


def _at(events: Events, started: NodeStarted) -> NodeStarted | NodeReassigned:
    """What has told last at which stage a node is: its start, or its last move in that life."""
    moved = events.last(NodeReassigned)
    return moved if moved is not None and events.follows(moved, started) else started


def _node(path: Path, folder: RunFolder, started: NodeStarted | None, events: Events) -> Iterator[str]:
    yield f"node in {path}"
    if started is None:
        yield "  it has not been up yet"
        return
    yield f"  peer id           {started.peer_id}"
    yield f"  run               {started.run_name} ({started.run_id})"
    at = _at(events, started)
    yield f"  stage             {at.stage} of {started.stages}, {at.parameters:,} parameters"
    if folder.log.exists():
        yield f"  log               {folder.log}"


def _now(folder: RunFolder, events: Events, started: NodeStarted | None, now: float) -> Iterator[str]:
    """Whether it runs, and what it does or waits for, and for how long."""
    stopped, doing = events.last(NodeStopped), events.last(Doing)
    ended, in_use = events.follows(stopped, started, doing), folder.in_use
    if in_use and folder.silent_so_far:
        yield f"now                 {_activity(events, None, now)}"
        return
    if not ended and not in_use:
        if not events.time:
            yield f"now                 not known: nothing in {folder.events} can be read"
            return
        gone = _ago(now - events.time)
        yield f"now                 gone without a last word {gone} ago: killed, or the machine went down"
        return
    if ended and stopped is not None:
        yield f"now                 stopped {_ago(now - stopped.time)} ago ({_why(stopped, events.last(Account))})"
        return
    silent = now - events.time
    yield f"now                 {_activity(events, doing, now)}"
    yield from _p2pd(events, started, now)
    reached = events.last(Reachability)
    if reached is not None:
        yield f"  reached           {reached.words}"
    for what, name in SHOWN_WARNINGS:
        warned = events.warning(what)
        if warned is not None and events.follows(warned, started):
            yield f"  {name:<16}  {_ago(now - warned.time)} ago: {warned.detail}"
    quiet = doing is not None and doing.what in ("joining", "paused")  # then it writes of what it waits for alone
    if events.time and silent > SILENT_SECONDS and not quiet:  # one that starts has written nothing yet
        why = "its process is stuck, or its disk is full; these figures are of then"
        yield f"  silent            for {_ago(silent)}: {why}"


def _why(stopped: NodeStopped, account: Account | None) -> str:
    """Why it ended. The run may have reached its target where this node's own clock was behind."""
    why = stopped.reason.replace("_", " ")
    share = "100 %" if account is None else _share(account)
    if stopped.reason == "target_reached" and share != "100 %":
        why += f" by the run; this node itself stood at {share}"
    return f"{why}: {stopped.detail}" if stopped.detail else why


def _share(account: Account) -> str:
    return f"{100.0 * min(1.0, account.clock / max(1, account.target)):.0f} %"


def _p2pd(events: Events, started: NodeStarted | None, now: float) -> Iterator[str]:
    """How often p2pd had to be started again in this life of the node."""
    last = events.last(P2pdRestarted)
    if last is not None and events.follows(last, started):
        often, ago = "once" if last.restarts == 1 else f"{last.restarts} times", _ago(now - last.time)
        yield f"  p2pd              started again {often}, last {ago} ago: it {_CAUSES[last.cause]}"


def _text(events: Events, started: NodeStarted | None, now: float) -> Iterator[str]:
    """What of it could not be read in this life of the node."""
    last = events.warning("text_damaged")
    if last is not None and events.follows(last, started):
        yield f"  text              {_ago(now - last.time)} ago: {last.detail}"


def _activity(events: Events, doing: Doing | None, now: float) -> str:
    if doing is None:
        return "starting"
    since = _ago(now - doing.since)
    if doing.what.startswith("waiting"):
        return f"waiting for {since} for {doing.detail}"
    download = events.last(StateDownload)
    if doing.what == "downloading" and download is not None and download.time >= doing.since:
        share = 100.0 * download.received / max(1, download.total)
        return f"copying the state of {download.source}: {share:.0f} % of {download.total / 1e6:,.1f} MB, for {since}"
    return f"{doing.detail} (for {since})" if doing.what == "paused" else f"{doing.detail}, for {since}"


def _training(events: Events, started: NodeStarted | None) -> Iterator[str]:
    account, step, loss = events.last(Account), events.last(InnerStep), events.last(Evaluation)
    stopped = events.last(NodeStopped)
    if stopped is not None and (stopped.reason != "target_reached" or not events.follows(stopped, started)):
        stopped = None
    if account is not None and stopped is not None:
        # A replica's clock is its own: that of one which was behind stands still where its stage peers end the run.
        yield f"progress            the run is over: {account.target:,} tokens; this node stood at {account.clock:,.0f}"
    elif account is not None:
        yield f"progress            {account.clock:,.0f} of {account.target:,} tokens ({_share(account)})"
        yield f"  nodes             {as_nodes(account.nodes_per_stage)}, as this node sees them"
    if step is not None:
        yield f"  training loss     {step.loss:.4f} nats/token at inner step {step.step}"
    if loss is not None:
        yield f"  validation loss   {loss.loss:.4f} nats/token"
        yield from (f"    {printable(each.source):<15} {each.loss:.4f}" for each in loss.sources)


def _costs(folder: RunFolder, events: Events, started: NodeStarted | None) -> Iterator[str]:
    """What this life of the node has taken of the line, the device and the disk."""
    account = events.last(Account)
    if account is not None and started is not None and events.follows(account, started):
        seconds = max(1.0, account.time - started.time)
        yield f"costs               in {as_long(seconds)}, since it was last started"
        yield f"  sent              {_traffic(account.bytes_sent, seconds)}"
        yield f"  received          {_traffic(account.bytes_received, seconds)}"
        if account.bytes_nearby:
            yield f"  off the line      {as_bytes(account.bytes_nearby)} of both stayed on this machine"
        yield f"  device            at work for {min(1.0, account.busy_seconds / seconds):.0%} of the time"
    elif started is not None:
        yield "costs               not written down yet: the node says every few seconds what it has sent"
    yield f"  disk              {as_bytes(_size_of(folder.path))} in {folder.path}"


def _traffic(by_kind: Mapping[str, int], seconds: float) -> str:
    """`1.2 GB, 3.4 Mbit/s on average (exchange 1.0 GB, 1.3 GB/h; state 0.2 GB, 250.0 MB/h)`."""
    total = sum(by_kind.values())
    kinds = "; ".join(
        f"{printable(kind)} {as_bytes(count)}, {an_hour(count, seconds)}"
        for kind, count in sorted(by_kind.items())
        if count
    )
    return f"{as_bytes(total)}, {8e-6 * total / seconds:,.2f} Mbit/s on average" + (f" ({kinds})" if kinds else "")


def _size_of(folder: Path) -> int:
    """Bytes of the files in a folder, links not followed; what goes meanwhile counts nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _ledger(folder: RunFolder, started: NodeStarted | None) -> Iterator[str]:
    owner = PeerId(started.peer_id) if started else None
    if owner is None and folder.identity.is_file():
        owner = load_identity(folder.identity).peer_id
    if owner is None or not folder.contribution.is_file():
        yield "contribution        none written down yet"
        return
    total = read_contribution(folder.contribution, owner)
    yield f"contribution        {_since(total)}"
    if total.first is not None:
        yield f"  tokens            {total.tokens:,}"
        yield f"  microbatches      {total.drawn:,} drawn, {total.served:,} served for others"
        yield f"  outer steps       {total.outer_rounds:,}"
    yield from _receipts(total)
    if total.refused:
        yield f"  refused           {total.refused} lines of {folder.contribution} are not signed by the peer they name"


def _since(total: Contribution) -> str:
    if total.first is None:  # peers may sign a receipt before this node has written a line of its own
        return "its own work is not written down yet: that follows every five minutes, and at its end"
    begun, until = (as_clock_time(when, "%Y-%m-%d %H:%M") for when in (total.first, total.last))
    return f"since {begun}, {as_long(total.seconds)} at work until {until}, as this node says"


def _receipts(total: Contribution) -> Iterator[str]:
    rows = sorted(total.receipts.items(), key=lambda item: -item[1].microbatches)
    microbatches, tokens = sum(row.microbatches for _, row in rows), sum(row.tokens for _, row in rows)
    yield f"  receipts          {microbatches:,} microbatches, {tokens:,} tokens, signed by {len(rows)} peers"
    for peer, row in rows[:SHOWN]:
        yield f"    {peer}  {row.microbatches:,} microbatches, {row.tokens:,} tokens"
    if len(rows) > SHOWN:
        yield f"    and {len(rows) - SHOWN} more"


def _ago(seconds: float) -> str:
    return as_long(max(0.0, seconds)) if math.isfinite(seconds) else "an unknown time"
