"""How activations travel on each link: the codec, of those that the run allows, is chosen by the time that carrying
takes.

A link is quick enough for a codec if carrying a microbatch and its gradient takes little beside the work at the other
end. Then the device limits the training, and nothing is won by sending less. The time of carrying is the sender's own
clock less what the answer says of the work. A peer that lies there gets wider or narrower codes, and harms nobody. Time
beyond the least of late is waiting: other transfers were on the same link, at either end.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.config.run_spec import INT8_BLOCK, ActivationCodec, token_bytes
from noloco_node.identity.peer_id import PeerId
from noloco_node.pauses import moved
from noloco_node.peers.scorecard import PeerBook
from noloco_node.training.activation_codec import DTYPES, decode, encode
from noloco_node.transport.frames import BODY_FRAME_BYTES

CARRIED_SHARE = 1 / 4
"""A link is quick enough if carrying takes at most this share of the time that the work takes."""
PROBES = 1 / 32
"""This share of microbatches goes by another codec than the link's own, to measure what that one takes now. They also
hide which microbatches are copies for an audit, since those go by the codec of the first."""
LONGER = 1 / 256
"""The least time of carrying grows by this part towards the latest time. A way that has become longer is believed after
some hundreds of microbatches. A way that only has more traffic is found free now and then by that time."""
ASK_FIRST_SECONDS = 0.25
"""A peer is asked before the bytes of a microbatch go if these take longer to come to it. To ask takes a round trip,
which is less. A peer that is full refuses only when they have crossed the line, and then they cross it again."""
INLINE_NUMBERS = 1 << 15
"""So many numbers are coded on the event loop (0.2 ms); more are coded beside it."""


class LinkCodecs:
    """One sender's view of its links to the next stage."""

    def __init__(self, allowed: Sequence[ActivationCodec], rng: random.Random, book: PeerBook | None = None) -> None:
        """`allowed`: from wide to narrow."""
        self._allowed = tuple(allowed)
        self._bytes: dict[ActivationCodec, int] = {codec: token_bytes(INT8_BLOCK, codec) for codec in self._allowed}
        self._rng = rng
        self._book = book or PeerBook()

    @property
    def widest(self) -> ActivationCodec:
        """What evaluations travel by, wherever they go: they measure the model."""
        return self._allowed[0]

    def choose(self, peer: PeerId) -> ActivationCodec:
        """The codec of the next microbatch for `peer`."""
        if len(self._allowed) == 1:
            return self._allowed[0]
        if self._rng.random() < PROBES:
            return self._rng.choice(self._allowed)
        link = self._book.of(peer).hop
        if link is None or not link.carrying:
            return self._allowed[-1]
        return codec_for(self._bytes, link.carrying, link.work)

    def asks_first(self, peer: PeerId, wire: Tensor, codec: ActivationCodec) -> bool:
        """Whether a microbatch takes so long to come to `peer`, which is half of there and back, that it asks first.

        A large one does if that is not known yet: the first ones of an origin go out together, and fill its line.
        """
        link = self._book.of(peer).hop
        seconds = None if link is None else link.carrying.get(codec)
        return wire.nbytes > BODY_FRAME_BYTES if seconds is None else seconds / 2 > ASK_FIRST_SECONDS

    def carried(self, peer: PeerId, codec: ActivationCodec, took: float, work: float | None) -> float:
        """A microbatch went to `peer` and its gradient came back after `took` seconds. Returns the seconds that it
        waited for the link.

        The peer says that its work took `work` seconds; None if it says nothing.
        """
        if work is None:
            return 0.0
        link = self._book.hop(peer)
        seconds, work = max(0.0, took - work), min(work, took)
        link.least[codec] = least_carrying(link.least.get(codec), seconds)
        link.work = moved(link.work if link.carrying else None, work)
        link.carrying[codec] = moved(link.carrying.get(codec), seconds)
        return seconds - link.least[codec]


def least_carrying(before: float | None, seconds: float) -> float:
    """The least seconds that carrying takes with nothing else on the way, after one took `seconds`.

    `before` is None for the first one.
    """
    return min(seconds, moved(before, seconds, LONGER))


def codec_for(
    sizes: Mapping[ActivationCodec, int], carrying: Mapping[ActivationCodec, float], work: float
) -> ActivationCodec:
    """The widest codec that a link is quick enough for, else the narrowest.

    `sizes` gives the bytes of each, from wide to narrow. `carrying` gives the seconds that each tried codec takes; at
    least one was tried. `work` is seconds at the other end. A codec that was not tried is taken to need time by its
    bytes, which is too much if the link is merely long.
    """
    for codec, size in sizes.items():
        near = sorted((abs(sizes[tried] - size), seconds / sizes[tried]) for tried, seconds in carrying.items())
        if near[0][1] * size <= CARRIED_SHARE * work:
            return codec
    return min(sizes, key=lambda codec: sizes[codec])


async def to_wire(tensor: Tensor, codec: ActivationCodec) -> Tensor:
    """Finite activations or gradients as they travel; itself where it needs no change."""
    if tensor.dtype == DTYPES[codec]:
        return tensor
    if tensor.numel() <= INLINE_NUMBERS:
        return encode(tensor, codec)
    return await ambient.elsewhere(encode, tensor, codec)


async def from_wire(wire: Tensor, codec: ActivationCodec, dtype: torch.dtype, width: int) -> Tensor:
    """What came, as numbers of this precision, `width` of each token; a liar's may be NaN or infinite."""
    if wire.dtype == dtype:
        return wire
    if wire.numel() <= INLINE_NUMBERS:
        return decode(wire, codec, dtype, width)
    return await ambient.elsewhere(decode, wire, codec, dtype, width)
