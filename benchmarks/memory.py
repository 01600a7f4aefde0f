"""What daemons take of memory against what `config validate` says, for models of several sizes.

    python -m benchmarks.memory --out memory.json

For each size a local swarm of two stages × two replicas trains a few outer steps on the processor, taking a checkpoint
after each; the highest resident memory of every daemon, as the kernel counted it (VmHWM), is set against the plan's sum
and the memory of a daemon with a model of no size. With --joiners one more node of each stage comes when the others
have trained, and copies the state of one of them, whose own copy for that counts: of each stage the highest is shown.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.command import command, parser_of, save
from noloco_node.config.load import Config, load_config
from noloco_node.diagnostics.status import Events
from noloco_node.launch.local_swarm import DAEMON, LocalSwarm, Observer, SwarmNode
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.memory import planned_memory, program_bytes
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import AnyEvent, CheckpointTaken, StateDownload

MIB = 1 << 20
SIZES = {"2M": (256, 688, 4), "12M": (512, 1376, 8), "40M": (768, 2048, 12), "90M": (1024, 2736, 14)}
"""Hidden size, width of the feed-forward part, layers; parameters are of both stages together."""
PROGRAM_SIZE = (32, 64, 2)
STEPS, LONG = 10, 100_000
"""Inner steps of each run: three outer steps; of one that is ended when it has shown what it should."""
BATCH, WINDOWS, H = 1024, 4, 3


PATIENCE_SECONDS = 600.0
GIVEN_SECONDS = 5.0
"""For which a run goes on while the joiners read: longer than a checkpoint takes."""


class Peaks(Observer):
    """The highest resident memory of each daemon so far, in bytes."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self.trained: set[str] = set()
        """Daemons that have taken a checkpoint."""
        self._nodes: dict[str, SwarmNode] = {}

    def on_event(self, node: SwarmNode, event: AnyEvent) -> None:
        """Learn of the daemon."""
        self._nodes[node.name] = node
        if isinstance(event, CheckpointTaken):
            self.trained.add(node.name)

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


def config_of(base: Path, size: tuple[int, int, int], overrides: list[str], steps: int = STEPS) -> Config:
    """The base file with a model of that size, so many inner steps long, with a checkpoint after every outer step."""
    hidden, inner, layers = size
    tokens = steps * BATCH
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


async def _joined(swarm: LocalSwarm, peaks: Peaks, folder: Path) -> None:
    """One more node of each stage comes, and reads a state."""
    await _until(swarm, lambda: peaks.trained >= {node.name for node in swarm.nodes})
    addresses = [address for node in swarm.nodes[:2] if node.started for address in node.started.addresses]
    joiners: list[asyncio.subprocess.Process] = []
    diaries = [RunFolder(folder / f"joiner-{stage}") for stage in range(swarm.config.run.stages)]
    try:
        for stage, diary in enumerate(diaries):
            options = ["--stage", str(stage), "--run-folder", str(diary.path), "--initial-peers", *addresses]
            joiners.append(
                await asyncio.create_subprocess_exec(
                    *DAEMON, str(swarm.run_folder / "config.yaml"), *options, stdout=asyncio.subprocess.DEVNULL
                )
            )
        await _until(swarm, lambda: all(_reads(diary) for diary in diaries))
        await asyncio.sleep(GIVEN_SECONDS)
        swarm.read_events()
    finally:
        for joiner in joiners:
            if joiner.returncode is None:
                joiner.terminate()
            await joiner.wait()


def _reads(diary: RunFolder) -> bool:
    """Whether a part of the state is here: the donor's copy is whole then."""
    download = Events(diary.events).last(StateDownload) if diary.events.is_file() else None
    return download is not None and download.received > 0


async def _until(swarm: LocalSwarm, there: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not there():
            swarm.read_events()
            await asyncio.sleep(0.2)


async def peaks_of(config: Config, *, joiners: bool = False) -> dict[str, int]:
    """One whole run; with joiners one until these read."""
    peaks = Peaks()
    with tempfile.TemporaryDirectory() as folder:
        swarm = LocalSwarm(config, Path(folder) / "run", observer=peaks)
        try:
            await swarm.start()
            await (_joined(swarm, peaks, Path(folder)) if joiners else swarm.wait())
        finally:
            await swarm.stop()
    return peaks.bytes


def _highest(peaks: dict[str, int]) -> dict[str, int]:
    """One daemon of each stage: nobody chooses which gives its state."""
    best: dict[str, str] = {}
    for name in sorted(peaks, key=lambda name: peaks[name]):
        best[name[1]] = name
    return {name: peaks[name] for name in best.values()}


def main() -> None:
    """Measure, print and write the table."""
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/tiny.yaml"))
    parser.add_argument("--sizes", nargs="+", default=["2M", "12M", "40M"], choices=list(SIZES))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--joiners", action="store_true", help="one more node of each stage copies a state")
    options = parser.parse_args()
    steps = LONG if options.joiners else STEPS
    program = asyncio.run(peaks_of(config_of(options.config, PROGRAM_SIZE, options.set)))
    rows: list[dict[str, object]] = []
    print(f"the program itself: {max(program.values()) / MIB:,.0f} MiB")
    for size in options.sizes:
        config = config_of(options.config, SIZES[size], options.set, steps)
        footprint = footprint_of(config.run)
        needs = planned_memory(config, footprint)
        peaks = asyncio.run(peaks_of(config, joiners=options.joiners))
        for name, peak in sorted((_highest(peaks) if options.joiners else peaks).items()):
            stage = int(name[1])
            planned = needs[stage].total(own_memory=False).host - (0 if options.joiners else needs[stage].given)
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
