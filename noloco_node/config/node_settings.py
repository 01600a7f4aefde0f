"""NodeSettings: what one volunteer chooses for one node. None of it needs to agree with other nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from noloco_node.config.settings import Positive, PositiveFloat, Settings

DAY = 24 * 60
"""Minutes of a day."""

_RANGE = re.compile(r"(?P<h1>\d{1,2}):(?P<m1>\d{2})\s*-\s*(?P<h2>\d{1,2}):(?P<m2>\d{2})")


class Range(NamedTuple):
    """From the one minute of the day to the other, which is no part of it. It may go over midnight."""

    begins: int
    ends: int

    def holds(self, minute: int) -> bool:
        """Whether this minute of the day lies in it."""
        if self.begins < self.ends:
            return self.begins <= minute < self.ends
        return minute >= self.begins or minute < self.ends


Hours = tuple[Range, ...]
"""Ranges that do not overlap; none stands for the whole day."""


def parse_hours(text: str) -> Hours:
    """The ranges in `22:00-07:00, 12:30-13:30`. ValueError, with a sentence for a person, where they are none, overlap,
    or never begin or end."""
    found = tuple(_parse_range(part.strip()) for part in text.split(",")) if text.strip() else ()
    for number, one in enumerate(found):
        for other in found[:number]:
            if one.holds(other.begins) or other.holds(one.begins):
                raise ValueError(
                    f"node.hours: {as_text([other])} and {as_text([one])} overlap: write them as one range"
                )
    if found and sum((one.ends - one.begins) % DAY for one in found) == DAY:
        raise ValueError(f"node.hours: '{text}' is the whole day: leave the setting out, and the node always works")
    return found


def inside(hours: Hours, minute: int) -> bool:
    """Whether a node with these hours works at this minute of the day."""
    return not hours or any(one.holds(minute) for one in hours)


def next_begin(hours: Hours, minute: int) -> int:
    """The minute of the day at which the hours begin next, for a node that has some."""
    return min((one.begins for one in hours), key=lambda begins: (begins - minute - 1) % DAY)


def as_text(hours: Sequence[Range]) -> str:
    """As a person writes them."""
    return ", ".join(f"{as_time(one.begins)}-{as_time(one.ends)}" for one in hours)


def as_time(minute: int) -> str:
    """`22:00`."""
    return f"{minute // 60:02}:{minute % 60:02}"


def _parse_range(text: str) -> Range:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"node.hours: '{text}' is no range of hours: write it as 22:00-07:00, several with commas")
    h1, m1, h2, m2 = map(int, match.group("h1", "m1", "h2", "m2"))
    for hour, minute in ((h1, m1), (h2, m2)):
        if minute > 59 or 60 * hour + minute > DAY:
            raise ValueError(f"node.hours: {hour:02}:{minute:02} in '{text}' is no time of the day")
    begins, ends = 60 * h1 + m1, 60 * h2 + m2
    if begins % DAY == ends % DAY:
        what = "is the whole day: leave the setting out" if begins != ends else "never comes: it ends as it begins"
        raise ValueError(f"node.hours: '{text}' {what}")
    return Range(begins % DAY, ends % DAY)


Port = Annotated[int, Field(ge=0, le=65535)]
NodeName = Annotated[str, Field(max_length=32, pattern=r"^[ -~]*$")]
"""Printable ASCII: it neither speaks to a terminal nor turns the line around it, and no two letters look alike."""

AUTO_MOST = 8
"""`node.in_flight: auto` keeps at most so many microbatches under way."""
AUTO_AIM = 0.98
"""`node.in_flight: auto` keeps the least number that brings this share of the best rate. Rates are seen in short
windows: what is kept brings 0.95 of the best and more."""
UNCOMPILED = "set node.compile to false"
ROUTERS_UNCOMPILED = (
    "node.compile is true, but a mixture of experts whose routers are trained (run.model.config.output_router_logits) "
    "cannot be compiled"
)
"""Transformers hands out what routers say by hooks, which torch.compile cannot follow."""


class NodeSettings(Settings):
    """Settings of one daemon."""

    run_folder: Path = Path("runs/node")
    """Where events, checkpoints, final weights and the identity go; a node started there again goes on."""
    name: NodeName = ""
    """What others are shown this node by, on their screens and on a seed's page: your name or handle, at most 32 plain
    letters. Empty: the end of its peer id."""
    device: str = "auto"
    """Torch device of the stage: cpu, cuda or cuda:1 (NVIDIA, AMD), xpu (Intel), mps (Apple); `auto` takes what there
    is."""
    stage: int | Literal["auto"] = "auto"
    """Pipeline stage to serve; `auto` takes the one with the smallest throughput that fits this machine's memory."""
    initial_peers: tuple[str, ...] = ()
    """Addresses of peers to join (`/ip4/…/tcp/…/p2p/…`); none starts a new swarm."""
    invitation: str | None = None
    """An invitation by the run's owner, or the file that holds it; a node with one takes part in no other run."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 to be reachable from other machines by IPv4, or :: by IPv6 only."""
    port: Port = 0
    """TCP port to listen on; 0 lets the system choose."""
    announce: tuple[str, ...] = ()
    """Addresses under which others reach this node, if they differ from the one it listens on: `203.0.113.7:31337`,
    `/ip4/203.0.113.7/tcp/31337`, or a host alone, with the port that it listens on."""
    uplink_mbit: PositiveFloat | None = None
    """The most that this node sends, in Mbit/s, all it does in the network taken together. Small messages go first. Not
    set: no bound."""
    downlink_mbit: PositiveFloat | None = None
    """The most that this node receives, in Mbit/s. Others see a slow line, and send it less. Not set: no bound."""
    hours: str = ""
    """Hours of the day, by this machine's clock (UTC in a container without TZ), in which it works: `22:00-07:00`,
    several with commas. It is paused in the others, as by `noloco-node pause`. Empty: it always works."""
    hub_token: bool = False
    """Show the Hugging Face hub the token that you are logged in with when it is asked for a run's text, tokenizer or
    weights. By default it is not shown, since a run of strangers could choose among what only you may read."""
    metrics_port: Port | None = None
    """Port of the pages of this node, read only: `/` for a browser, `/metrics`, `/healthz`, `/readyz`, `/api/state`. 0
    lets the system choose; not set serves none."""
    metrics_host: str = "127.0.0.1"
    """Address of `metrics_port`; 0.0.0.0 shows this node to everybody that reaches the address."""
    torch_threads: Annotated[int, Field(gt=0, le=1024)] = 1
    """CPU threads of the compute library."""
    compile: bool = False
    """Compile the stage with torch.compile before it trains: a minute or more at the start, quicker afterwards. Wants a
    C++ compiler. Not where routers are trained."""
    identity: Path | None = None
    """Private key file; `run_folder/identity.key`, created when missing, where not set."""
    reassign: Literal["auto", "always", "never"] = "auto"
    """Whether this node goes to another stage when that one is poor or has lost its last replica; `auto`: only where
    `stage` is `auto`, too."""
    min_stay_seconds: PositiveFloat = 1200.0
    """Shortest stay at a stage before this node moves to a poorer one. A stage that nobody serves does not wait."""
    start_replicas: Positive = 1
    """A run's first sample is drawn when so many replicas of every stage are up, or after a minute. A node that comes
    to a run that has begun does not wait."""
    relay: Literal["auto", "always", "never"] = "auto"
    """For a node that nobody can dial: be reached through peers that relay for others. `auto`: where the peers that it
    asks cannot dial it; `always`: from the start, by those initial peers that do, and by nothing else."""
    map_port: bool = True
    """Ask the router, by UPnP or NAT-PMP, to open the port. Not where `host` is this machine only, or `announce` says
    what others are told."""
    relay_for_others: bool = False
    """Carry the encrypted connections of nodes that nobody can dial, at this node's expense."""
    in_flight: Annotated[int, Field(gt=0, le=256)] | Literal["auto"] = "auto"
    """Microbatches that a stage-0 replica keeps under way. `auto` keeps as few as keep devices at work, its own and
    those of later stages. That is at most 8, and never more than its share of a step's batch: gradients of more would
    be staler. A microbatch that would only wait, for devices or its link, is always drawn after the next inner step."""
    max_pending: Annotated[int, Field(gt=0, le=256)] = 8
    """Microbatches of other peers that this node holds before it answers `busy`."""
    p2pd_start_seconds: PositiveFloat = 60.0
    """Time that p2pd has to start; slow disks and busy machines need it."""
    drain_seconds: PositiveFloat = 5.0
    """After SIGINT or SIGTERM: time to finish what is under way."""
    leave_seconds: PositiveFloat = 600.0
    """Longest time from a signal, or from the end of the last outer step and its hand-over, to the end of the process.
    The last checkpoint and weights are written meanwhile. Then the node names what it still waits for, and ends all the
    same. Ten minutes write 60 GB at 100 MB/s."""
    checkpoint_outer_steps: Positive = 5
    """Outer steps between two checkpoints of this node's state, in `run_folder/checkpoints`."""
    checkpoint_seconds: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 60.0
    """Least time between two checkpoints, however quick the outer steps are."""
    checkpoints_kept: Annotated[int, Field(gt=0, le=1000)] = 2
    """Checkpoints that stay on the disk; `config validate` says how much of it a node wants. The newest of each other
    stage that this node has served stays besides."""
    seed: int = 0
    """Seed of this node's random choices (routes, partners), mixed with its peer id."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Which lines the log takes: these and graver ones."""
    log_format: Literal["text", "json"] = "text"
    """Form of log lines: `text` for a person, `json` for a collector, one object a line."""

    def most_in_flight(self, share: int) -> int:
        """Microbatches that a stage-0 replica may have under way, where a step has so many of its own: what memory and
        speed are planned for."""
        return min(AUTO_MOST, share) if self.in_flight == "auto" else self.in_flight

    @property
    def moves(self) -> bool:
        """Whether this node looks for a stage that needs it more."""
        return self.reassign == "always" or (self.reassign == "auto" and self.stage == "auto")

    @property
    def working_hours(self) -> Hours:
        """`hours`, read."""
        return parse_hours(self.hours)

    @model_validator(mode="after")
    def _hours_come_and_go(self) -> NodeSettings:
        parse_hours(self.hours)
        return self

    @model_validator(mode="after")
    def _leaves_after_it_has_finished(self) -> NodeSettings:
        if self.leave_seconds <= self.drain_seconds:
            raise ValueError(
                f"node.leave_seconds ({self.leave_seconds:g}) must exceed node.drain_seconds ({self.drain_seconds:g}): "
                "what is left is for the last checkpoint, the weights and the farewell"
            )
        return self

    @model_validator(mode="after")
    def _metrics_have_a_port(self) -> NodeSettings:
        if self.metrics_port is None and self.metrics_host != "127.0.0.1":
            raise ValueError(
                f"node.metrics_host is '{self.metrics_host}', but node.metrics_port is not set: no page there"
            )
        return self


class LocalSwarmSettings(Settings):
    """Layout of `noloco-node swarm`: all daemons on this machine."""

    replicas: Positive = 4
    """Replicas of each stage; at most 64."""
    start_seconds: PositiveFloat = 180.0
    """Time for all daemons to be up."""

    @model_validator(mode="after")
    def _bounded(self) -> LocalSwarmSettings:
        if self.replicas > 64:
            raise ValueError(f"local_swarm.replicas ({self.replicas}) exceeds 64: one machine will not bear it")
        return self
