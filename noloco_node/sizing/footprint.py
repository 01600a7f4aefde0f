"""What a stage asks of a machine: memory for its state, and work for each token. Known before a weight is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from noloco_node.address_space import address_space_left
from noloco_node.collector import loading
from noloco_node.compute_device import resolve_device
from noloco_node.config.run_spec import RunSpec
from noloco_node.model.cut import build_config, cut_model
from noloco_node.model.stage import build_on_meta
from noloco_node.outer.codec import CODECS, CodecName

DEVICE_BYTES = 24
"""Bytes a parameter on the device: fp32 masters, AdamW's two moments, gradient, and two published versions."""
HOST_BYTES = 20
"""Bytes a parameter in the host's memory: slow weights, outer momentum, snapshot, the difference to a partner, and the
way that the replica has been learning."""
TRAIL_BYTES = 4
"""As many more where the codec trails: `OuterReplica.trail`."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device and in the host's memory. A device that is the processor has none of its own."""

    device: int
    host: int

    def __str__(self) -> str:
        host = f"{self.host / GIB:.1f} GiB of the machine's memory"
        return f"{self.device / GIB:.1f} GiB on the device and {host}" if self.device else host


@dataclass(frozen=True, slots=True)
class Footprint:
    """The stages of a run in numbers."""

    parameters: tuple[int, ...]
    """Parameters of each stage."""
    work: tuple[float, ...]
    """Relative work for a token at each stage, 1 on average: parameters that are multiplied with, so without the table
    of token embeddings, which is only looked up."""
    flop_per_token: tuple[float, ...]
    """Forward and backward at each stage: 6 for each such parameter, and 12 x layers x hidden size x sequence length
    for attention, as utilization is usually counted (PaLM, appendix B)."""


def footprint_of(run: RunSpec) -> Footprint:
    """Count the run's stages. Loads transformers, allocates no weights. UserError (CONFIG) as `cut_model` raises it."""
    with loading():
        cuts, config = cut_model(run.model), build_config(run.model)
        ends = [cut.end_layer for cut in cuts]
        whole = build_on_meta(config)
    parameters, looked_up = [0] * len(ends), [0] * len(ends)
    for name, parameter in torch.nn.Module.named_parameters(whole):
        stage = _stage_of(name, ends)
        parameters[stage] += parameter.numel()
        if name.startswith("model.embed_tokens."):
            looked_up[stage] += parameter.numel()
    multiplied = [all_of - table for all_of, table in zip(parameters, looked_up, strict=True)]
    mean = sum(multiplied) / len(multiplied)
    attention = 12.0 * int(config.hidden_size) * run.data.sequence_length
    flop = [
        6.0 * count + attention * (cut.end_layer - cut.first_layer) for count, cut in zip(multiplied, cuts, strict=True)
    ]
    return Footprint(tuple(parameters), tuple(max(count, 1) / mean for count in multiplied), tuple(flop))


def memory_needed(parameters: int, codec: CodecName, *, own_memory: bool) -> Memory:
    """What a stage of that many parameters takes, activations aside; `own_memory`: the device has some of its own."""
    on_host = HOST_BYTES + (TRAIL_BYTES if CODECS[codec].trails else 0)
    if own_memory:
        return Memory(DEVICE_BYTES * parameters, on_host * parameters)
    return Memory(0, (DEVICE_BYTES + on_host) * parameters)


def fitting_stages(parameters: Sequence[int], codec: CodecName, free: Memory) -> list[int]:
    """The stages whose state fits into `free` memory."""
    needs = [memory_needed(count, codec, own_memory=free.device > 0) for count in parameters]
    return [stage for stage, need in enumerate(needs) if need.device <= free.device and need.host <= free.host]


def free_memory(device: str) -> Memory:
    """Free bytes of `node.device` and of this machine, within what its container may take."""
    own = torch.device(resolve_device(device))
    on_device = torch.cuda.mem_get_info(own)[0] if own.type == "cuda" else 0
    return Memory(on_device, _free_on_host())


def _free_on_host() -> int:
    """What can be had without swapping, and without exceeding what a container or this process is allowed."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, max(0, int(limit[0]) - int(used[0]) + _reclaimable(group)))
    left = address_space_left()
    return free if left is None else min(free, left)


def _reclaimable(group: Path) -> int:
    """File cache that a container gives back when it needs memory."""
    rows = (line.split() for line in _lines(group / "memory.stat"))
    return sum(int(row[1]) for row in rows if row[0] == "inactive_file")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def _stage_of(name: str, ends: Sequence[int]) -> int:
    layer = name.removeprefix("model.layers.")
    if layer != name:
        return next(stage for stage, end in enumerate(ends) if int(layer.partition(".")[0]) < end)
    return 0 if name.startswith("model.embed_tokens.") else len(ends) - 1
