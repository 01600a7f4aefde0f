"""What a crowd is: how many nodes, their devices, links and lives, and what befalls them."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from noloco_node.config.settings import Positive, PositiveFloat, Settings


class DeviceSettings(Settings):
    """The nodes' devices: their speeds are spread evenly on a logarithmic scale."""

    fastest: Annotated[float, Field(ge=1.0, le=1e6)] = 16.0
    """Speed of the fastest, in times the slowest."""
    forward_seconds: PositiveFloat = 4.0
    """Seconds of the slowest device for a microbatch through one stage; a backward takes twice as long."""


class LinkSettings(Settings):
    """The nodes' links."""

    up_mbit: PositiveFloat = 20.0
    """Median of the uplinks, Mbit/s."""
    down_mbit: PositiveFloat = 100.0
    """Median of the downlinks, Mbit/s."""
    sigma: Annotated[float, Field(ge=0.0, le=3.0)] = 0.7
    """Deviation of their logarithm."""
    regions: Positive = 5
    """Nodes are spread over so many, evenly."""
    near_seconds: Annotated[float, Field(ge=0.0)] = 0.03
    """Round trip within a region."""
    far_seconds: Annotated[float, Field(ge=0.0)] = 0.15
    """Round trip between two."""


class WorkSettings(Settings):
    """What is trained, and what it sends."""

    stages: Annotated[int, Field(gt=0, le=64)] = 4
    """Pipeline stages; nodes choose theirs by the daemon's own rule."""
    microbatch_bytes: Positive = 400_000
    """Activations of one microbatch between two stages; its gradients are as many."""
    exchange_bytes: Positive = 30_000_000
    """What a replica sends in an outer step."""
    exchange_seconds: Annotated[float, Field(ge=0.0)] = 0.0
    """Seconds of a node's processor that an exchange takes on its side; 30 MB of int8 take some 0.9."""
    state_bytes: Positive = 360_000_000
    """What a joiner copies."""
    microbatches_a_step: Positive = 4
    """Behind a replica's inner step, as many as there are nodes at the start: the global batch grows with the swarm."""
    inner_steps: Positive = 10
    """H."""
    min_inner_steps: Positive = 5
    """H_min."""
    in_flight: Positive = 8
    """See `node.in_flight`."""
    max_pending: Positive = 16
    """See `node.max_pending`."""


class DirectorySettings(Settings):
    """How nodes see each other."""

    view: Literal["everybody", "buckets"] = "buckets"
    """`buckets`: large stages are seen in part, as nodes see them; `everybody`: each node reads all records."""
    record_seconds: Annotated[float, Field(gt=0.0, le=86_400.0)] = 20.0
    """Life of a record."""
    look_seconds: Annotated[float, Field(ge=0.1)] = 2.0
    """Between two looks of a node."""
    holders: Annotated[int, Field(gt=0, le=1000)] = 5
    """Nodes that keep a key."""
    record_bytes: Positive = 343
    """Bytes of a record with its signer; to ask for one key takes as many."""
    max_replicas: Positive = 1024
    """Replicas that share the global batch at most, where everybody is seen: a limit that runs had before views were
    samples."""


class Deaths(Settings):
    """Nodes die at one moment."""

    at_seconds: Annotated[float, Field(ge=0.0)]
    """When they die, seconds from the swarm's start."""
    share: Annotated[float, Field(ge=0.0, lt=1.0)]
    """Share of the living nodes that die, drawn by chance; one lives on in any case."""


class Arrivals(Settings):
    """A crowd comes."""

    at_seconds: Annotated[float, Field(ge=0.0)]
    """When the first one comes, seconds from the start."""
    within_seconds: PositiveFloat
    """They come evenly within so long."""
    times: Annotated[float, Field(gt=0.0, le=1e6)]
    """The number that comes, in times of the nodes that live then."""


class Cut(Settings):
    """A region reaches nobody else, and nobody else reaches it."""

    at_seconds: Annotated[float, Field(ge=0.0)]
    """When it begins, seconds from the start."""
    for_seconds: PositiveFloat
    """How long it lasts."""
    region: Annotated[int, Field(ge=0)] = 0
    """Which region, counted from 0."""


class CrowdSettings(Settings):
    """A crowd of more nodes than can be run whole, by events, for each size once. Seconds are of the swarm."""

    kind: Literal["crowd"]
    """What is simulated."""
    seed: Annotated[int, Field(ge=0, le=10**18)] = 0
    """Seed of all random choices: one seed, one course."""
    nodes: Annotated[tuple[Positive, ...], Field(min_length=1)]
    """Nodes at the start; several: one simulation for each."""
    seconds: PositiveFloat
    """How long it is."""
    warm_up_seconds: Annotated[float, Field(ge=0.0)] = 0.0
    """What happens before is in no figure."""
    churn_an_hour: Annotated[float, Field(ge=0.0, le=20.0)] = 0.0
    """Deaths within an hour for each node that lives; as many come."""
    min_stay_seconds: Annotated[float, Field(ge=1.0)] = 1200.0
    """See `node.min_stay_seconds`."""
    parcel: Positive = 1
    """Microbatches that go as one: in the pipeline all takes so many times as long, latencies and rests too, and each
    counts as so many. At rest this changes nothing; what follows a disturbance takes longer, and a death costs more."""
    dimensions: Positive = 8
    """Weights of a node, averaged to watch their spread; they learn nothing."""
    work: WorkSettings = WorkSettings()
    devices: DeviceSettings = DeviceSettings()
    links: LinkSettings = LinkSettings()
    directory: DirectorySettings = DirectorySettings()
    deaths: tuple[Deaths, ...] = ()
    """Moments at which many die at once."""
    arrivals: tuple[Arrivals, ...] = ()
    """Crowds that come."""
    cuts: tuple[Cut, ...] = ()
    """Regions that are cut off for a while."""

    @model_validator(mode="after")
    def _can_be(self) -> CrowdSettings:
        if min(self.nodes) < self.work.stages:
            raise ValueError(
                f"sim.nodes ({min(self.nodes)}) are fewer than sim.work.stages ({self.work.stages}): "
                "a stage would have none"
            )
        if self.parcel > self.work.microbatches_a_step:
            raise ValueError(
                f"sim.parcel ({self.parcel}) exceeds sim.work.microbatches_a_step "
                f"({self.work.microbatches_a_step}): a parcel would be more than an inner step; lower the one or raise "
                "the other"
            )
        if self.work.min_inner_steps > self.work.inner_steps:
            raise ValueError(
                f"sim.work.min_inner_steps ({self.work.min_inner_steps}) exceeds sim.work.inner_steps "
                f"({self.work.inner_steps}): lower the one or raise the other"
            )
        if self.warm_up_seconds >= self.seconds:
            raise ValueError(
                f"sim.warm_up_seconds ({self.warm_up_seconds:g}) must be below sim.seconds ({self.seconds:g})"
            )
        return self

    @model_validator(mode="after")
    def _all_befalls_somebody(self) -> CrowdSettings:
        """What never takes effect is a mistake, and would be told as a figure without effect."""
        for name in ("deaths", "arrivals", "cuts"):
            for event in getattr(self, name):
                if event.at_seconds >= self.seconds:
                    raise ValueError(
                        f"sim.{name}: what is to come at {event.at_seconds:g} s never does, sim.seconds is "
                        f"{self.seconds:g}; let it come earlier, or simulate for longer"
                    )
        fewest = min(self.nodes)
        for name, event, share in (
            *(("deaths", "die", each.share) for each in self.deaths),
            *(("arrivals", "come", each.times) for each in self.arrivals),
        ):
            if round(share * fewest) == 0:
                raise ValueError(
                    f"sim.{name}: {share:g} times {fewest} nodes is nobody, and none would {event}; raise it, or leave "
                    "it out"
                )
        for cut in self.cuts:
            if cut.region >= self.links.regions:
                raise ValueError(
                    f"sim.cuts: there is no region {cut.region}, sim.links.regions is {self.links.regions}; regions "
                    "count from 0"
                )
        if self.cuts and self.links.regions == 1:
            raise ValueError(
                "sim.cuts: sim.links.regions is 1, and nobody is elsewhere: raise it, or leave the cut out"
            )
        cuts = sorted(self.cuts, key=lambda cut: cut.at_seconds)
        for one, other in pairwise(cuts):
            if other.at_seconds < one.at_seconds + one.for_seconds:
                raise ValueError(
                    f"sim.cuts: one region is cut off at a time, and at {other.at_seconds:g} s one still is: let them "
                    "come one after the other"
                )
        return self

    @model_validator(mode="after")
    def _records_are_seen(self) -> CrowdSettings:
        if self.directory.record_seconds < 2.0 * self.directory.look_seconds:
            raise ValueError(
                f"sim.directory.record_seconds ({self.directory.record_seconds:g}) is less than twice "
                f"sim.directory.look_seconds ({self.directory.look_seconds:g}): nodes would lose sight of those that "
                "live; raise the one or lower the other"
            )
        return self

    @model_validator(mode="after")
    def _an_exchange_comes_to_its_end(self) -> CrowdSettings:
        narrow = "up_mbit" if self.links.up_mbit <= self.links.down_mbit else "down_mbit"
        mbit = min(self.links.up_mbit, self.links.down_mbit)
        seconds = 8e-6 * max(self.work.exchange_bytes, self.work.microbatch_bytes) / mbit
        if seconds > self.seconds:
            raise ValueError(
                f"sim.links.{narrow} is {mbit:g}: what a node sends at once (sim.work.exchange_bytes, "
                f"sim.work.microbatch_bytes) takes {seconds:.3g} s, and sim.seconds is {self.seconds:g}; raise the "
                "link or lower the bytes"
            )
        return self

    @property
    def hours(self) -> float:
        """How long it is."""
        return self.seconds / 3600.0
