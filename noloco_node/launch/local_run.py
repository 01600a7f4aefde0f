"""A run on a local swarm from its start to an exported model: the screen, Ctrl-C, the merging, the summary."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from noloco_node import ambient
from noloco_node.config.load import Config
from noloco_node.errors import ExitCode, UserError
from noloco_node.launch.local_swarm import LocalSwarm, Observer, SwarmNode, layout
from noloco_node.node.interrupts import heeded_signals
from noloco_node.report.page import make_report
from noloco_node.storage import atomic
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.display import Display, LocalSwarmView
from noloco_node.telemetry.events import AnyEvent, EventReader
from noloco_node.telemetry.history import NodeHistory
from noloco_node.telemetry.summary import Summary, summarize_histories
from noloco_node.telemetry.words import as_stages

MODEL = "model (Hugging Face folder)"
"""What the model is called among the files of a result."""


@dataclass(frozen=True, slots=True)
class SwarmResult:
    """How a local swarm's run ended, and its figures."""

    summary: Summary
    exit_code: ExitCode
    files: Mapping[str, Path]
    """What was left, by what it is."""
    disk: Mapping[str, int]
    """Bytes that it takes, by what they are."""


def run_local_swarm(config: Config, run_folder: Path, console: Console) -> SwarmResult:
    """Train `config.run` on a local swarm to its end, then merge, export, evaluate, summarize and report.

    Ctrl-C or SIGTERM ends all daemons within `STOP_SECONDS` and a little; a second one at once. Raises UserError as
    `LocalSwarm.start` does, and KeyboardInterrupt where it was interrupted after the training.
    """
    view = LocalSwarmView(
        run_name=config.run.name,
        stages=config.run.stages,
        target=config.run.inner.target_tokens,
        nodes=tuple(layout(config)),
    )
    observer = _Follower(view, Display(view, console), run_folder)
    swarm = LocalSwarm(config, run_folder, observer=observer, keeps_events=False)
    swarm.prepare_folder()  # before what another run has written there is shown, or that nothing can be written
    interrupted = asyncio.run(_supervise(swarm, observer))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    files_of = {node.name: EventReader(RunFolder(node.folder).events) for node in swarm.nodes}
    histories = [NodeHistory.of(name, file.new_events()) for name, file in files_of.items()]
    files = {"events and logs of each node": run_folder / "nodes", "summary": run_folder / "summary.json"}
    try:
        _write_summary(summarize_histories(histories), files["summary"])
    except UserError as error:
        if not interrupted:
            raise
        del files["summary"]
        console.print(str(error), highlight=False, markup=False, soft_wrap=True)
    if interrupted:
        return SwarmResult(summarize_histories(histories), ExitCode.INTERRUPTED, files, disk_use(run_folder))
    merged_loss = _merge(swarm, console, files)
    summary = summarize_histories(histories, merged_loss)
    _write_summary(summary, files["summary"])
    files["report, a page for a browser"] = make_report(run_folder).page
    died = any(node.died for node in swarm.nodes)
    if merged_loss is not None:
        drop_checkpoints(swarm)
    return SwarmResult(summary, ExitCode.NODE_DIED if died else ExitCode.OK, files, disk_use(run_folder))


def drop_checkpoints(swarm: LocalSwarm) -> None:
    """Drop the checkpoints of nodes in whose folders the run has ended: no node goes on from them, and they are
    large."""
    for node in swarm.nodes:
        if node.ended:
            shutil.rmtree(RunFolder(node.folder).checkpoints, ignore_errors=True)


def disk_use(run_folder: Path) -> dict[str, int]:
    """Bytes in a local swarm's run folder, by what they are for."""
    use: dict[str, int] = dict.fromkeys(("nodes' checkpoints", "nodes' final weights", "model", "the rest"), 0)
    kinds = {"checkpoints": "nodes' checkpoints", "final": "nodes' final weights"}
    for file in run_folder.rglob("*"):
        if not file.is_file():
            continue
        parts = file.relative_to(run_folder).parts
        kind = "model" if parts[0] == "model" else kinds.get(parts[2], "the rest") if len(parts) > 3 else "the rest"
        use[kind] += file.stat().st_size
    return use


class _Follower(Observer):
    """Keeps the display in step with the swarm, and says why nothing is seen of it where the disk takes no events."""

    def __init__(self, view: LocalSwarmView, display: Display, run_folder: Path) -> None:
        self.view = view
        self.display = display
        self._run_folder = run_folder
        self._next_look = 0.0

    def on_event(self, node: SwarmNode, event: AnyEvent) -> None:
        self.view.observe(node.name, event)

    def on_death(self, node: SwarmNode) -> None:
        self.view.lost(node.name, f"{node.describe_exit()}; its last lines:\n{node.last_lines()}")

    def on_poll(self) -> None:
        now = ambient.monotonic()
        if now >= self._next_look:
            self._next_look = now + 2.0
            self.view.trouble = _unseen(self._run_folder, RunFolder(self._run_folder).refusal())
        self.display.refresh()


async def _supervise(swarm: LocalSwarm, observer: _Follower) -> bool:
    """Run the swarm until all daemons have ended; True where a signal ended it."""
    work = asyncio.create_task(_train(swarm), name="local swarm")
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if interrupted:
            swarm.kill_all()
            return
        interrupted = True
        observer.view.note("ending all nodes; Ctrl-C again kills them at once")
        work.cancel()

    loop, signals = asyncio.get_running_loop(), heeded_signals()
    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        with observer.display:
            try:
                await work
            except asyncio.CancelledError:
                if not interrupted:
                    raise
            finally:
                observer.display.refresh()
                await swarm.stop()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
    return interrupted


async def _train(swarm: LocalSwarm) -> None:
    await swarm.start()
    await swarm.wait()


def _unseen(run_folder: Path, refusal: str) -> str:
    return refusal and (
        f"NOTHING CAN BE WRITTEN to {run_folder}: {refusal}. The nodes train on, unseen: no events, no checkpoints. "
        "Make room there; after Ctrl-C the same command goes on from the last checkpoints"
    )


def _merge(swarm: LocalSwarm, console: Console, files: dict[str, Path]) -> float | None:
    """Merge what the nodes saved into one model; its loss. None, with the reason shown, where a stage left nothing."""
    ended = [(node, node.stopped.final_weights) for node in swarm.nodes if node.stopped]
    saved = {node.folder / weights: node.serves for node, weights in ended if weights}
    lost = sorted(set(range(swarm.config.run.stages)) - set(saved.values()))
    if lost:
        console.print(f"no model was exported: no replica of {as_stages(lost)} left its weights")
        return None
    from noloco_node.exporting.write import merge_run

    merged = merge_run(swarm.config.run, list(saved), swarm.run_folder, console.print)
    files[MODEL] = merged.model
    files["sample of its text"] = merged.sample
    return merged.loss


def _write_summary(summary: Summary, path: Path) -> None:
    """Raises UserError (RUN_FOLDER) where the disk refuses."""
    text = json.dumps(summary.as_json(), indent=2, ensure_ascii=False) + "\n"
    try:
        atomic.write_bytes(path, text.encode())
    except OSError as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the summary cannot be written to '{path}': {error.strerror or error}",
            "make room on the disk; the same command with the same --run-folder writes it then",
        ) from None
