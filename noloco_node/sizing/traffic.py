"""Bytes that a replica sends: for a microbatch, and for an outer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from noloco_node.config.run_spec import RunSpec, token_bytes
from noloco_node.outer.codec import CODECS
from noloco_node.outer.replica import fragments_of
from noloco_node.sizing.footprint import Footprint

LABEL_BYTES = 4


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a replica of one stage sends, in bytes. It receives as much in an outer step, and of microbatches what its
    neighbours send."""

    forward: float
    """The bytes of a microbatch to the next stage: activations and labels; 0 at the last one."""
    backward: float
    """The bytes of a microbatch to the stage before: the gradient; 0 at the first one."""
    fragments: tuple[int, ...]
    """The bytes of an outer step, for each fragment of the weights."""

    @property
    def microbatch(self) -> float:
        """Both ways."""
        return self.forward + self.backward

    @property
    def outer_step(self) -> int:
        """The bytes of an outer step of all the weights."""
        return sum(self.fragments)


def traffic_of(run: RunSpec, footprint: Footprint) -> tuple[Traffic, ...]:
    """The traffic of each stage, by the narrowest codec that the run allows, which slow links take. Pure arithmetic."""
    activations = float(run.microbatch_tokens * token_bytes(footprint.cut_width, run.pipeline.activations[-1]))
    labels = run.microbatch_tokens * LABEL_BYTES
    return tuple(
        Traffic(
            forward=activations + labels if stage < run.stages - 1 else 0.0,
            backward=activations if stage > 0 else 0.0,
            fragments=exchange_bytes(run, count),
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


def exchange_bytes(run: RunSpec, parameters: int) -> tuple[int, ...]:
    """On the wire for each fragment of a stage of so many weights."""
    codec = CODECS[run.outer.codec]
    return tuple(codec.wire_bytes(part.size) for part in fragments_of(parameters, run.outer.fragments))
