"""Bytes that a replica sends: for a microbatch, and for an outer step."""

from __future__ import annotations

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
    """Of a microbatch to the next stage: activations and labels; 0 at the last one."""
    backward: float
    """Of a microbatch to the stage before: the gradient; 0 at the first one."""
    fragments: tuple[int, ...]
    """Of an outer step, for each fragment of the weights."""

    @property
    def microbatch(self) -> float:
        """Both ways."""
        return self.forward + self.backward

    @property
    def outer_step(self) -> int:
        """Of all the weights once."""
        return sum(self.fragments)


def traffic_of(run: RunSpec, footprint: Footprint) -> tuple[Traffic, ...]:
    """Of each stage, by the narrowest codec that the run allows, which slow links take. Pure arithmetic."""
    activations = float(run.microbatch_tokens * token_bytes(footprint.hidden, run.pipeline.activations[-1]))
    labels = run.microbatch_tokens * LABEL_BYTES
    return tuple(
        Traffic(
            forward=activations + labels if stage < run.stages - 1 else 0.0,
            backward=activations if stage > 0 else 0.0,
            fragments=exchange_bytes(run, count),
        )
        for stage, count in enumerate(footprint.parameters)
    )


def exchange_bytes(run: RunSpec, parameters: int) -> tuple[int, ...]:
    """On the wire for each fragment of a stage of so many weights."""
    codec = CODECS[run.outer.codec]
    return tuple(codec.wire_bytes(part.size) for part in fragments_of(parameters, run.outer.fragments))
