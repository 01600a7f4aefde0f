"""What daemons take of memory against what `config validate` says, for models of several sizes.

    python -m benchmarks.memory --out memory.json

For each size a local swarm of two stages × two replicas trains a few outer steps on the processor, taking a checkpoint
after each; the highest resident memory of every daemon, as the kernel counted it (VmHWM), is set against the plan's sum
and the memory of a daemon with a model of no size.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from benchmarks.command import command, parser_of, save
from noloco_node.config.load import Config, load_config
from noloco_node.launch.local_swarm import LocalSwarm, Observer, SwarmNode
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.memory import planned_memory, program_bytes
from noloco_node.telemetry.events import AnyEvent

MIB = 1 << 20
SIZES = {"2M": (256, 688, 4), "12M": (512, 1376, 8), "40M": (768, 2048, 12), "90M": (1024, 2736, 14)}
"""Hidden size, width of the feed-forward part, layers; parameters are of both stages together."""
PROGRAM_SIZE = (32, 64, 2)
STEPS = 10
"""Inner steps of each run: three outer steps."""
BATCH, WINDOWS, H = 1024, 4, 3


class Peaks(Observer):
    """The highest resident memory of each daemon so far, in bytes."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._nodes: dict[str, SwarmNode] = {}

    def on_event(self, node: SwarmNode, event: AnyEvent) -> None:
        """Learn of the daemon."""
        del event
        self._nodes[node.name] = node

    def on_poll(self) -> None:
        """Ask the kernel."""
        for name, node in self._nodes.items():
            if node.running and (peak := _peak(node.pid)):
                self.bytes[name] = peak


def _peak(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), None)


def config_of(base: Path, size: tuple[int, int, int], overrides: list[str]) -> Config:
    """The base file with a model of that size, with a checkpoint after every outer step."""
    hidden, inner, layers = size
    tokens = STEPS * BATCH
    changes = [
        f"run.model.config.hidden_size={hidden}",
        f"run.model.config.intermediate_size={inner}",
        f"run.model.config.num_hidden_layers={layers}",
        f"run.model.config.num_attention_heads={max(2, hidden // 64)}",
        f"run.model.config.num_key_value_heads={max(2, hidden // 64)}",
        f"run.inner.target_tokens={tokens}",
        f"run.inner.global_batch_tokens={BATCH}",
        f"run.inner.microbatch_windows={WINDOWS}",
        f"run.outer.inner_steps={H}",
        "run.evaluation.windows=8",
        "run.inner.warmup_tokens=0",
        f"run.evaluation.every_tokens={10 * tokens}",
        "node.checkpoint_outer_steps=1",
        "node.checkpoint_seconds=0",
        "local_swarm.replicas=2",
    ]
    return load_config(base, [*changes, *overrides])


async def peaks_of(config: Config) -> dict[str, int]:
    """The highest resident memory of each daemon of one whole run."""
    peaks = Peaks()
    with tempfile.TemporaryDirectory() as folder:
        swarm = LocalSwarm(config, Path(folder) / "run", observer=peaks)
        try:
            await swarm.start()
            await swarm.wait()
        finally:
            await swarm.stop()
    return peaks.bytes


def main() -> None:
    """Measure, print and write the table."""
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/tiny.yaml"))
    parser.add_argument("--sizes", nargs="+", default=["2M", "12M", "40M"], choices=list(SIZES))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    program = asyncio.run(peaks_of(config_of(options.config, PROGRAM_SIZE, options.set)))
    rows: list[dict[str, object]] = []
    print(f"the program itself: {max(program.values()) / MIB:,.0f} MiB")
    for size in options.sizes:
        config = config_of(options.config, SIZES[size], options.set)
        footprint = footprint_of(config.run)
        needs = planned_memory(config, footprint)
        for name, peak in sorted(asyncio.run(peaks_of(config)).items()):
            stage = int(name[1])
            planned = needs[stage].total(own_memory=False).host - needs[stage].given
            measured = peak - program[name]
            rows.append(
                {
                    "size": size,
                    "node": name,
                    "parameters": footprint.parameters[stage],
                    "planned_mib": planned / MIB,
                    "measured_mib": measured / MIB,
                    "planned_over_measured": (planned + program_bytes(config.node)) / peak,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    result = {"program_mib": {name: peak / MIB for name, peak in program.items()}, "rows": rows}
    save(options.out, result)


if __name__ == "__main__":
    command(main)
