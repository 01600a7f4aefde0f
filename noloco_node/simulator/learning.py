"""What the nodes of a simulation learn: real stages on numbered windows of made-up text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.data.samples import Samples
from noloco_node.model.cut import build_config
from noloco_node.model.stage import build_stage
from noloco_node.sizing.footprint import Footprint
from noloco_node.training.compute_thread import Compute
from noloco_node.training.placing import PlacedStage, on_its_device

HELD_OUT = 1 << 40
"""The number of the first held-out window: beyond all that is trained on."""
NODE_WINDOWS = 1 << 20
"""The windows of one node and of the next are so many numbers apart."""


class Learning(Protocol):
    """A model of learning: what stands on a node's device, and what stage 0 reads."""

    async def place(self, spec: RunSpec, settings: NodeSettings, stage: int, thread: Compute) -> PlacedStage:
        """A stage with its first weights."""
        ...

    def weights(self, footprint: Footprint) -> tuple[int, ...]:
        """How many stand on the device at each stage, where the run's own model has that `footprint`."""
        ...

    def samples(self, spec: RunSpec, number: int, drawn: int) -> Samples:
        """The text of the node with this number, of which it drew so many microbatches before."""
        ...


class RealTensors:
    """Implements `Learning`: the run's own model, trained."""

    async def place(self, spec: RunSpec, settings: NodeSettings, stage: int, thread: Compute) -> PlacedStage:
        """See `Learning.place`. UserError as `build_stage`."""
        return await on_its_device(spec, settings, build_stage(spec.model, stage), thread)

    def weights(self, footprint: Footprint) -> tuple[int, ...]:
        """See `Learning.weights`."""
        return footprint.parameters

    def samples(self, spec: RunSpec, number: int, drawn: int) -> Samples:
        """See `Learning.samples`."""
        vocabulary: int = build_config(spec.model).vocab_size
        return numbered_samples(spec, number, drawn, vocabulary)


def numbered_samples(spec: RunSpec, number: int, drawn: int, vocabulary: int) -> Samples:
    """Windows that count up from where a node's own begin, made up from their numbers."""
    size, length = spec.inner.microbatch_windows, spec.data.sequence_length
    begin, count = number * NODE_WINDOWS, drawn

    async def draw() -> Tensor:
        nonlocal count
        first = begin + count * size
        count += 1
        return made_up(range(first, first + size), vocabulary, length)

    held_out = made_up(range(HELD_OUT, HELD_OUT + spec.evaluation.windows), vocabulary, length)
    return Samples(draw=draw, held_out=held_out)


def made_up(numbers: Sequence[int], vocabulary: int, length: int) -> Tensor:
    """Rows of token ids, int32 [b, length + 1], each a function of its number: ids that count up by a stride."""
    rows: list[Tensor] = []
    for number in numbers:
        mixed = (number * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % (1 << 64)
        start, stride = mixed % vocabulary, 1 + (mixed >> 32) % 5
        rows.append((start + stride * torch.arange(length + 1)) % vocabulary)
    return torch.stack(rows).to(torch.int32)
