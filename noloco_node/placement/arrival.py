"""How a node comes to a stage: where its first state comes from, and how it says that it is on its way.

It says so before it downloads, so that nodes that join together spread out. Before microbatches flow it waits for
stages that nobody serves, and for a start together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Literal

from noloco_node import PROTOCOL_VERSION, __version__, ambient
from noloco_node.aio import cancel_and_wait
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.records import SERVING, WITHDRAWAL_SECONDS, Directory, OwnWord, PeerRecord, PeerState
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import PeerStats
from noloco_node.placement.balancing import Server, choose_stage, servers_of, settle_among, supply_of

logger = logging.getLogger(__name__)

BEGINNINGS = {
    "checkpoint": "its own checkpoint",
    "peer": "a stage peer's state",
    "seed": "the run's first weights",
}

DOUBT_SECONDS = 30.0
"""Nodes that the directory shows are asked for so many seconds in case of doubt. Either a serving node answers and its
record is missing, or most that have a say are not past the first outer step. A node without a state waits as long for
a peer that held it."""
HEARD = (*SERVING, PeerState.JOINING)
"""Nodes in these states have a say if they answer."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a node starts from, and why, for a person."""

    source: Literal["checkpoint", "peer", "seed", "nowhere"]
    """`nowhere`: nobody trains any more, and this node has nothing to add."""
    why: str
    doubtful: bool = False
    """Most nodes that have a say are not past the first outer step. If no stage peer gives its state, the run has only
    just begun."""


def where_to_begin(
    own_clock: float | None,
    others: Sequence[PeerRecord],
    stage: int,
    max_lag: float,
    *,
    joined: bool = True,
    entrances: Collection[str] = (),
    over: str = "",
) -> Beginning:
    """The precedence: the own checkpoint, unless the swarm is more than `max_lag` tokens beyond it; then a stage peer's
    state; then the run's first weights.

    `own_clock` is the checkpoint's (None: there is none). `others` are the records of answering nodes of all stages,
    without the own. `joined`: it was let in by others. If it was not, the run begins with it, and nobody can tell it
    that it is over. `entrances`: the peers that it was told to join. Those of them that serve a stage say whether the
    run has just begun. Anybody else may answer under as many keys as it likes.

    `over` says how this node knows that the run has come to its end, if it does. Then it begins only beside others that
    go on all the same. Those that only join do not: several that come home at once would begin it again together.

    How far the swarm is, is the median of the stage peers' recorded clocks, or of all clocks if no stage peer lives.
    """
    others = [record for record in others if record.state in HEARD]
    serving = [record for record in others if record.state in SERVING]
    if over and joined and all(record.finished or record.state is PeerState.FINISHING for record in serving):
        return Beginning("nowhere", f"{over}, and nobody that answers trains any more")
    if not any(record.outer_steps_taken > 0 for record in serving):
        nobody = "nobody else answers" if not others else "nobody else that answers is past the first outer step"
        if own_clock is not None:
            return Beginning("checkpoint", nobody)
        return Beginning("seed", f"there is no checkpoint here, and {nobody}")
    asked = [record for record in serving if record.peer_id in entrances] or serving
    doubtful = not joined or 2 * sum(record.outer_steps_taken > 0 for record in asked) <= len(asked)
    stage_peers = [record.clock for record in serving if record.stage == stage]
    ahead = median(stage_peers or [record.clock for record in serving]) - (own_clock or 0.0)
    if own_clock is not None and ahead <= max_lag:
        return Beginning("checkpoint", f"the swarm is {max(0.0, ahead):,.0f} tokens beyond it, {max_lag:,} are allowed")
    if joined and all(record.state is PeerState.FINISHING for record in others):
        return Beginning("nowhere", "nobody trains any more")
    if own_clock is None:
        return Beginning("peer", "there is no checkpoint here, and the swarm is past its first outer step", doubtful)
    if stage_peers:
        why = f"the swarm is {ahead:,.0f} tokens beyond the checkpoint, {max_lag:,} are allowed"
        return Beginning("peer", why, doubtful)
    return Beginning("checkpoint", f"the swarm is {ahead:,.0f} tokens beyond it, but no other node has stage {stage}")


def is_left_behind(own_clock: float, others: Sequence[PeerRecord], stage: int, max_lag: float) -> bool:
    """Tell whether at least half of others train more than `max_lag` tokens beyond a checkpoint and none serves its
    stage. What they keep of that may be further than the checkpoint."""
    serving = [record for record in others if record.state in SERVING]
    if not any(record.outer_steps_taken > 0 for record in serving) or any(record.stage == stage for record in serving):
        return False
    return median_low(record.clock for record in serving) - own_clock > max_lag


def lacks_first_weights(spec: RunSpec) -> bool:
    """Whether the run began with weights that this node has no folder of: it must not make up others."""
    return spec.model.fingerprint is not None and spec.model.from_pretrained is None


def no_first_weights(spec: RunSpec, stage: int) -> UserError:
    """The end of a node that would have to begin with weights that it does not have."""
    return UserError(
        ExitCode.NO_STATE_SOURCE,
        f"run '{spec.name}' begins with the weights {spec.model.fingerprint}, nobody gives a state of stage {stage}, "
        "and this node has no folder of those weights",
        "get the folder from the run's owner, and say where it lies with --set "
        "run.model.from_pretrained=FOLDER; a stage that somebody serves can be joined without it",
    )


class Arrival:
    """Publishes this node's `joining` record, which lives `record_seconds` unless it is renewed.

    `ask` asks the peers that the directory shows whether they are there, and notes it in `known`. `name` is the node's
    name for others.
    """

    def __init__(
        self,
        directory: Directory,
        own: PeerId,
        record_seconds: float,
        known: PeerStats,
        ask: Callable[[], Awaitable[None]],
        name: str = "",
    ) -> None:
        self._directory = directory
        self._known = known
        self._ask = ask
        self._own = own
        self._record_seconds = record_seconds
        self._shown = OwnWord(name=name)

    async def choose(
        self,
        work: Sequence[float],
        fitting: Collection[int],
        rng: random.Random,
        line_seconds: Sequence[float] = (),
    ) -> int:
        """Announce this node at the stage that needs it most, look again, and yield where others chose the same at the
        same time. `work` as in `Supply`; `fitting` are the stages that this machine can hold, `line_seconds` as in
        `choose_stage`. Where nobody is there yet a node that can hold the first stage takes it: the text is here, and
        need not be with the next one to come."""
        first = self._others(work)
        begins = not first and 0 in fitting and not any(line_seconds)
        chosen = 0 if begins else choose_stage(supply_of(first, work), fitting, rng, line_seconds)
        await self._publish(chosen, PeerState.JOINING)
        others = await self._others_anew(work)
        if any(line_seconds):
            fitting = [stage for stage in fitting if line_seconds[stage] <= line_seconds[chosen]]
        better = settle_among(others, {server.peer for server in first}, self._own, chosen, work, fitting)
        if better != chosen:
            logger.info("others are joining stage %d at the same time: taking stage %d", chosen, better)
            await self.withdraw(chosen)
            await self._publish(better, PeerState.JOINING)
        return better

    async def confirmed(self, stage: int, work: Sequence[float], worth: Callable[[Sequence[Server]], bool]) -> bool:
        """Announce this node at `stage`, look again, and keep to it if it is still `worth` it. It is judged beside
        all others that count by then. Of several nodes that decide within one look of each other, only one goes, or
        none."""
        stays = True
        try:
            await self._publish(stage, PeerState.JOINING)
            stays = not worth(await self._others_anew(work))
        finally:
            if stays:  # also where it was told to end meanwhile: nobody must wait for it there
                await self.withdraw(stage)
        return not stays

    def _others(self, work: Sequence[float]) -> list[Server]:
        return servers_of(self._directory.view, work, self._directory.now(), self._known, without=self._own)

    async def _others_anew(self, work: Sequence[float]) -> list[Server]:
        await self._directory.refresh()
        await self._ask()
        return self._others(work)

    @contextlib.asynccontextmanager
    async def announced(self, stage: int, state: PeerState = PeerState.JOINING) -> AsyncGenerator[None]:
        """Keep the announcement alive while the block runs; withdraw it where the block fails. A node that announces
        itself as DRAINING is paused, and will be back: what it last said of its work stands."""
        live = self._directory.view.live(stage, self._directory.now()) if state is PeerState.DRAINING else ()
        last = next((record for record in live if record.peer_id == self._own), None)
        await self._publish(stage, state, last)
        renewing = asyncio.create_task(self._renew(stage, state, last))
        try:
            yield
        except BaseException:
            await cancel_and_wait((renewing,))
            await self.withdraw(stage)
            raise
        finally:
            await cancel_and_wait((renewing,))

    async def withdraw(self, stage: int) -> None:
        """This node does not come to `stage` after all."""
        await self._publish(stage, PeerState.GONE)

    async def _renew(self, stage: int, state: PeerState, last: PeerRecord | None) -> None:
        while True:
            await asyncio.sleep(self._record_seconds / 3)
            await self._publish(stage, state, last)

    async def _publish(self, stage: int, state: PeerState, last: PeerRecord | None = None) -> None:
        gone, shown = state is PeerState.GONE, self._shown if last is None else last.shown
        record = PeerRecord(
            peer_id=self._own,
            stage=stage,
            state=state,
            clock=0.0 if last is None else last.clock,
            outer_steps_taken=0 if last is None else last.outer_steps_taken,
            protocol=PROTOCOL_VERSION,
            version=__version__,
            sequence=int(self._directory.now() * 1000),
            shown=shown.model_copy(update={"name": self._shown.name, "paused": state is PeerState.DRAINING}),
        )
        life = self._record_seconds + (WITHDRAWAL_SECONDS if gone else 0.0)
        if not await self._directory.publish(record, life):
            logger.debug("no peer took this node's announcement (%s at stage %d)", state, stage)


START_SECONDS = 60.0
"""Nodes that are on their way are waited for so many seconds."""


class CommonStart:
    """A run begins when so many replicas of every stage are up.

    Those that begin alone would train the first steps on whole batches, and the others would begin from a copy or lag
    behind.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._since: float | None = None
        self._over = replicas <= 1

    def over(self, up: Sequence[int], trained: bool, now: float) -> bool:
        """Tell whether the first sample may be drawn at `now` (seconds). Once over, it stays over. `up` are the live
        replicas of each stage, `trained` says whether this node, or half of the others, have trained."""
        self._since = now if self._since is None else self._since
        if not self._over:
            late = now - self._since >= START_SECONDS
            self._over = trained or min(up) >= self._replicas or late
            if late and min(up) < self._replicas:
                logger.warning("begins with %s replicas of the stages: %d of each are not up", up, self._replicas)
        return self._over


class MissingStages:
    """Remembers since when stages have no replica, and says so once each, when it begins and when it ends."""

    def __init__(self) -> None:
        self.looked = False
        """Whether anything is known yet."""
        self._since: dict[int, float] = {}
        self._served: set[int] = set()

    @property
    def stages(self) -> list[int]:
        """Those that had no replica at the last look."""
        return sorted(self._since)

    def look(self, unserved: Sequence[int], stages: int, paused: Collection[int] = ()) -> None:
        """Take in what the directory says: which of the run's `stages` nobody serves now, and where nodes are
        `paused`."""
        now, self.looked = ambient.monotonic(), True
        for stage in set(unserved) - self._since.keys():
            self._since[stage] = now
            lost = "has lost its last replica" if stage in self._served else "has no replica yet"
            lost = "has only paused nodes" if stage in paused else lost
            then = "microbatches are held back" if stage > 0 else "no microbatch is drawn"
            logger.warning("stage %d %s: %s until one comes", stage, lost, then)
        self.look_back(unserved)
        self._served |= set(range(stages)) - set(unserved)

    def look_back(self, unserved: Sequence[int]) -> None:
        """Take in only which of the stages that had no replica are served again. At the run's end a stage that empties
        is not lost. A node that still has something to train must learn that one is back."""
        for stage in self._since.keys() - set(unserved):
            again = " again" if stage in self._served else ""
            waited = ambient.monotonic() - self._since.pop(stage)
            logger.info("stage %d is served%s after %.0f s", stage, again, waited)
