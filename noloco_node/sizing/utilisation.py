"""How much of the time a device works, by a model of the way that a microbatch goes there and back.

One replica of each stage stands for all: routes are drawn evenly, so each carries as much as any other. A microbatch
visits queues: the device of each stage twice, and the uplink of each node that sends it on or back. It waits for round
trips in between; `in_flight` of them are under way. Mean value analysis, with times of service that hardly vary, gives
the rate.

An outer step goes over the same uplink beside the training, in connections of its own. It takes what it needs, or half
of the link if that is not enough, and then lasts longer than H inner steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EXCHANGE_SHARE = 0.5
"""An outer step takes this share of an uplink that microbatches want too: connections share it evenly."""
OUTER_BLAME = 0.33
"""The outer step, and not the uplink, limits if this share of what a quick uplink would bring is lost to it."""

FULL_UPLINK = 0.8
"""An uplink limits if this share of it is used; used less, it stands idle while the few under way are elsewhere."""

Limit = Literal["device", "host", "uplink", "under way", "latency", "outer step"]


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What one microbatch asks of a replica of one stage."""

    compute_seconds: float
    """Seconds of its device, forward and backward together."""
    sends: tuple[float, ...]
    """Bytes of each message that it sends for it: on to the next stage, and back to the one before."""
    outer_bytes: float
    """The bytes of a whole outer step."""
    outer_arithmetic: float = 0.0
    """Seconds of one thread of the host, or of a card and that thread, for a whole outer step, beside the transfer."""
    host_seconds: float = 0.0
    """Seconds of the host's Python for its layers. A device that is quicker waits for them."""

    @property
    def held_seconds(self) -> float:
        """Seconds for which it holds its device: the host prepares the next call while the device computes."""
        return max(self.compute_seconds, self.host_seconds)


@dataclass(frozen=True, slots=True)
class Link:
    """What each node has to the others."""

    uplink: float
    """Bytes a second."""
    round_trip: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class UtilisationOutlook:
    """What a replica of each stage may expect."""

    microbatches_a_second: float
    device_share: tuple[float, ...]
    """The share of the time that the device of each stage works."""
    uplink_share: tuple[float, ...]
    """The share of each stage's uplink that is used, outer steps included."""
    cycle_seconds: float
    """From the draw of a microbatch to its end."""
    outer_seconds: float
    """That an outer step takes, at the stage where it takes longest."""
    outer_by_arithmetic: bool
    """An outer step takes that long by its arithmetic, on one thread of the host or on a card."""
    inner_steps: float
    """Inner steps from one outer step to the next: H, or as many as one takes where that is more."""
    limit: Limit

    @property
    def share(self) -> float:
        """The working share of the device that works most."""
        return max(self.device_share)


def outlook_of(
    stages: Sequence[StageLoad], link: Link, *, in_flight: int, h: int, step_microbatches: int
) -> UtilisationOutlook:
    """The outlook of a pipeline with these loads. Pure arithmetic. `h` counts inner steps between outer steps;
    `step_microbatches` counts those of a replica behind one inner step."""
    between = float(h * step_microbatches)
    rate = 1.0 / max(stage.held_seconds for stage in stages)
    for _ in range(200):
        left = [_left_for_microbatches(stage, link, rate, between) for stage in stages]
        new = _rate(stages, left, link, in_flight)
        settled, rate = abs(new - rate) < (1e-6) * rate, (new + rate) / 2
        if settled:
            break
    left = [_left_for_microbatches(stage, link, rate, between) for stage in stages]
    outer = [
        max(stage.outer_bytes / _left_for_outer_steps(stage, link, rate), stage.outer_arithmetic) for stage in stages
    ]
    used = [min(1.0, rate * (sum(stage.sends) + stage.outer_bytes / between) / link.uplink) for stage in stages]
    limit = _limit(stages, left, link, in_flight, rate)
    return UtilisationOutlook(
        microbatches_a_second=rate,
        device_share=tuple(min(1.0, rate * stage.compute_seconds) for stage in stages),
        uplink_share=tuple(used),
        cycle_seconds=in_flight / rate,
        outer_seconds=max(outer),
        outer_by_arithmetic=max(outer) == max(stage.outer_arithmetic for stage in stages),
        inner_steps=max(float(h), max(outer) * rate / step_microbatches),
        limit="under way" if limit == "uplink" and max(used) < FULL_UPLINK else limit,
    )


def _left_for_microbatches(stage: StageLoad, link: Link, rate: float, between: float) -> float:
    """Bytes a second of the uplink that outer steps leave, on average: at least half of it."""
    return max((1.0 - EXCHANGE_SHARE) * link.uplink, link.uplink - rate * stage.outer_bytes / between)


def _left_for_outer_steps(stage: StageLoad, link: Link, rate: float) -> float:
    return max(EXCHANGE_SHARE * link.uplink, link.uplink - rate * sum(stage.sends))


def _rate(stages: Sequence[StageLoad], uplinks: Sequence[float], link: Link, in_flight: int) -> float:
    """Microbatches a second by mean value analysis of a closed network."""
    demands = [stage.held_seconds for stage in stages]
    demands += [sum(stage.sends) / uplink for stage, uplink in zip(stages, uplinks, strict=True)]
    thinking = (len(stages) - 1) * link.round_trip
    queued, busy, rate = [0.0] * len(demands), [0.0] * len(demands), 0.0
    for count in range(1, in_flight + 1):
        # A newcomer to a queue finds one in service with half of it left: times of service hardly vary.
        stays = [d * (1.0 + q - 0.5 * b) for d, q, b in zip(demands, queued, busy, strict=True)]
        rate = min(count / (thinking + sum(stays)), 1.0 / max(demands))
        queued = [rate * stay for stay in stays]
        busy = [min(1.0, rate * demand) for demand in demands]
    return rate


def _limit(stages: Sequence[StageLoad], uplinks: Sequence[float], link: Link, in_flight: int, rate: float) -> Limit:
    """What holds the rate down most: taken away, it would bring the largest gain."""
    slowest = max(stages, key=lambda stage: stage.held_seconds)
    held: Limit = "device" if slowest.host_seconds <= slowest.compute_seconds else "host"
    if rate * slowest.held_seconds > 0.9:
        return held
    full = [link.uplink] * len(stages)
    quick = Link(float("inf"), link.round_trip)
    gains: dict[Limit, float] = {
        "uplink": _rate(stages, [float("inf")] * len(stages), quick, in_flight),
        "latency": _rate(stages, uplinks, Link(link.uplink, 0.0), in_flight),
        "outer step": _rate(stages, full, link, in_flight),
    }
    best = max(gains, key=lambda name: gains[name])
    if best == "uplink" and gains["outer step"] - rate > OUTER_BLAME * (gains[best] - rate):
        best = "outer step"
    return best if gains[best] > rate * 1.02 else held
