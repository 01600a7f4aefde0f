"""Bytes that a replica sends for a microbatch and for an outer step, and what a run needs of one node's line, stage by
stage. On a line with less a microbatch would never come in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import CHUNKS_A_DEADLINE, MOST_SECONDS, LimitsSpec, RunSpec, token_bytes
from noloco_node.errors import ExitCode, UserError
from noloco_node.outer.codec import CODECS
from noloco_node.sizing.footprint import Footprint
from noloco_node.sizing.memory import ID_BYTES


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a replica of one stage sends, in bytes. It receives as much in an outer step, and of microbatches what its
    neighbours send."""

    forward: float
    """The bytes of a microbatch to the next stage: activations and labels; 0 at the last one."""
    backward: float
    """The bytes of a microbatch to the stage before: the gradient; 0 at the first one."""
    outer_step: int
    """The bytes of an outer step."""

    @property
    def microbatch(self) -> float:
        """Both ways."""
        return self.forward + self.backward


def traffic_of(run: RunSpec, footprint: Footprint) -> tuple[Traffic, ...]:
    """The traffic of each stage, by the narrowest codec that the run allows, which slow links take. Pure arithmetic."""
    activations = float(run.microbatch_tokens * token_bytes(footprint.cut_width, run.pipeline.activations[-1]))
    labels = run.microbatch_tokens * ID_BYTES
    return tuple(
        Traffic(
            forward=activations + labels if stage < run.stages - 1 else 0.0,
            backward=activations if stage > 0 else 0.0,
            outer_step=CODECS[run.outer.codec].wire_bytes(count),
        )
        for stage, count in enumerate(footprint.parameters)
    )


@dataclass(frozen=True, slots=True)
class LineUse:
    """The traffic of a run at one replica, in bytes.

    It is without what the network adds to them, and without weights that are copied by or for newcomers.
    """

    sent: float
    received: float


def rest_of_run(run: RunSpec, footprint: Footprint, tokens_left: float, replicas: Sequence[int]) -> tuple[LineUse, ...]:
    """The traffic of one replica of each stage until the run's end, with `replicas` serving them. Each first-stage
    replica sends the held-out windows through all stages. It does so when it begins, each time that the clock has gone
    far enough, and at the end."""
    traffic = traffic_of(run, footprint)
    rounds = tokens_left / run.inner.global_batch_tokens / run.outer.inner_steps + 1.0
    times = tokens_left / run.evaluation.every_tokens + 2.0
    evaluated = times * max(1, replicas[0]) * run.evaluation.windows / run.inner.microbatch_windows
    found: list[LineUse] = []
    for stage, own in enumerate(traffic):
        count = max(1, replicas[stage])
        trained, forwards = tokens_left / run.microbatch_tokens / count, evaluated / count
        come = traffic[stage - 1].forward if stage > 0 else 0.0
        back = traffic[stage + 1].backward if stage < run.stages - 1 else 0.0
        exchanged = rounds * own.outer_step
        found.append(
            LineUse(
                sent=trained * own.microbatch + forwards * own.forward + exchanged,
                received=trained * (come + back) + forwards * come + exchanged,
            )
        )
    return tuple(found)


BITS = 8e-6
"""Mbit of a byte."""


@dataclass(frozen=True, slots=True)
class LineNeed:
    """What a replica of one stage must be able to send and receive."""

    sent: float
    """Bytes that it sends for a microbatch, forward and backward; by the run's narrowest codec."""
    received: float
    seconds: float
    """The microbatch's time for one hop: its whole budget, shared by the hops."""
    chunk: int
    """Bytes of a chunk of weights, which goes both ways in an outer step; or of all of them, if these ask for more."""
    chunk_seconds: float

    @property
    def least_up(self) -> float:
        """Mbit/s."""
        return BITS * max(self.sent / self.seconds, self.chunk / self.chunk_seconds)

    @property
    def least_down(self) -> float:
        """Mbit/s."""
        return BITS * max(self.received / self.seconds, self.chunk / self.chunk_seconds)

    def borne_by(self, up: float | None, down: float | None) -> bool:
        """Whether a line with these bounds in Mbit/s is enough; None is no bound."""
        return (up is None or up >= self.least_up) and (down is None or down >= self.least_down)

    def line_seconds(self, up: float | None, down: float | None) -> float:
        """What a microbatch takes of such a line at this stage: it is the same both ways at a time."""
        one_way = [BITS * count / mbit for count, mbit in ((self.sent, up), (self.received, down)) if mbit is not None]
        return max(one_way, default=0.0)


def line_needs(run: RunSpec, footprint: Footprint) -> tuple[LineNeed, ...]:
    """The needs of each stage. Pure arithmetic."""
    traffic, limits = traffic_of(run, footprint), run.limits
    hops = max(1, run.stages - 1)
    return tuple(
        LineNeed(
            sent=own.microbatch,
            received=(traffic[stage - 1].forward if stage > 0 else 0.0)
            + (traffic[stage + 1].backward if stage < run.stages - 1 else 0.0),
            seconds=run.pipeline.budget_seconds / hops,
            chunk=chunk,
            chunk_seconds=chunk_seconds,
        )
        for stage, own in enumerate(traffic)
        for chunk, chunk_seconds in (_weights_at_once(own.outer_step, limits),)
    )


def _weights_at_once(size: int, limits: LimitsSpec) -> tuple[int, float]:
    """What of an outer step of so many bytes asks most of a line, and in which time (`transport.calls.floor_of`)."""
    chunk = min(limits.chunk_bytes, size), limits.exchange_progress_seconds / CHUNKS_A_DEADLINE
    return max(chunk, (size, MOST_SECONDS), key=lambda each: each[0] / each[1])


def check_uplink(run: RunSpec, settings: NodeSettings) -> None:
    """Raise UserError (CONFIG) where the bound on the uplink is below what the run asks its nodes for."""
    asked, up = run.limits.least_uplink_mbit, settings.uplink_mbit
    if asked is not None and up is not None and up < asked:
        raise UserError(
            ExitCode.CONFIG,
            f"node.uplink_mbit is {up:g}, and run '{run.name}' asks its nodes for {asked:g} "
            "(run.limits.least_uplink_mbit)",
            f"set node.uplink_mbit to {asked:g} or more, or join another run",
        )


def check_lines(run: RunSpec, settings: NodeSettings, needs: Sequence[LineNeed]) -> None:
    """Raise UserError (CONFIG) where a bound of `settings` is below what the run asks for, or what its stage needs.

    A node that names no stage has the one that needs least.
    """
    check_uplink(run, settings)
    stage = settings.stage
    if stage == "auto":
        stage = min(range(len(needs)), key=lambda each: needs[each].least_up)
    if stage < len(needs):
        check_line(run, settings, needs[stage], stage)


def check_line(run: RunSpec, settings: NodeSettings, needs: LineNeed, stage: int) -> None:
    """Raise UserError (CONFIG) where a bound of `settings` is below what the stage needs."""
    ways = (
        ("uplink_mbit", settings.uplink_mbit, needs.least_up, needs.sent, "sends"),
        ("downlink_mbit", settings.downlink_mbit, needs.least_down, needs.received, "receives"),
    )
    for name, mbit, least, count, does in ways:
        if mbit is None or mbit >= least:
            continue
        what, size, seconds = f"for a microbatch it {does}", count, needs.seconds
        if BITS * count / seconds < least:
            what, size, seconds = "a chunk of weights has", float(needs.chunk), needs.chunk_seconds
            what = "an outer step has" if needs.chunk > run.limits.chunk_bytes else what
        raise UserError(
            ExitCode.CONFIG,
            f"node.{name} is {mbit:g}, too little for stage {stage} of run '{run.name}': {what} {size / 1e6:,.3g} MB, "
            f"which take {BITS * size / mbit:,.3g} s of that, and have {seconds:,.3g} s: {least:,.3g} Mbit/s and more",
            f"raise node.{name}, serve another stage (--stage), or pause the node while you need the line",
        )
