"""The end of a run as origins have signed it: their last records, kept beyond the life of a record and handed on.

A key costs nothing, so a word counts only if it is the owner's, or of an origin that this node has itself seen at work
and whose clock was near the target.
A node that slept or was away learns the end from any node or seed that has kept these words.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from pydantic import TypeAdapter, ValidationError

from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.records import Directory, LiveRecord, PeerRecord, PeerState, SignedRecord
from noloco_node.errors import UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.storage.run_folder import EndWord, RunFolder
from noloco_node.transport.calls import ASKED_AT_ONCE, NOTHING, QUESTION_SECONDS, Method, Nothing, Reply, ask, on
from noloco_node.transport.errors import Refused, TransportError
from noloco_node.transport.interface import Transport, Withdraw

logger = logging.getLogger(__name__)

MOST_WORDS = 32
"""Words that are kept and handed on."""
END = Method("hello.end", Nothing, Nothing, at_once=2, text_bytes=160 * 1024)
"""The answer is a tensor u8 [bytes]: a list of `EndWord` in JSON."""
_WORDS = TypeAdapter(list[EndWord])


def near_from(target: float, max_lag: float) -> float:
    """The clock beyond which others may have come to the target, by the lag that clocks may have; all in tokens. A run
    so short that this is less than half of it begins its end half-way."""
    # Before half of its target no run is near its end.
    return max(0.5 * target, target - max_lag)


class SignedEnd:
    """What one node or seed knows of the run's end. Each of them asks it alone (`known`)."""

    def __init__(
        self, transport: Transport, directory: Directory, spec: RunSpec, entrances: Collection[PeerId] = ()
    ) -> None:
        self._transport = transport
        self._directory = directory
        self._owner = spec.access.owner
        self._near_from = near_from(spec.inner.target_tokens, spec.max_lag_tokens)
        self._life = spec.limits.record_seconds
        self._entrances = entrances
        self._words: dict[PeerId, tuple[PeerRecord, EndWord]] = {}
        self.origins: dict[PeerId, float] = {}
        """Origins that this node has seen at work, in this life or an earlier one, by when it saw them last (seconds
        since 1970)."""
        self._named: Mapping[PeerId, float] = {}
        self.ended = False
        """This node has come to the end, in this life or an earlier one. Nothing takes it back."""
        self._keep: Callable[[tuple[EndWord, ...]], None] = lambda _words: None

    def kept_in(self, folder: RunFolder, spec: RunSpec, clock: float | None = None) -> None:
        """Go on with what a run folder has of the end, and keep there what comes. `clock` (tokens) is that of the
        node's last checkpoint. One that is left without the first stage in the last tenth of a run ends as at its end,
        and must go on where that stage comes back."""

        def keep(words: tuple[EndWord, ...]) -> None:
            try:
                folder.keep_end(spec.run_id, spec.name, words)
            except UserError as error:
                logger.warning("it is not written down that origins have signed the run's end: %s", error.message)

        try:
            self.ended = folder.judge(spec.run_id, spec.name) and (clock is None or clock > self._near_from)
            kept = folder.end(spec.run_id)
        except UserError:  # it cannot be read, or is another run's
            kept = ()
        self._take(kept)
        self._keep = keep

    def seen_at_work(self, peer: PeerId, at: float) -> None:
        """An origin was at work at this time (seconds since 1970). Those that are known keep their places while they
        work: free keys, however many, push none of them out."""
        if peer not in self.origins and len(self.origins) >= MOST_WORDS:
            stalest = min(self.origins, key=self.origins.__getitem__)
            if at - self.origins[stalest] <= self._life:
                return
            del self.origins[stalest]
        self.origins[peer] = max(at, self.origins.get(peer, at))

    def records(self) -> list[PeerRecord]:
        """The words as records; the lives of most are over."""
        return [record for record, _ in self._words.values()]

    @property
    def known(self) -> str:
        """How this node knows that the run is over, for a person; empty where it does not.

        It has come to the end itself, the owner has signed the end, or more than half of the origins that were at work
        together at last. One that died long before the others has no part in the end.
        """
        if self.ended:
            return "this node has trained it to its end, and saved its weights"
        last = max(self.origins.values(), default=0.0)
        signed = [peer in self._words for peer, seen in self.origins.items() if last - seen <= self._life]
        if (self._owner is not None and PeerId(self._owner) in self._words) or 2 * sum(signed) > len(signed):
            return "so have most of the origins signed that this node has seen at work, or the run's owner"
        return ""

    @property
    def may_be(self) -> bool:
        """Whether others may be believed that say so: an origin that it has seen at work agrees, or it knows none."""
        return not self.origins or any(origin in self._words for origin in self.origins)

    def look(self, works: Callable[[PeerRecord], bool], named: Mapping[PeerId, float] | None = None) -> None:
        """Take in what the directory shows of stage 0. `works` says of which records this node knows by itself that
        they are of origins at work. An origin that has left without a word has none in the run's end.

        `named`: origins whose microbatches this node has trained, as their senders say, by the work behind that. Their
        words are kept and handed on, and decide nothing here: a sender may name as many free keys as it likes.
        """
        self._named = named or {}
        now, view = self._directory.now(), self._directory.view
        rows = [row for row in view.stages[0].values() if row.expires > now] if view.stages else []
        for record in (row.record for row in rows):
            if record.state is PeerState.GONE and not record.finished:
                self.origins.pop(PeerId(record.peer_id), None)
            elif works(record):
                self.seen_at_work(PeerId(record.peer_id), now)
        self.take(end_word(row) for row in rows if row.record.finished)

    def own(self) -> None:
        """Take in this node's own last record."""
        rows = self._directory.to_tell(1)
        mine = [row for row in rows if row.peer == self._transport.peer_id and row.stage == 0]
        self.take(EndWord(peer=r.peer, expires=r.expires, level=r.level, signed=_text(r.signed)) for r in mine)

    def take(self, words: Iterable[EndWord]) -> None:
        """Take in those that count and say that the run is over, as their signatures show."""
        before = list(self._words)
        self._take(word for word in words if self._weight(PeerId(word.peer)) > 0.0)
        if list(self._words) != before:
            self._keep(tuple(word for _, word in self._words.values()))

    def _weight(self, peer: PeerId) -> float:
        """What a peer's word counts where places are few; 0 for that of a stranger."""
        if peer in (self._transport.peer_id, self._owner) or peer in self.origins:
            return math.inf
        return self._named.get(peer, 0.0)

    def _take(self, words: Iterable[EndWord]) -> None:
        for word in words:
            peer = PeerId(word.peer)
            least = min(self._words, key=self._weight) if len(self._words) >= MOST_WORDS else None
            if peer in self._words or (least is not None and self._weight(peer) <= self._weight(least)):
                continue
            record = self._directory.read(_row(word))
            if record is not None and record.finished and (peer == self._owner or record.clock > self._near_from):
                if least is not None:
                    del self._words[least]
                self._words[peer] = record, word

    async def ask(self, peers: Iterable[PeerId]) -> None:
        """Ask peers for the words that they have kept. Never raises for them; an older release has none."""
        some = [peer for peer in dict.fromkeys(peers) if peer != self._transport.peer_id][:ASKED_AT_ONCE]
        for words in await asyncio.gather(*map(self._asked, some)):
            self.take(words)

    async def ask_around(self) -> None:
        """Ask the peers by which this node came in, and some that the directory shows."""
        seen = self._directory.view.everyone(self._directory.now())
        await self.ask([*self._entrances, *(PeerId(record.peer_id) for record in seen)])

    async def _asked(self, peer: PeerId) -> list[EndWord]:
        try:
            answer = await ask(self._transport, peer, END, NOTHING, seconds=QUESTION_SECONDS)
            return _WORDS.validate_json(answer.tensors[0].numpy().tobytes())[:MOST_WORDS]
        except (Refused, TransportError, ValidationError) as error:
            logger.debug("%s tells no words of the run's end: %r", peer, error)
            return []

    def serve(self) -> Withdraw:
        """Hand the words to any peer that asks, from now on."""

        async def handle(_peer: PeerId, _request: Nothing) -> Reply[Nothing]:
            text = _WORDS.dump_json([word for _, word in self._words.values()])
            return Reply(NOTHING, (torch.frombuffer(bytearray(text), dtype=torch.uint8),))

        return on(self._transport, END, handle)


def end_word(row: LiveRecord) -> EndWord:
    """What is kept of a record."""
    return EndWord(peer=row.record.peer_id, expires=row.expires, level=row.level, signed=_text(row.signed))


def _text(signed: bytes) -> str:
    return base64.b64encode(signed).decode()


def _row(word: EndWord) -> SignedRecord:
    try:
        signed = base64.b64decode(word.signed, validate=True)
    except binascii.Error:
        signed = b""
    return SignedRecord(0, PeerId(word.peer), word.expires, signed, word.level)
