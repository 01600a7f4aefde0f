"""The ways to other peers: which go through a relay, and how quick stage peers' are. Pure but for the book's memory.

A relayed or slow way is asked less where there is another, and never not at all: it may be quicker by now.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from noloco_node.identity.peer_id import PeerId
from noloco_node.peer_table import PeerTable

RELAYED_WEIGHT = 1 / 4
"""The weight of a peer behind a relay, in the choice beside peers that are connected directly."""
LEAST_WEIGHT = 1 / 8
"""The least weight of a stage peer with a slow way, relayed or not."""
TOLERANCE = 1.5
"""A way is slow if a byte takes more than so many times as long as for the quicker half of the stage peers. Its weight
falls as the square of the excess."""
OF_AN_EXCHANGE = 1 / 4
"""The latest exchange has this weight in the moving average of a way's seconds per byte."""
REMEMBERED_SECONDS = 900.0
"""After so many seconds a way is tried like any other."""
STAGE_PEERS_REMEMBERED = 1024


class _Way(NamedTuple):
    seconds_per_byte: float
    at: float


class PeerWays:
    """What one replica's exchanges took. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._ways = PeerTable[PeerId, _Way](STAGE_PEERS_REMEMBERED)

    def exchanged(self, stage_peer: PeerId, seconds: float, sent_and_received: int, now: float) -> None:
        """An exchange with a stage peer took so long, for so many bytes both ways together."""
        if sent_and_received <= 0:
            return
        taken, before = seconds / sent_and_received, self._ways.get(stage_peer)
        if before is not None and now - before.at < REMEMBERED_SECONDS:
            taken = before.seconds_per_byte + OF_AN_EXCHANGE * (taken - before.seconds_per_byte)
        self._ways[stage_peer] = _Way(taken, now)

    def weights(self, stage_peers: Sequence[PeerId], relayed: Collection[PeerId], now: float) -> list[float]:
        """How often to choose each of the stage peers, in their order."""
        known = {
            stage_peer: way.seconds_per_byte
            for stage_peer in stage_peers
            if (way := self._ways.get(stage_peer)) is not None and now - way.at < REMEMBERED_SECONDS
        }
        return way_weights(
            [known.get(stage_peer) for stage_peer in stage_peers], [stage_peer in relayed for stage_peer in stage_peers]
        )


def way_weights(seconds_per_byte: Sequence[float | None], relayed: Sequence[bool]) -> list[float]:
    """How often to choose each way, beside 1 for a direct and quick one; None is not known, and so not slow.

    If all ways are relayed, that says nothing. The quicker half of the known ways says what is slow.
    """
    known = sorted(each for each in seconds_per_byte if each is not None)
    quick = TOLERANCE * known[(len(known) - 1) // 2] if known else 0.0
    beside_direct = not all(relayed)
    weights: list[float] = []
    for seconds, through_relay in zip(seconds_per_byte, relayed, strict=True):
        slow = seconds is not None and seconds > quick > 0.0
        weight = (quick / seconds) ** 2 if slow and seconds is not None else 1.0
        weight *= RELAYED_WEIGHT if through_relay and beside_direct else 1.0
        weights.append(max(LEAST_WEIGHT, weight))
    return weights


def share_of_relayed(relayed: int, direct: int) -> float:
    """How many of the choices go to relayed peers beside direct ones."""
    return RELAYED_WEIGHT * relayed / (RELAYED_WEIGHT * relayed + direct)
