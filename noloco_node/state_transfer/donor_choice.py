"""The choice of the donor of a joiner's state. The joiner asks all at once, takes the best, resumes, and goes on to the
next.

Replicas of a stage have different weights, so all chunks of a state come from one donor's snapshot. Several donors are
good for one thing: none of them is needed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median_low

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.participant import ReplicaContext
from noloco_node.peers.scorecard import PeerBook
from noloco_node.state_transfer.fetch import (
    OFFER,
    Download,
    StateManifest,
    StateOffer,
    StateRequest,
    fetch_state,
    load_download,
    new_download,
    open_state,
    packed_size,
)
from noloco_node.state_transfer.rate import MOST_TRIED, WHOLE_SECONDS
from noloco_node.tallies import MUCH_MORE, Doubling
from noloco_node.telemetry.events import AnyEvent, StateDownload, StateSourceFailed
from noloco_node.transport.calls import ASKED_AT_ONCE, ATTEMPTS, QUESTION_SECONDS, call, floor_of
from noloco_node.transport.errors import DeadlinePassed, ProtocolViolation, Refusal, Refused, TransportError

logger = logging.getLogger(__name__)

BUSY_PAUSE_SECONDS = (1.0, 4.0)
BUSY_PATIENCE_SECONDS = 2.0 * WHOLE_SECONDS
AWAY_TRIES = 6
"""Donors are asked so many times in a row while none can be reached, is ready to give, or gives more than before."""
AWAY_PAUSES = Doubling(0.25, 4.0)
"""Seconds of pause between those times."""
NOT_READY = (Refusal.DRAINING, Refusal.UNKNOWN_METHOD, Refusal.UNKNOWN_SNAPSHOT, Refusal.INTERNAL, Refusal.RELAYED)
"""A donor with one of these refusals may give its state a moment later: it has just come, its snapshot has been
replaced, or a direct connection is being made."""


class NoDonor(Exception):
    """Nobody gave its state. `reasons` says why, for each donor that was asked; empty where there is none."""

    def __init__(self, reasons: Mapping[PeerId, str]) -> None:
        super().__init__(f"none of {len(reasons)} state sources gave its state")
        self.reasons = dict(reasons)

    def explained(self, spec: RunSpec, stage: int) -> UserError:
        """What a person is told: each donor with its reason."""
        reasons = "".join(f"\n  {peer}: {reason}" for peer, reason in sorted(self.reasons.items()))
        return UserError(
            ExitCode.NO_STATE_SOURCE,
            f"run {spec.run_id[:8]} is past its first outer step and none of {len(self.reasons)} replicas of stage "
            f"{stage} gave its state{':' if reasons else ''}{reasons}",
            "try again when a replica of this stage is reachable, or serve another stage with --stage",
        )


def rank_donors(offers: Mapping[PeerId, StateOffer], max_lag: float, rng: random.Random) -> list[PeerId]:
    """Donors in the order in which to try them: the fresh before the stale, then by load, at random among equals. A
    donor is stale if its clock is more than a quarter of `max_lag` behind the lower median of the offers. One that
    claims a clock far in the future must not make the others look old, not even of two."""
    if not offers:
        return []
    middle = median_low(offer.clock for offer in offers.values())

    def order(peer: PeerId) -> tuple[bool, bool, int, float]:
        offer = offers[peer]
        stale = offer.clock < middle - max_lag / 4
        return stale, offer.readers >= offer.places, offer.readers, rng.random()

    return sorted(offers, key=order)


class TooSlow(TransportError):
    """The donor gives, but another may be faster."""


class DonorPaces:
    """What slow donors were measured to give. `floor` in bytes per second.

    A donor that lets one chunk drip before each deadline would hold a joiner for hours beside an idle honest one. It is
    left while another offers that may be faster, or one that was tried before gave much more. A few are tried for a
    window each, then the fastest of them is kept, since the slowness may be this node's own. The only donor is never
    given up.
    """

    def __init__(self, floor: float, book: PeerBook | None = None) -> None:
        self.floor = floor
        self._book = book or PeerBook()

    def is_enough(self, donor: PeerId, rate: float, offering: Collection[PeerId]) -> bool:
        """Whether to stay with `donor`, which gives `rate` bytes per second, while all of `offering` would give."""
        slow, others = self._slow(offering), [peer for peer in offering if peer != donor]
        tried = [slow[peer] for peer in others if peer in slow]
        few = len(tried) < min(len(others), MOST_TRIED - 1)
        return rate >= self.floor or not (few or max(tried, default=0.0) > MUCH_MORE * rate)

    def goes_on(self, donor: PeerId, rate: float, offering: Collection[PeerId]) -> bool:
        """As `is_enough`; and it is noted where it is not."""
        enough = self.is_enough(donor, rate, offering)
        self._book.gives(donor, None if enough else rate)
        return enough

    def next(self, ranked: Collection[PeerId]) -> PeerId:
        """The next donor of `ranked`, the best first: one not known as slow, until a few are; then the fastest."""
        slow = self._slow(ranked)
        untried = [peer for peer in ranked if peer not in slow]
        return untried[0] if untried and len(slow) < MOST_TRIED else max(slow, key=lambda peer: slow[peer])

    def all_slow(self, donors: Collection[PeerId]) -> bool:
        """Whether all of them were measured and found slow."""
        return len(self._slow(donors)) == len(donors)

    def _slow(self, donors: Collection[PeerId]) -> dict[PeerId, float]:
        known = {peer: self._book.of(peer).partner for peer in donors}
        return {peer: each.slow_rate for peer, each in known.items() if each and each.slow_rate is not None}


@dataclass(slots=True)
class _Search:
    """What a joiner knows while it looks for a donor."""

    failed: dict[PeerId, str] = field(default_factory=dict[PeerId, str])
    """Donors that are not asked again."""
    busy: dict[PeerId, str] = field(default_factory=dict[PeerId, str])
    """Donors that were busy when they were asked last."""
    away: dict[PeerId, str] = field(default_factory=dict[PeerId, str])
    """Donors that could not be reached, or were not ready, when they were asked last."""
    told: set[PeerId] = field(default_factory=set[PeerId])
    """Donors of which it was told that they are slow or away."""
    rounds: int = 0
    """In which every donor was away."""


class StateCopier:
    """Makes this replica a copy of a stage peer. `believe` turns a donor's claimed clock into the one to take over."""

    def __init__(self, context: ReplicaContext, believe: Callable[[float], float]) -> None:
        """What comes lies on the disk of the run's folder until it is whole."""
        self._spec, self._stage, self._folder = context.spec, context.stage, context.settings.run_folder
        self._transport, self._worker = context.transport, context.worker
        self._emit, self._rng = context.emit, context.rng
        self._believe = believe
        self._relayed_told = False
        limits, size = self._spec.limits, packed_size(self._worker.state_sizes())
        floor = floor_of(size, limits.chunk_bytes, limits.exchange_progress_seconds)
        self._paces = DonorPaces(floor, self._transport.peer_stats.book)

    async def copy_best(
        self, donors: Callable[[], Awaitable[Sequence[PeerId]]], patience: float = BUSY_PATIENCE_SECONDS
    ) -> tuple[PeerId, StateManifest]:
        """Take the state of the best donor that gives it; `donors()` finds those that live now. Raises NoDonor.

        A donor whose state is no good is not asked again. While all that are left are busy, or give too slowly, it
        waits and asks again, for at most `patience` seconds. While all are away or none is seen, it asks `AWAY_TRIES`
        times.
        """
        search = _Search()
        download: Download | None = None
        until = ambient.monotonic() + patience
        while True:
            offers = await self._ask_all([peer for peer in await donors() if peer not in search.failed], search)
            ranked = rank_donors(offers, self._spec.max_lag_tokens, self._rng)
            while ranked:
                donor = self._paces.next(ranked)
                if download is None:
                    download = await ambient.elsewhere(new_download, self._spec, self._worker, self._folder)
                busy = list(search.busy) if ambient.monotonic() < until else []
                most = download.most
                try:
                    return donor, await self._copy(donor, download, [*ranked, *busy])
                except TooSlow as error:
                    self._tell(search, donor, str(error))
                    if busy and ambient.monotonic() < until and self._paces.all_slow(ranked):
                        break
                except (Refused, TransportError) as error:
                    ranked.remove(donor)
                    self._note(search, donor, error)
                if download.most > most:
                    search.rounds = 0
            if search.busy and ambient.monotonic() < until:
                logger.info("%d state sources are busy: asking again in a moment", len(search.busy))
                await asyncio.sleep(self._rng.uniform(*BUSY_PAUSE_SECONDS))
                search.busy.clear()
                continue
            search.rounds += 1
            in_vain = search.failed and not search.away
            if search.busy or in_vain or search.rounds >= AWAY_TRIES:
                raise NoDonor(search.failed | search.busy | search.away)
            # Nothing tells that a link is mended or a donor ready: asking again is the only way.
            await asyncio.sleep(AWAY_PAUSES.about(search.rounds - 1, self._rng))

    async def copy_from(self, donor: PeerId, others: Collection[PeerId] = ()) -> StateManifest:
        """Take the state of this donor; TooSlow where one of `others` may be faster. Raises Refused, TransportError or
        DiskFull; the replica is unchanged then."""
        try:
            offer = await self._ask(donor)  # there must be something to come before there is room made for it
            if offer.readers >= offer.places:  # a node waits for a place only once it asks for the state
                size = packed_size(self._worker.state_sizes())
                await open_state(self._transport, donor, self._request(), size, self._spec.limits)
            download = await ambient.elsewhere(new_download, self._spec, self._worker, self._folder)
            manifest = await self._copy(donor, download, others)
        except Refused as error:
            if error.reason is Refusal.RELAYED and not self._relayed_told:
                self._relayed_told = True
                logger.warning(
                    "this node is too far behind to be averaged with, and %s, which is connected by relay only, sends "
                    "no state through one: it trains alone until it has caught up with a replica of stage %d that it "
                    "can dial, or that can dial it",
                    donor,
                    self._stage,
                )
            raise
        self._relayed_told = False
        return manifest

    async def _ask_all(self, donors: Sequence[PeerId], search: _Search) -> dict[PeerId, StateOffer]:
        """What the donors can give; those that answer otherwise are noted."""
        asked = list(donors)
        self._rng.shuffle(asked)
        known = self._transport.peer_stats
        asked.sort(key=lambda donor: (not known.answers(donor), known.of(donor).silences))
        offers: dict[PeerId, StateOffer] = {}

        async def ask(donor: PeerId) -> None:
            try:
                offers[donor] = await self._ask(donor)
            except (Refused, TransportError) as error:
                self._note(search, donor, error)

        async with asyncio.TaskGroup() as group:
            for donor in asked[:ASKED_AT_ONCE]:
                group.create_task(ask(donor))
        return offers

    async def _ask(self, donor: PeerId) -> StateOffer:
        """What one donor can give. Raises Refused or TransportError."""
        return await call(self._transport, donor, OFFER, self._request(), seconds=QUESTION_SECONDS)

    def _request(self) -> StateRequest:
        return StateRequest(run=self._spec.run_id, stage=self._stage, contract=self._worker.contract)

    def _note(self, search: _Search, donor: PeerId, error: Refused | TransportError) -> None:
        reason = str(error) or repr(error)
        if isinstance(error, Refused) and error.reason is Refusal.BUSY:
            search.busy[donor] = reason
            logger.debug("state source %s is busy: %s", donor, reason)
        elif _may_come_back(error):
            search.away[donor] = reason
            self._tell(search, donor, reason)
        else:
            search.failed[donor] = reason
            search.away.pop(donor, None)
            self._emit(StateSourceFailed(source=donor, reason=reason))

    def _tell(self, search: _Search, donor: PeerId, reason: str) -> None:
        if donor not in search.told:
            search.told.add(donor)
            self._emit(StateSourceFailed(source=donor, reason=reason))

    async def _copy(self, donor: PeerId, download: Download, offering: Collection[PeerId]) -> StateManifest:
        """One donor's state, resumed where a stream breaks, loaded as a whole at the end. TooSlow where one of
        `offering` may be faster. It is asked `ATTEMPTS` times in a row while nothing worth it comes."""
        window = self._spec.limits.exchange_progress_seconds
        goes_on = partial(self._paces.goes_on, donor, offering=offering)
        progress = _Progress(donor, download.size, self._emit, goes_on, window)
        failures, stopped = 0, False
        while True:
            began, most = ambient.monotonic(), download.most
            progress.begin()
            try:
                manifest = await fetch_state(
                    self._spec,
                    self._stage,
                    self._transport,
                    self._worker,
                    donor,
                    download,
                    on_progress=progress,
                    after_a_stop=stopped,
                )
                return await load_download(self._transport, self._worker, download, manifest, self._believe)
            except (ProtocolViolation, TooSlow):
                raise
            except TransportError as error:
                more, seconds = download.most - most, ambient.monotonic() - began
                if more and self._paces.is_enough(donor, more / max(seconds, 1e-3), offering):
                    failures = 0
                failures, stopped = failures + 1, isinstance(error, DeadlinePassed)
                if failures == ATTEMPTS:
                    raise
                logger.debug("the transfer from %s broke off, resuming: %r", donor, error)
                await asyncio.sleep(AWAY_PAUSES.about(1, self._rng))


def _may_come_back(error: Refused | TransportError) -> bool:
    """Whether a failed link or a peer that is not ready is all that is wrong with a donor."""
    if isinstance(error, Refused):
        return error.reason in NOT_READY
    return not isinstance(error, ProtocolViolation)


class _Progress:
    """Tells how far one download is, about once a second, and measures it in each window. TooSlow where it is left."""

    def __init__(
        self,
        donor: PeerId,
        total: int,
        emit: Callable[[AnyEvent], None],
        goes_on: Callable[[float], bool],
        window: float,
    ) -> None:
        """`goes_on` says whether so many bytes per second are enough; `window` in seconds."""
        self._donor, self._total, self._emit = donor, total, emit
        self._goes_on, self._window = goes_on, window
        self._started = ambient.monotonic()
        self._next = 0.0
        self._since: tuple[float, int] | None = None
        """When the window began, and the bytes that lay here then."""

    def begin(self) -> None:
        """A new stream of chunks begins: what comes first is what lies here already."""
        self._since = None

    def __call__(self, received: int) -> None:
        now = ambient.monotonic()
        if now >= self._next or received == self._total:
            self._next = now + 1.0
            seconds = now - self._started
            self._emit(StateDownload(source=self._donor, received=received, total=self._total, seconds=seconds))
        began, had = self._since = self._since or (now, received)
        if now - began >= self._window:
            rate = (received - had) / (now - began)
            self._since = now, received
            if not self._goes_on(rate):
                raise TooSlow(f"it gives {rate / 1e3:.1f} kB/s: another may be faster")
