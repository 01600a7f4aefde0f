"""Records told over own links: a call in which two nodes tell each other their own newest signed record and a few more.

The DHT introduces; it must not decide. Even if all its neighbours there are hostile, nodes with links to each other see
each other by this call. They also see all peers that one of them has met. An answer alone shows that a peer is there.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from noloco_node import PROTOCOL_VERSION, ambient
from noloco_node.directory.buckets import MOST_LEVEL
from noloco_node.directory.records import FIRST_LOOK_SECONDS, Directory, SignedRecord
from noloco_node.directory.validator import MAX_SIGNED_BYTES
from noloco_node.identity.peer_id import PeerId
from noloco_node.tallies import PeerTimes
from noloco_node.transport.calls import QUESTION_SECONDS, Method, call, on
from noloco_node.transport.errors import Refusal, Refused, TransportError
from noloco_node.transport.interface import Transport, Withdraw
from noloco_node.transport.messages import ProtocolVersion, RunName, StageIndex, WireModel, check_run

MOST_TOLD = 12
"""A message tells at most so many records, the teller's own included: what a header holds, and few enough to check at
once."""
FEW_TOLD = 1
"""The number of records told to a peer that has said before what it serves: the own one, which goes from either to the
other each time. It hears of others by the DHT and by all the peers that call it."""
MAX_SIGNED_TEXT = 4 * (-(-MAX_SIGNED_BYTES // 3))
"""The longest signed text, in characters of base64."""


class ToldRecord(WireModel):
    """A signed record as it travels."""

    stage: StageIndex
    peer: Annotated[str, Field(min_length=10, max_length=128)]
    expires: Annotated[float, Field(gt=0.0, le=1e12, allow_inf_nan=False)]
    """DHT time, seconds."""
    signed: Annotated[str, Field(max_length=MAX_SIGNED_TEXT)]
    level: Annotated[int, Field(ge=0, le=MOST_LEVEL)] = 0
    """The level of the bucket that it was signed for; it does not travel if that is the whole stage's."""

    @model_serializer(mode="wrap")
    def _brief(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        written: dict[str, object] = write(self)
        return written if self.level else {name: value for name, value in written.items() if name != "level"}


class RecordsMessage(WireModel):
    """Request and answer alike: the sender's own record first, if it has published one, then others that it knows."""

    run: RunName
    protocol: ProtocolVersion = PROTOCOL_VERSION
    stage: StageIndex | None = None
    """The one that the sender serves."""
    records: Annotated[list[ToldRecord], Field(max_length=MOST_TOLD, default_factory=list)]
    wanted: Annotated[int, Field(ge=1, le=1024)] = MOST_TOLD
    """The sender would be told at most so many records. A later release may ask for more than go into a message.

    The field does not travel if it is as many as go in.
    """

    @model_serializer(mode="wrap")
    def _brief(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        written: dict[str, object] = write(self)
        return {name: value for name, value in written.items() if name != "wanted" or value != MOST_TOLD}


RECORDS = Method("records", RecordsMessage, RecordsMessage)


@dataclass(frozen=True, slots=True)
class ToldRecords:
    """What came of telling a peer."""

    answered: bool
    """A refusal is an answer."""
    stage: int | None = None
    """The stage of the run that it serves, as it says; None where it serves another run or version, or refused."""
    named: tuple[PeerId, ...] = ()
    """The peers whose records it told."""


def serve_records(
    transport: Transport, run_id: str, directory: Directory, stage: Callable[[], int | None] = lambda: None
) -> Withdraw:
    """Answer `records` from now on: take in what the caller tells, and tell it what this node knows. `stage` gives the
    one that this node serves when it is asked."""

    told_all = PeerTimes[PeerId]()
    # A peer that never says what it serves is told a full message once in a newcomer's first look. Otherwise it would
    # get a hundred times the bytes that it sends, for as long as it likes.

    def to_be_told(peer: PeerId, wanted: int) -> int:
        wanted = min(wanted, MOST_TOLD)
        if transport.peer_stats.takes_part(peer):
            return FEW_TOLD
        now = ambient.monotonic()
        told_all.expire(now)
        if told_all.holds(peer, now):
            return FEW_TOLD
        told_all[peer] = now + FIRST_LOOK_SECONDS
        return wanted

    async def handle(peer: PeerId, told: RecordsMessage) -> RecordsMessage:
        check_run(told.run, run_id, told.protocol)
        # a peer that tells many has few ways to hear: records grow old there
        most = max(to_be_told(peer, told.wanted), len(told.records))
        transport.peer_stats.said(peer, told.stage)
        directory.told(peer, _unpacked(told.records))
        return _packed(run_id, stage(), directory.to_tell(most))

    return on(transport, RECORDS, handle)


async def tell(
    transport: Transport,
    peer: PeerId,
    run_id: str,
    directory: Directory,
    *,
    stage: int | None = None,
    most: int = MOST_TOLD,
    timeout: float = QUESTION_SECONDS,
) -> ToldRecords:
    """Tell a peer this node's `stage`, its own record and others, and take in its answer within `timeout` seconds.

    At most `most` records are told in all. Never raises for the peer.
    """
    request = _packed(run_id, stage, directory.to_tell(most), wanted=most)
    try:
        told = await call(transport, peer, RECORDS, request, seconds=timeout)
    except Refused as refused:
        if refused.reason in (Refusal.WRONG_RUN, Refusal.WRONG_PROTOCOL, Refusal.UNKNOWN_METHOD):
            transport.peer_stats.said(peer, None)
        return ToldRecords(answered=True)
    except TransportError:
        return ToldRecords(answered=False)
    ours = told.run == run_id and told.protocol == PROTOCOL_VERSION
    serves = told.stage if ours else None
    transport.peer_stats.said(peer, serves)
    if ours:
        directory.told(peer, _unpacked(told.records))
    return ToldRecords(answered=True, stage=serves, named=tuple(PeerId(record.peer) for record in told.records))


def _packed(run_id: str, stage: int | None, rows: Sequence[SignedRecord], *, wanted: int = MOST_TOLD) -> RecordsMessage:
    told = [
        ToldRecord(
            stage=row.stage,
            peer=row.peer,
            expires=row.expires,
            signed=base64.b64encode(row.signed).decode(),
            level=row.level,
        )
        for row in rows[:MOST_TOLD]
    ]
    return RecordsMessage(run=run_id, stage=stage, records=told, wanted=wanted)


def _unpacked(told: Sequence[ToldRecord]) -> list[SignedRecord]:
    """The records whose signed bytes are bytes at all; what is no base64 is passed over as any other bad record is."""
    rows: list[SignedRecord] = []
    for each in told:
        try:
            signed = base64.b64decode(each.signed, validate=True)
        except binascii.Error:
            continue
        rows.append(SignedRecord(each.stage, PeerId(each.peer), each.expires, signed, each.level))
    return rows
