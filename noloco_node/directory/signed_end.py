"""The end of a run as origins have signed it: their last records, kept beyond the life of a record and handed on.

A key costs nothing, so a word counts only if it is the owner's, or of an origin with which this node has worked itself
and whose clock was near the target.
A node that slept or was away learns the end from any node or seed that has kept these words.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable, Collection, Iterable

import torch
from pydantic import TypeAdapter, ValidationError

from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.records import Directory, LiveRecord, PeerRecord, SignedRecord
from noloco_node.errors import UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.peer_table import PeerTable
from noloco_node.storage.run_folder import EndWord, RunFolder
from noloco_node.transport.calls import NOTHING, Method, Nothing, Reply, ask, on
from noloco_node.transport.errors import Refused, TransportError
from noloco_node.transport.interface import Transport, Withdraw

logger = logging.getLogger(__name__)

HALF_WAY = 0.5
"""Share of the target before which no run is near its end."""
MOST_WORDS = 32
"""Words that are kept and handed on."""
MAX_TEXT_BYTES = 160 * 1024
ASK_SECONDS = 5.0
ASKED_AT_ONCE = 8
END = Method("hello.end", Nothing, Nothing, at_once=2, text_bytes=MAX_TEXT_BYTES)
"""The answer is a tensor u8 [bytes]: a list of `EndWord` in JSON."""
_WORDS = TypeAdapter(list[EndWord])


def near_from(target: float, max_lag: float) -> float:
    """The clock beyond which others may have come to the target, by the lag that clocks may have; all in tokens. A run
    so short that this is less than half of it begins its end half-way."""
    return max(HALF_WAY * target, target - max_lag)


class SignedEnd:
    """What one node or seed has of the run's end."""

    def __init__(
        self, transport: Transport, directory: Directory, spec: RunSpec, entrances: Collection[PeerId] = ()
    ) -> None:
        self._transport = transport
        self._directory = directory
        self._owner = spec.access.owner
        self._near_from = near_from(spec.inner.target_tokens, spec.max_lag_tokens)
        self._entrances = entrances
        self._words: dict[PeerId, tuple[PeerRecord, EndWord]] = {}
        self.origins = PeerTable[PeerId, None](MOST_WORDS)
        """Origins with which this node has worked, in this life or an earlier one, those of late last."""
        self._named: Collection[PeerId] = ()
        self._keep: Callable[[tuple[EndWord, ...]], None] = lambda _words: None

    def kept_in(self, folder: RunFolder, spec: RunSpec) -> None:
        """Go on with the words that a run folder has, and keep there what comes."""

        def keep(words: tuple[EndWord, ...]) -> None:
            try:
                folder.keep_end(spec.run_id, spec.name, words)
            except UserError as error:
                logger.warning("it is not written down that origins have signed the run's end: %s", error.message)

        try:
            kept = folder.end(spec.run_id)
        except UserError:  # it cannot be read
            kept = ()
        self._take(kept)
        self._keep = keep

    def counts(self, peer: PeerId) -> bool:
        """Whether a peer's word is kept."""
        known = peer in (self._transport.peer_id, self._owner) or peer in self.origins or peer in self._named
        return known or self._transport.peer_stats.has_worked(peer)

    def worked(self, peer: PeerId, *, left: bool) -> None:
        """This node has worked with an origin. One that `left` without a word has none in the run's end."""
        if left:
            self.origins.pop(peer, None)
        else:
            self.origins[peer] = None

    def records(self) -> list[PeerRecord]:
        """The words as records; the lives of most are over."""
        return [record for record, _ in self._words.values()]

    @property
    def known(self) -> bool:
        """Whether the owner has signed the end, or more than half of the origins with which this node has worked."""
        signed = sum(origin in self._words for origin in self.origins)
        return (self._owner is not None and PeerId(self._owner) in self._words) or 2 * signed > len(self.origins)

    @property
    def may_be(self) -> bool:
        """Whether others may be believed that say so: an origin that it has worked with agrees, or it knows none."""
        return not self.origins or any(origin in self._words for origin in self.origins)

    def look(self, named: Collection[PeerId] = ()) -> None:
        """Take in what the directory shows. `named`: origins whose microbatches this node has trained, as their senders
        say. Their words are kept, and decide nothing here: a sender may name as many free keys as it likes."""
        self._named = named
        view = self._directory.view
        rows = view.stages[0].values() if view.stages else ()
        self.take(map(end_word, (row for row in rows if row.record.finished)))

    def own(self) -> None:
        """Take in this node's own last record."""
        rows = self._directory.to_tell(1)
        mine = [row for row in rows if row.peer == self._transport.peer_id and row.stage == 0]
        self.take(EndWord(peer=r.peer, expires=r.expires, level=r.level, signed=_text(r.signed)) for r in mine)

    def take(self, words: Iterable[EndWord]) -> None:
        """Take in those that count and say that the run is over, as their signatures show."""
        before = len(self._words)
        self._take(word for word in words if self.counts(PeerId(word.peer)))
        if len(self._words) > before:
            self._keep(tuple(word for _, word in self._words.values()))

    def _take(self, words: Iterable[EndWord]) -> None:
        for word in words:
            peer = PeerId(word.peer)
            if peer in self._words or len(self._words) >= MOST_WORDS:
                continue
            record = self._directory.read(_row(word))
            if record is not None and record.finished and (peer == self._owner or record.clock > self._near_from):
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
            answer = await ask(self._transport, peer, END, NOTHING, seconds=ASK_SECONDS)
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
