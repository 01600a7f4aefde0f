"""How activations travel on each link, of the codecs that the run allows: by what carrying them takes.

A link is quick enough for a codec where carrying a microbatch and its gradient takes little beside what is done with
them at the other end: then the device is what limits the training, and nothing is won by sending less. What carrying
takes is the sender's own clock less what the answer says of the work. A peer that tells a lie there gets wider or
narrower codes, and harms nobody. What it takes beyond the least that it has taken of late is waiting: others were on
the way to the same link, at either end.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.config.run_spec import INT8_BLOCK, ActivationCodec, token_bytes
from noloco_node.identity.peer_id import PeerId
from noloco_node.peer_table import PeerTable
from noloco_node.training.activation_codec import DTYPES, decode, encode

CARRIED_SHARE = 1 / 4
"""Of the time that the work takes: what carrying may take for the link to be quick enough."""
OF_A_MICROBATCH = 1 / 8
"""Part of one microbatch in what a link usually takes."""
PROBES = 1 / 32
"""Share of microbatches that go by another codec than the link's own, so that it is known what that takes now. They
also hide which microbatches are copies for an audit, since those go by the codec of the first."""
LONGER = 1 / 256
"""Part of one microbatch by which the least that carrying takes grows towards what it takes: a way that has become
longer is believed after some hundreds, and one that only has more on it is found free now and then by then."""
LINKS_REMEMBERED = 1024
INLINE_NUMBERS = 1 << 15
"""So many are coded on the event loop (0.2 ms), more beside it."""


@dataclass(slots=True)
class _Link:
    carrying: dict[ActivationCodec, float] = field(default_factory=dict[ActivationCodec, float])
    least: dict[ActivationCodec, float] = field(default_factory=dict[ActivationCodec, float])
    work: float = 0.0


class LinkCodecs:
    """One sender's view of its links to the next stage."""

    def __init__(self, allowed: Sequence[ActivationCodec], rng: random.Random) -> None:
        """`allowed`: from wide to narrow."""
        self._allowed = tuple(allowed)
        self._bytes: dict[ActivationCodec, int] = {codec: token_bytes(INT8_BLOCK, codec) for codec in self._allowed}
        self._rng = rng
        self._links = PeerTable[PeerId, _Link](LINKS_REMEMBERED)

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
        link = self._links.get(peer)
        return self._allowed[-1] if link is None else codec_for(self._bytes, link.carrying, link.work)

    def carried(self, peer: PeerId, codec: ActivationCodec, took: float, work: float | None) -> float:
        """A microbatch went to `peer` and its gradient came back within so many seconds, of which the peer says that
        its work took `work`; None: it says nothing. Returns for how many of them it waited for the link."""
        if work is None:
            return 0.0
        link = self._links[peer] = self._links.get(peer) or _Link()
        seconds, work = max(0.0, took - work), min(work, took)
        link.least[codec] = least_carrying(link.least.get(codec), seconds)
        before = link.carrying.get(codec)
        link.work = work if not link.carrying else link.work + OF_A_MICROBATCH * (work - link.work)
        link.carrying[codec] = seconds if before is None else before + OF_A_MICROBATCH * (seconds - before)
        return seconds - link.least[codec]


def least_carrying(before: float | None, seconds: float) -> float:
    """What carrying takes at the least, where nothing else is on the way, now that one took so many `seconds`; None:
    that one is the first."""
    return seconds if before is None else min(seconds, before + LONGER * (seconds - before))


def codec_for(
    sizes: Mapping[ActivationCodec, int], carrying: Mapping[ActivationCodec, float], work: float
) -> ActivationCodec:
    """The widest codec that a link is quick enough for, else the narrowest. `sizes`: bytes of each, from wide to
    narrow; `carrying`: seconds that it takes with those that were tried, at least one; `work`: seconds at the other
    end. What was not tried is taken to need time by its bytes, which is too much where the link is merely long."""
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


async def from_wire(wire: Tensor, codec: ActivationCodec, dtype: torch.dtype) -> Tensor:
    """What came, as numbers of this precision; a liar's may be NaN or infinite."""
    if wire.dtype == dtype:
        return wire
    if wire.numel() <= INLINE_NUMBERS:
        return decode(wire, codec, dtype)
    return await ambient.elsewhere(decode, wire, codec, dtype)
