"""The newest weights of every stage, collected by one that trains none of them, and a model made of these.

An owner's seed does this, so that the owner has a model even where every volunteer leaves at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path

from noloco_node import ambient
from noloco_node.ambient import LOOK_SECONDS
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.records import Directory, PeerRecord, PeerState
from noloco_node.errors import UserError
from noloco_node.exporting.folders import gather_folders
from noloco_node.exporting.gathered import SavedReplica, Shapes
from noloco_node.exporting.live import MOST_REPLICAS, Gatherer
from noloco_node.exporting.write import export
from noloco_node.model.cut import cut_model
from noloco_node.storage import atomic
from noloco_node.storage.run_folder import RunFolder
from noloco_node.storage.weights import save_stage
from noloco_node.telemetry.words import as_bytes, as_many
from noloco_node.transport.interface import Transport

logger = logging.getLogger(__name__)

FIRST_SECONDS, LONGEST_SECONDS = 30.0, 600.0
"""The pause after the first collection, and the longest one, in seconds; it doubles in between."""
SHARE = 20.0
"""A pause lasts at least so many times as long as nodes gave their weights before it. What the collector itself takes
to load libraries and to write a model is no part of that: it made the pause ten minutes from the first one on."""
FEW_REPLICAS = 3
"""The number of replicas of each stage that are asked while the run goes on: three voices show which one is not like
the others."""
LAST_COLLECTIONS = 10
"""The number of collections at the run's end, one at each look: its nodes take their last steps and leave one by
one."""


async def collect_weights(
    run: RunSpec, folder: Path, transport: Transport, directory: Directory, over: Callable[[], bool]
) -> None:
    """What a seed does beside its other work: `Collector.follow`."""
    await Collector(run, folder, transport, directory).follow(over)


class Collector:
    """Keeps the newest slow weights of each stage in `folder`/collected and the model made of them in `folder`/model.
    Both are there as a whole or not at all, and a later collection takes their place."""

    def __init__(self, run: RunSpec, folder: Path, transport: Transport, directory: Directory) -> None:
        """`directory` shows only nodes that may take part in the run."""
        self._run = run
        self._transport = transport
        self._directory = directory
        self.collected = folder / "collected"
        """One folder of weights for each replica: `noloco-node export` takes them like run folders."""
        self.model = folder / "model"
        """An ordinary Hugging Face folder, once every stage has given its weights."""
        self._spool = folder / "collecting"
        self._shapes: Shapes | None = None
        self._failed = ""
        self._unwritten = self._kept_before()
        """Weights are kept of which no model was made yet."""
        self._giving_seconds = 0.0
        """For which nodes gave their weights, the last time that they were asked."""

    async def follow(self, over: Callable[[], bool]) -> None:
        """Collect now and then, and a few times as soon as nodes say that they are at the run's end, and after it.
        `over` says that the end has come. Before that a record alone asks for little: anybody may write one, and every
        collection costs the nodes."""
        with self._said_once():
            await self._make_model()
        due, pause, last = 0.0, FIRST_SECONDS, 0
        ended = False
        while not (over() and ended and (last >= LAST_COLLECTIONS or not self._there())):
            if over() and not ended:
                ended, last = True, min(last, 1)
            if (ended or self._finishing()) and last < LAST_COLLECTIONS:
                last += 1
                await self.collect(MOST_REPLICAS, beside=last > 1)
            elif ambient.monotonic() >= due and self._whole():
                # Early: nodes wait at the run's end for a peer that has collected before.
                await self.collect(FEW_REPLICAS)
                due = ambient.monotonic() + self.rest(pause)
                pause, last = min(2.0 * pause, LONGEST_SECONDS), max(0, last - 1)
            await asyncio.sleep(LOOK_SECONDS)
            await self._directory.refresh()

    def rest(self, least: float) -> float:
        """How long nodes are left alone after the last collection: so many seconds at least."""
        return max(least, SHARE * self._giving_seconds)

    async def collect(self, most: int, *, beside: bool = False) -> None:
        """Fetch the slow weights of up to `most` replicas of each stage, and make the model anew if any came. They take
        the place of those before, or with `beside` only of those of the same replicas. A failure is logged once and
        tried again at the next collection."""
        try:
            with self._said_once():
                await self._fetch(most, beside)
                await self._make_model()
        finally:
            await ambient.elsewhere(partial(shutil.rmtree, self._spool, ignore_errors=True))

    async def _fetch(self, most: int, beside: bool) -> None:
        if self._shapes is None:
            self._shapes = await ambient.elsewhere(Shapes, self._run)
        await ambient.elsewhere(partial(self._spool.mkdir, parents=True, exist_ok=True))
        parts = self._run, self._shapes, self._transport, self._directory, self._spool
        gatherer = Gatherer(*parts, lambda _came, _wanted: None, most=most)  # nobody watches these downloads
        began = ambient.monotonic()
        found = {stage: replicas for stage, replicas in (await gatherer.found()).items() if replicas}
        self._giving_seconds = ambient.monotonic() - began
        for stage, replicas in found.items():
            await ambient.elsewhere(self._keep, stage, replicas, beside)
            self._unwritten = True

    async def _make_model(self) -> None:
        """Make the model of what is kept, if that is newer."""
        if self._unwritten:
            await ambient.elsewhere(self._write)
            self._unwritten = False

    @contextlib.contextmanager
    def _said_once(self) -> Generator[None]:
        """A failure of the block is logged, and logged again only once it is another one."""
        try:
            yield
            self._failed = ""
        except (UserError, OSError) as error:
            told = error.message if isinstance(error, UserError) else str(error)
            if told != self._failed:
                self._failed = told
                remedy = error.remedy if isinstance(error, UserError) else f"look after the disk of {self.model.parent}"
                logger.warning("the run's model is not collected: %s; %s", told, remedy)

    def _kept_before(self) -> bool:
        """Whether an earlier life of this seed was ended before it had made the model of all that it had kept."""
        try:
            kept = [place.stat().st_mtime for place in self._places()]
            return not self.model.is_dir() or max(kept) > self.model.stat().st_mtime
        except OSError:  # some stage never came
            return False

    def _places(self) -> list[Path]:
        return [self.collected / f"stage-{stage}" for stage in range(self._run.stages)]

    def _there(self) -> list[PeerRecord]:
        """All live records of the run, without those of paused nodes, which give nothing."""
        now, view = self._directory.now(), self._directory.view
        records = [record for stage in range(self._run.stages) for record in view.live(stage, now)]
        return [record for record in records if not record.shown.paused]

    def _whole(self) -> bool:
        """Whether every stage has a node that trains."""
        there = {record.stage for record in self._there() if record.state is PeerState.TRAINING}
        return len(there) == self._run.stages

    def _finishing(self) -> bool:
        """Whether nodes say that the run comes to its end."""
        return any(record.state is PeerState.FINISHING for record in self._there())

    def _keep(self, stage: int, replicas: Sequence[SavedReplica], beside: bool) -> None:
        place, cut = self.collected / f"stage-{stage}", cut_model(self._run.model)[stage]
        with atomic.new_folder(place) as coming:
            for replica in replicas:
                save_stage(
                    coming / replica.peer,
                    run_id=self._run.run_id,
                    cut=cut,
                    clock=replica.clock,
                    outer_rounds=0,
                    slow=replica.load(),
                )
            former = place.iterdir() if beside and place.is_dir() else ()
            for folder in former:
                if not (coming / folder.name).exists():
                    shutil.copytree(folder, coming / folder.name, copy_function=_linked)

    def _write(self) -> None:
        """Make the model of what is kept, where every stage is there."""
        there = self._places()
        if missing := [place.name for place in there if not place.is_dir()]:
            logger.info("the model waits for the weights of %s", ", ".join(missing))
            return
        collected = RunFolder(self.collected)
        collected.keep_spec(self._run.agreed_json)
        if self._run.data.own_tokenizer:
            collected.keep_tokenizer_place(Path(self._run.data.tokenizer))
        gathered = gather_folders(there, self._run)
        clocks = {stage: max(one.clock for one in found) for stage, found in sorted(gathered.replicas.items())}
        late = gathered.of_different_times
        if late and self.model.is_dir():
            logger.warning("the model stays as it was for now: %s", late)
            return
        exported = export(gathered, self.model, lambda _: None)
        words = ", ".join(
            f"stage {stage} from {as_many(len(exported.used[stage]), 'replica')} at {clock:,.0f} tokens"
            for stage, clock in clocks.items()
        )
        size, hear = as_bytes(4 * exported.parameters), f"noloco-node generate {self.model} --prompt TEXT"
        logger.info("the model is in %s (%s): %s; to let it continue a text: %s", self.model, size, words, hear)


def _linked(source: str, target: str) -> None:
    """Take a file over without copying it, where the disk can: some of a flash drive cannot."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
