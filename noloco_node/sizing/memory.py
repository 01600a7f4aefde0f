"""What one replica of each stage takes of memory, part by part; what of it fits a machine, and what is free there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from noloco_node.config.load import Config
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.outer.codec import CODECS
from noloco_node.outer.learnt import learnt_bytes
from noloco_node.outer.replica import device_bytes
from noloco_node.process_memory import address_space_left
from noloco_node.sizing.footprint import FP32, Footprint
from noloco_node.storage.run_folder import SMALLEST_DISK
from noloco_node.telemetry.memory_limit import memory_uses
from noloco_node.training.compute_device import memory_of_device, resolve_device
from noloco_node.training.compute_thread import MOST_AHEAD
from noloco_node.training.frozen_state import SPARE_BYTES
from noloco_node.training.trainer import PRECISIONS, carried_dtype

GIB = 1 << 30
OUTER_VECTORS = 2
"""The outer step's vectors: slow weights and snapshot. Where α is not 0 the outer momentum is a third, and where the
codec trails the trail is one more."""
HALF_BYTES = torch.bfloat16.itemsize
ID_BYTES = torch.int32.itemsize
"""The bytes of a token's number, or of a label."""
BESIDE_A_LAYER = 4
"""The number of tensors of the size of a microbatch's activations that lie beside a layer's backward: inputs, outputs,
the gradient that was given, and that of the residual stream."""
PROGRAM_BYTES = 480 << 20
"""The bytes of the program before any weight. Python, torch, transformers and hivemind take 466 MiB, as
`benchmarks.memory` measured it on the processor. CUDA's own memory is not in it."""

COMPILED_BYTES = 100 << 20
"""`node.compile` adds so many bytes: what torch.compile loads and keeps, 83 to 114 MiB whatever the stage."""
COMPILER_BYTES = 512 << 20
"""The bytes of the largest process beside the node's while the stage is compiled: 518 MiB."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device and in the host's memory. A device that is the processor has none of its own."""

    device: int
    host: int

    def __str__(self) -> str:
        host = f"{self.host / GIB:.1f} GiB of the machine's memory"
        return f"{self.device / GIB:.1f} GiB on the device and {host}" if self.device else host


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What a replica of one stage takes at the highest, in bytes, the program itself aside."""

    weights: int
    """fp32 masters, or what takes their place."""
    gradient: int
    """Gathered until the inner step."""
    moments: int
    """The optimizer's: two for each weight that AdamW changes, one for each that Muon does, and Muon's rooms."""
    versions: int
    """Published copies: the current one and those that microbatches under way still need; and what is fixed beside
    them."""
    held: int
    """What microbatches under way leave between forward and backward, but for the one that is worked on."""
    at_work: int
    """The graph of the one that is worked on with its logits; or, at the end of its backward, the gradient of all
    parameters beside one layer's graph."""
    ahead: int
    """The bytes of inputs of calls that were sent to the device before their turn, and of an answer on its way. The
    host needs as much again, which is never paged out. This is only for a device with memory of its own."""
    correction: int
    """What an outer step changes, brought to the device before it is added. Only where the device has memory of its
    own."""
    coding: int
    """What the arithmetic of an outer step takes of the device for one chunk. Only where the device has memory of its
    own. It is over before the correction is brought."""
    wider: int
    """The bytes by which Muon's rooms are larger on a processor, where they are fp32."""
    rounding: int
    """The bytes by which the host's memory for the snapshot is larger than the snapshot. torch takes what is never
    paged out in powers of two. This is only for a device with memory of its own."""
    outer: int
    """Slow weights and what else an outer step needs, on the host."""
    exchange: int
    """The bytes on the host of both sides' codes of the weights in an exchange."""
    checkpoint: int
    """The bytes on the host of pieces of the state that were changed before the disk had them."""
    saved: int
    """The bytes on the disk of a checkpoint with its gathered gradient."""
    left: int
    """The bytes on the disk of the weights that are left at the end."""
    spooled: int
    """The bytes on the disk of a state that a joiner reads and of standby copies: of other stages for them, and of this
    stage for others."""
    copies: int
    """The bytes on the host of pieces of slow weights that were changed before a copy for others had them."""
    given: int
    """The bytes on the host of pieces of the state that were changed before the copy for a joiner had them."""

    @property
    def on_device(self) -> int:
        """Bytes where the model is computed."""
        return self._computing + self.arriving

    @property
    def arriving(self) -> int:
        """Bytes of what is brought to a device before it is its turn."""
        return self.ahead + max(self.correction, self.coding)

    @property
    def on_host(self) -> int:
        """Bytes in the machine's memory, whatever the device."""
        return self.outer + self.exchange + self.checkpoint + self.copies + self.given

    def total(self, *, own_memory: bool) -> Memory:
        """`own_memory`: the device has some of its own."""
        return self._divided(self.on_host, own_memory=own_memory)

    def always(self, *, own_memory: bool) -> Memory:
        """Without what comes and goes, and is done without where there is no memory for it."""
        return self._divided(self.outer, own_memory=own_memory)

    def _divided(self, host: int, *, own_memory: bool) -> Memory:
        if own_memory:
            return Memory(self.on_device, host + self.ahead + self.rounding)
        return Memory(0, self._computing + self.wider + host)

    @property
    def _computing(self) -> int:
        return self.weights + self.gradient + self.moments + self.versions + self.held + self.at_work


def program_bytes(node: NodeSettings) -> int:
    """What a daemon takes before any weight, on the host."""
    return PROGRAM_BYTES + COMPILED_BYTES * node.compile


def memory_of(run: RunSpec, node: NodeSettings, footprint: Footprint, replicas: int) -> tuple[StageMemory, ...]:
    """The memory that a node of each stage must have, whichever peers come and leave. Pure arithmetic. At most
    `replicas` share the batch, and as few as may be: the fewer, the more `node.in_flight: auto` keeps under way."""
    most = node.most_in_flight(run.microbatches_a_step(1))
    return tuple(_stage_memory(run, node, footprint, replicas, stage, most) for stage in range(run.stages))


def planned_memory(config: Config, footprint: Footprint) -> tuple[StageMemory, ...]:
    """The memory of each stage if as many replicas share the batch as the file says. Pure arithmetic."""
    run, node, replicas = config.run, config.node, config.local_swarm.replicas
    most = planned_in_flight(config)
    return tuple(_stage_memory(run, node, footprint, replicas, stage, most) for stage in range(run.stages))


def planned_in_flight(config: Config) -> int:
    """Microbatches that a first-stage replica may have under way, where as many share the batch as the file says."""
    return config.node.most_in_flight(config.run.microbatches_a_step(config.local_swarm.replicas))


def disk_wanted(needs: Sequence[StageMemory], node: NodeSettings, stage: int) -> int:
    """The most bytes that a run folder takes at a stage, with the checkpoint that is being written. If the node moves a
    checkpoint of each other stage stays."""
    need = needs[stage]
    elsewhere = sum(other.saved for other in needs) - need.saved if node.moves else 0
    return SMALLEST_DISK + (node.checkpoints_kept + 1) * need.saved + need.spooled + need.left + elsewhere


def fitting_stages(needs: Sequence[StageMemory], free: Memory) -> list[int]:
    """The stages whose state fits into `free` memory."""
    totals = [need.total(own_memory=free.device > 0) for need in needs]
    return [stage for stage, need in enumerate(totals) if need.device <= free.device and need.host <= free.host]


def held_microbatches(node: NodeSettings, most: int, stage: int, stages: int) -> int:
    """That lie between their forward and their backward at `stage`, with `most` under way of each origin. Routes are
    drawn, so later stages have up to twice the mean; the last stage goes forward and backward in one."""
    if stage == stages - 1:
        return 0
    return most if stage == 0 else min(node.max_pending, 2 * most)


def _stage_memory(
    run: RunSpec, node: NodeSettings, footprint: Footprint, replicas: int, stage: int, most: int
) -> StageMemory:
    count, precision, codec = footprint.parameters[stage], PRECISIONS[run.inner.precision], CODECS[run.outer.codec]
    held = held_microbatches(node, most, stage, run.stages)
    versions = 1 + math.ceil(held / run.microbatches_a_step(replicas))
    left, worked_on, at_the_end = _microbatch(run, footprint, stage)
    if precision.autocast:  # the graph holds the weights that it has cast
        cast = HALF_BYTES * count
        left += cast if run.inner.backward == "keep" else 0
        of_a_layer = cast // footprint.layers[stage]
        worked_on += of_a_layer if run.inner.backward == "checkpoint" else cast
        at_the_end += of_a_layer
    beside = (1 if run.outer.alpha else 0) + (1 if codec.trails else 0)
    moments = footprint.moments[stage]
    given = footprint.state_bytes[stage] + FP32 * beside * count
    others = [size for index, size in enumerate(footprint.parameters) if index != stage]
    keeping = bool(run.standby_copies and others)
    # The keeper of a standby copy has the old one while the new one comes, and gives one of its own stage.
    kept = HALF_BYTES * (2 * max(others) + count) if keeping else 0
    return StageMemory(
        weights=precision.masters.itemsize * count,
        gradient=precision.masters.itemsize * count,
        moments=precision.masters.itemsize * moments + HALF_BYTES * footprint.workspace[stage],
        versions=precision.published.itemsize * (versions * count + footprint.fixed)
        + HALF_BYTES * footprint.fixed * precision.autocast
        + footprint.fixed_bytes,
        held=max(0, held - 1) * left,
        at_work=max(worked_on, at_the_end + precision.published.itemsize * count),
        ahead=(MOST_AHEAD + 1) * _inputs(run, footprint, stage),
        correction=FP32 * count,
        coding=device_bytes(codec.values_within(run.limits.chunk_bytes), count) if codec.on_a_device else 0,
        wider=(FP32 - HALF_BYTES) * footprint.workspace[stage],
        rounding=(1 << (FP32 * count - 1).bit_length()) - FP32 * count,
        outer=FP32 * (OUTER_VECTORS + beside) * count + learnt_bytes(count),
        exchange=(2 if codec.modulo else 1) * codec.wire_bytes(count),
        checkpoint=min(SPARE_BYTES, given + FP32 * count),
        saved=given + FP32 * count,
        left=FP32 * count,
        spooled=given + kept,
        copies=min(SPARE_BYTES, FP32 * count) if keeping else 0,
        given=min(SPARE_BYTES, given),
    )


def _inputs(run: RunSpec, footprint: Footprint, stage: int) -> int:
    """The most bytes that one call on the device is given, or gives. They are activations or the gradient of those that
    went on, or a window's tokens; and labels at the last stage."""
    activations = footprint.cut_width * carried_dtype(run.pipeline.activations).itemsize if run.stages > 1 else ID_BYTES
    return run.microbatch_tokens * (activations + (ID_BYTES if stage == run.stages - 1 else 0))


def _microbatch(run: RunSpec, footprint: Footprint, stage: int) -> tuple[int, int, int]:
    """Bytes that one leaves between forward and backward, that it takes while it is worked on, and that it takes beside
    the gradients at the end of its backward."""
    tokens, graph = run.microbatch_tokens, footprint.graph
    first = sum(footprint.layers[:stage])
    layers = graph.layers[first : first + footprint.layers[stage]]
    last = stage == run.stages - 1
    in_a_layer = BESIDE_A_LAYER * graph.entry + graph.peak
    rest = graph.entry + max(in_a_layer, graph.head + graph.logits if last else 0.0)
    inputs = len(layers) * graph.entry
    match run.inner.backward:
        case "keep":
            left, whole = sum(layers) + 2 * graph.entry, sum(layers) + rest
        case "recompute":
            left, whole = graph.entry, sum(layers) + rest
        case "checkpoint":
            left, whole = inputs + graph.entry, inputs + max(max(layers) + graph.entry + in_a_layer, rest)
    at_the_end = max(layers) + graph.entry + in_a_layer
    return math.ceil(tokens * left), math.ceil(tokens * whole), math.ceil(tokens * at_the_end)


def free_memory(device: str) -> Memory:
    """Free bytes of `node.device` and of this machine, within what its container may take."""
    own = memory_of_device(torch.device(resolve_device(device)))
    return Memory(own.get("free", 0), _free_on_host())


def _free_on_host() -> int:
    """What can be had without swapping, and without exceeding what a container or this process is allowed."""
    free, left = min(use.left for use in memory_uses()), address_space_left()
    return free if left is None else min(free, left)
