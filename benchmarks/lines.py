"""What an inner step takes behind a line, by data parallel and by what nodes exchange in its place.

    python -m benchmarks.lines consumer-24gb --steps 1050

By the arithmetic of `config validate --device`, nothing is run: the file's stages, microbatches and activations, and
each method of docs/method.md with its own bytes and its own H. Data parallel, DiLoCo and the paper's NoLoCo wait for an
exchange. A node of this package trains beside it, and waits here only where it would not keep H otherwise. An entry has
the seconds of an inner step, the hours of a training (`--steps`), and how many times as long data parallel takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.command import command, parser_of, whole
from noloco_node.config.files import find_config
from noloco_node.config.load import Config, load_config
from noloco_node.outer import CodecName
from noloco_node.outer.codec import CODECS
from noloco_node.simulator.report import table_of
from noloco_node.sizing.advice import arithmetic_seconds, does_arithmetic, planned_loads, step_microbatches, under_way
from noloco_node.sizing.devices import Device, bytes_a_second, device_by_name, seconds
from noloco_node.sizing.footprint import Footprint, footprint_of
from noloco_node.sizing.memory import planned_memory
from noloco_node.sizing.utilisation import Link, outlook_of


@dataclass(frozen=True, slots=True)
class Method:
    """What the replicas of a stage exchange, and after how many inner steps."""

    name: str
    h: int
    codec: CodecName
    tensors: int = 1
    """Tensors of the stage's size that an exchange sends."""
    ring: bool = False
    """Among all replicas: 2 (N - 1) / N tensors for each one."""
    waits: bool = False
    """Training stands still meanwhile."""

    def sent(self, parameters: int, replicas: int) -> float:
        """Bytes of an exchange of so many weights."""
        return self.tensors * CODECS[self.codec].wire_bytes(parameters) * (2 - 2 / replicas if self.ring else 1)


METHODS = (
    Method("data parallel, gradients in bf16", 1, "fp16", ring=True, waits=True),
    Method("DiLoCo, H = 50", 50, "fp32", ring=True, waits=True),
    Method("NoLoCo (paper), H = 50", 50, "fp32", tensors=2, waits=True),
    Method("defaults: `int4`, H = 8", 8, "int4"),
    Method("`int4`, H = 4", 4, "int4"),
    Method("signs, H = 2", 2, "sign"),
    Method("signs, H = 1", 1, "sign"),
)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long an inner step takes on a line."""

    seconds: float
    unwaited: float
    """Seconds where training never waits for an exchange."""
    steps: float
    """Inner steps from one exchange to the next then."""


def pace_of(method: Method, config: Config, footprint: Footprint, link: Link, device: Device) -> Pace:
    """Of the replicas of a configuration, at the method's own H. Pure arithmetic."""
    share, replicas = step_microbatches(config), config.local_swarm.replicas
    needs = planned_memory(config, footprint)
    planned = planned_loads(config, footprint, device, needs)
    arithmetic = arithmetic_seconds(method.codec, on_card=does_arithmetic(device, needs))
    loads = [
        replace(load, outer_bytes=method.sent(count, replicas), outer_arithmetic=arithmetic * count)
        for load, count in zip(planned, footprint.parameters, strict=True)
    ]
    trained = [replace(load, outer_bytes=0.0, outer_arithmetic=0.0) for load in loads] if method.waits else loads
    in_flight = under_way(config, planned, link)
    outlook = outlook_of(trained, link, in_flight=in_flight, h=method.h, step_microbatches=share)
    step = share / outlook.microbatches_a_second
    if method.waits:
        waited = max(load.outer_bytes for load in loads) / link.uplink / method.h
        return Pace(step + waited, step + waited, method.h)
    return Pace(max(step, outlook.outer_seconds / method.h), step, outlook.inner_steps)


def cell(pace: Pace, reference: Pace, steps: int) -> str:
    """Seconds of an inner step, hours of all, how many times as long the reference takes, a course without waits."""
    own = f"{pace.seconds:.3g} s, {pace.seconds * steps / 3600.0:.3g} h ({reference.seconds / pace.seconds:.2g})"
    if pace.unwaited < pace.seconds:
        own += f", or {pace.unwaited:.2g} s and an exchange after {pace.steps:.2g} steps"
    return own


def table(config: Config, lines: Sequence[str], round_trip: float, device: Device, steps: int) -> str:
    """A row for each method, a column for each line. The device does the arithmetic of exchanges if it has room."""
    footprint, replicas = footprint_of(config.run), config.local_swarm.replicas
    rows = [["method", "exchanged for an inner step", *(f"{line}/s" for line in lines)]]
    links = [Link(bytes_a_second(line), round_trip) for line in lines]
    paces = [[pace_of(each, config, footprint, link, device) for link in links] for each in METHODS]
    for method, own in zip(METHODS, paces, strict=True):
        sent = method.sent(max(footprint.parameters), replicas) / method.h
        cells = (cell(pace, reference, steps) for pace, reference in zip(own, paces[0], strict=True))
        rows.append([method.name, f"{sent / 1e6:,.0f} MB", *cells])
    return table_of(rows)


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__, out=False)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--device", default="RTX 4090")
    parser.add_argument("--uplink", nargs="+", default=["20Mbit", "100Mbit", "1000Mbit"])
    parser.add_argument("--round-trip", default="50ms")
    parser.add_argument("--steps", type=whole, default=1050)
    options = parser.parse_args()
    config = load_config(find_config(options.config), options.set)
    device = device_by_name(options.device, config.run.inner.precision)
    print(table(config, options.uplink, seconds(options.round_trip), device, options.steps))


if __name__ == "__main__":
    command(main)
