"""The weights of a run that is under way, fetched from the nodes that train it by an onlooker."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median_low, mode
from typing import Any, TypeVar

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.aio import cancel_and_wait, first_alone
from noloco_node.bootstrap.hello import Hello, ask_hello
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.records import FIRST_LOOK_SECONDS, Directory, PeerState, look_for_others
from noloco_node.errors import ExitCode, UserError
from noloco_node.exporting.gathered import Gathered, Reported, SavedReplica, Shapes, agreeing
from noloco_node.identity.peer_id import PeerId
from noloco_node.model.stage import build_stage
from noloco_node.node.interrupts import interruptible
from noloco_node.node.network import looking_on
from noloco_node.state_transfer.copies import fetch_slow, of_one_mind
from noloco_node.state_transfer.fetch import DiskMemory
from noloco_node.telemetry.logging import NodeLog, configure_logging
from noloco_node.telemetry.words import as_stages
from noloco_node.training.layout import FlatLayout
from noloco_node.transport.errors import Refusal, Refused, TransportError
from noloco_node.transport.interface import Transport
from noloco_node.trust.admission import Access
from noloco_node.trust.screened_directory import ScreenedDirectory

T = TypeVar("T")

logger = logging.getLogger(__name__)

MOST_REPLICAS = 8
"""At most so many replicas of each stage are averaged: more would add little to the mean, and each costs a download."""
LOOKS = 4
LEAST_LATE_SECONDS = 60.0
"""A replica of a stage is waited for at least so many seconds after half of the others. One free key that let chunks
drip, each just below its deadline, kept a seed for days from every stage's weights."""
GIVING = (PeerState.TRAINING, PeerState.FINISHING)
LEAVING = (PeerState.DRAINING,)
"""Nodes in these states are asked if a stage has no others: they may be gone before the copy is whole."""

_Progress = Callable[[int, int], None]
"""A function that is told how many bytes have come, and how many will."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """One replica's slow weights, on the disk."""

    stage: int
    peer: PeerId
    clock: float
    weights: Tensor
    """fp32 [parameters]."""


async def gather_live(
    settings: NodeSettings, spool: Path, told: _Progress, agreed: Callable[[RunSpec], object] = lambda _: None
) -> Gathered:
    """Fetch the slow weights of each stage's replicas of the run at `settings.initial_peers`, into files in `spool`.

    `agreed` sees the run, off the event loop, before anything is fetched. Raises UserError as `looking_on` and `agreed`
    do. It raises NO_STATE_SOURCE if the replicas of a stage give nothing, and RUN_FOLDER if the disk refuses. A signal
    raises KeyboardInterrupt.
    """
    configure_logging("WARNING", NodeLog())
    with interruptible() as interrupts:
        try:
            async with looking_on(settings, as_guest=True) as outside:
                directory = ScreenedDirectory(outside.directory, Access(outside.spec))
                await ambient.elsewhere(agreed, outside.spec)
                shapes = await ambient.elsewhere(Shapes, outside.spec)  # it loads libraries, which takes seconds
                await look_for_others(directory, outside.door.identity.peer_id, FIRST_LOOK_SECONDS)
                gatherer = Gatherer(outside.spec, shapes, outside.door.transport, directory, spool, told)
                return await outside.supervisor.beside(gatherer.gather())
        except asyncio.CancelledError:
            if not interrupts.cancelled_by_signal:
                raise
            raise KeyboardInterrupt from None


class Gatherer:
    """Fetches from the peers that the directory shows, several at once; one that fails is replaced by another of its
    stage."""

    def __init__(
        self,
        run: RunSpec,
        shapes: Shapes,
        transport: Transport,
        directory: Directory,
        spool: Path,
        told: _Progress,
        rng: random.Random | None = None,
        pause: float = 3.0,
        most: int = MOST_REPLICAS,
    ) -> None:
        """`most`: replicas of each stage that are asked for."""
        self._run = run
        self._most = most
        self._transport = transport
        self._directory = directory
        self._spool = spool
        self._told = told
        self._rng = rng or ambient.chance()
        self._pause = pause
        self._shapes = shapes
        self._came = self._wanted = 0
        self._asked: set[PeerId] = set()
        self._busy = False
        """A peer that was asked in the last look could give later."""
        self._warned: set[tuple[PeerId, str]] = set()

    async def gather(self) -> Gathered:
        """All stages at once, so that they are of about the same moment. Raises UserError as `gather_live`."""
        replicas = await self.found()
        lost = [stage for stage, found in replicas.items() if not found]
        if lost:
            live = self._directory.view.everyone(self._directory.now())
            paused = sorted({record.stage for record in live if record.stage in lost and record.shown.paused})
            raise UserError(
                ExitCode.NO_STATE_SOURCE,
                f"no replica of {as_stages(lost)} of run '{self._run.name}' gave its weights"
                + (f"; nodes of {as_stages(paused)} are paused" if paused else ""),
                "try again when nodes train it (noloco-node watch shows them), or export the run folders of its nodes",
            )
        hellos = await self._hellos([PeerId(replica.peer) for replica in replicas[0]])
        reported, versions = reported_by(hellos, self._run.max_lag_tokens), [hello.version for hello in hellos]
        return Gathered(self._run, replicas, reported, mode(versions) if versions else "")

    async def found(self) -> dict[int, list[SavedReplica]]:
        """What each stage gave, nothing where none of its replicas gave any. UserError (RUN_FOLDER) where the disk
        refuses."""
        copies: list[_Copy] = []
        # A peer that broke off in the middle of a copy keeps its place for a minute.
        for look in range(40):
            self._busy = False
            await self._directory.refresh()
            missing = set(range(self._run.stages)) - {copy.stage for copy in copies}
            found = await all_or_first_error([self._of_stage(stage) for stage in sorted(missing)])
            copies += [copy for of_stage in found for copy in of_stage]
            if {copy.stage for copy in copies} == set(range(self._run.stages)):
                break
            if look + 1 >= LOOKS and not self._busy:
                break
            self._asked.clear()
            await asyncio.sleep(self._pause)
        copies = self._of_one_time(copies)
        return {stage: await self._sound(stage, copies) for stage in range(self._run.stages)}

    async def _hellos(self, peers: Sequence[PeerId]) -> list[Hello]:
        """What those say of themselves that answer for this run."""
        asked = (ask_hello(self._transport, peer, 5.0) for peer in peers)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        hellos: list[Hello] = []
        for answer in answers:
            if isinstance(answer, Hello):
                hellos.append(answer)
            elif not isinstance(answer, Refused | TransportError):
                raise answer
        return [hello for hello in hellos if hello.run == self._run.run_id]

    def _candidates(self, stage: int) -> list[PeerId]:
        live = self._directory.view.live(stage, self._directory.now())
        there = [PeerId(record.peer_id) for record in live if record.state in GIVING]
        leaving = [record for record in live if record.state in LEAVING and not record.shown.paused]
        there = there or [PeerId(record.peer_id) for record in leaving]
        self._rng.shuffle(there)
        return there

    async def _of_stage(self, stage: int) -> list[_Copy]:
        """Copies of as many replicas as are asked for; each that fails is replaced as long as there are others. Once
        half of them are here the others have as long again."""
        waiting = [peer for peer in self._candidates(stage) if peer not in self._asked]
        found, enough = list[_Copy](), asyncio.Event()
        began, many = ambient.monotonic(), min(self._most, len(waiting))

        async def one_after_another() -> None:
            while waiting:
                peer = waiting.pop()
                self._asked.add(peer)
                copy = await self._take(stage, peer)
                if copy is not None:
                    found.append(copy)
                    if 2 * len(found) >= many:
                        enough.set()
                    return

        async def too_late() -> None:
            await enough.wait()
            await asyncio.sleep(max(LEAST_LATE_SECONDS, ambient.monotonic() - began))

        taking = all_or_first_error([one_after_another() for _ in range(many)])
        tasks = asyncio.create_task(taking), asyncio.create_task(too_late())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
            else:
                logger.warning("stage %d: %d of %d replicas give too slowly", stage, many - len(found), many)
        finally:
            await cancel_and_wait(tasks)
        return found

    async def _take(self, stage: int, peer: PeerId) -> _Copy | None:
        size = self._shapes.layout(stage).size
        weights = self._room(size)
        self._wanted += weights.nbytes
        came = 0

        def told(count: int) -> None:
            nonlocal came
            came += 4 * count
            self._came += 4 * count
            self._told(self._came, self._wanted)

        manifest = None
        try:
            try:
                manifest = await fetch_slow(self._run, stage, self._transport, peer, weights, told)
            except Refused as error:
                if error.reason is not Refusal.UNKNOWN_SNAPSHOT:
                    raise
                # It has newer weights by now, as at a run's end: these are taken.
                self._came, came = self._came - came, 0
                manifest = await fetch_slow(self._run, stage, self._transport, peer, weights, told)
        except (Refused, TransportError) as error:
            why = (str(error).splitlines() or [repr(error)])[0]
            self._busy |= isinstance(error, Refused) and error.reason is Refusal.BUSY
            if (peer, why) not in self._warned:
                self._warned.add((peer, why))
                logger.warning("stage %d of %s is not to be had: %s", stage, peer, why)
        finally:
            if manifest is None:
                self._came -= came
                self._wanted -= weights.nbytes
                if self._wanted:
                    self._told(self._came, self._wanted)
        return None if manifest is None else _Copy(stage, peer, manifest.clock, weights)

    def _room(self, size: int) -> Tensor:
        """So many numbers in fp32 on the disk of the spool folder."""
        try:
            return DiskMemory(4 * size, self._spool).tensor(torch.float32)
        except OSError as error:
            raise UserError(
                ExitCode.RUN_FOLDER,
                f"the replicas' weights cannot be kept in {self._spool}: {error.strerror or error}",
                "make room there for each replica of each stage, or name a folder on another disk: with --out for "
                "export, with TMPDIR for eval",
            ) from None

    def _of_one_time(self, copies: Sequence[_Copy]) -> list[_Copy]:
        """For each stage the copies whose clocks most of its replicas bear out: all of them train at this moment."""
        lag, kept = self._run.max_lag_tokens, list[_Copy]()
        middle = median_low([copy.clock for copy in copies]) if copies else 0.0
        for stage in range(self._run.stages):
            own = [copy for copy in copies if copy.stage == stage]
            agreed = agreeing([copy.clock for copy in own], lag, middle)
            for place, copy in enumerate(own):
                if place in agreed:
                    kept.append(copy)
                else:
                    logger.warning(
                        "stage %d of %s says %s tokens, more than %s from what others say, and stays out of the model",
                        *(stage, copy.peer, f"{copy.clock:,.0f}", f"{lag:,.0f}"),
                    )
        return kept

    async def _sound(self, stage: int, copies: Sequence[_Copy]) -> list[SavedReplica]:
        own = [copy for copy in copies if copy.stage == stage]
        if len(own) > 2:
            kept = await ambient.elsewhere(self._alike, stage, own)
            for strange in (copy for copy in own if copy not in kept):
                logger.warning("stage %d of %s is not like the others', and no part of it", stage, strange.peer)
            own = kept or own
        return [self._saved(copy) for copy in own]

    def _alike(self, stage: int, copies: Sequence[_Copy]) -> list[_Copy]:
        parameters = dict(build_stage(self._run.model, stage).named_parameters())
        first = FlatLayout.of(parameters).flatten(parameters)
        return [copies[index] for index in of_one_mind([copy.weights for copy in copies], first)]

    def _saved(self, copy: _Copy) -> SavedReplica:
        load = partial(self._shapes.unflattened, copy.stage, copy.weights, copy.peer)
        return self._shapes.checked(SavedReplica(copy.stage, copy.clock, copy.peer, load, copy.peer))


def reported_by(hellos: Sequence[Hello], max_lag: float) -> Reported | None:
    """The median of the held-out losses that nodes of stage 0 have measured last; None if no node has measured any.
    Only nodes within `max_lag` tokens of their median clock count. Less than half of them, whatever they say, move it
    no further than to what another one says."""
    said = [hello.held_out for hello in hellos if hello.held_out is not None]
    if not said:
        return None
    middle = median_low([each.clock for each in said])
    losses = sorted((each.loss, each.clock) for each in said if abs(each.clock - middle) <= max_lag)
    return Reported(*losses[(len(losses) - 1) // 2])


async def all_or_first_error(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What each of them gives; where one raises UserError the others end, and it alone goes on."""
    with first_alone(UserError):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]
