"""How activations and their gradients travel between stages: their codes, and the codec that each link gets.

fp32, bf16 and fp16 are rounded numbers. int8 has a scale of its own for every `INT8_BLOCK` numbers of a token: what one
block holds spoils no other, and no token any other. A token's codes come first, then its scales in fp32.

int4 rotates each block of `INT4_BLOCK` numbers by a fixed matrix. Whatever they are, they look Gaussian then, and none
is much larger than the others. A dither by the number's place is added before rounding and taken off afterwards. The
error depends on no number then, and a peer, its jurors and its repeats make the same codes of the same activations. A
token's codes come first, two to a byte, then its scales in bf16.

The codec of a link, of those that the run allows (`pipeline.activations`), is chosen by the time that carrying takes. A
link is quick enough for a codec if carrying a microbatch and its gradient takes little beside the work at the other
end. Then the device limits the training, and nothing is won by sending less. The time of carrying is the sender's own
clock less what the answer says of the work. A peer that lies there gets wider or narrower codes, and harms nobody. Time
beyond the least of late is waiting: other transfers were on the same link, at either end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from noloco_node import ambient
from noloco_node.config.run_spec import INT4_BLOCK, INT8_BLOCK, ActivationCodec, token_bytes
from noloco_node.finite import INLINE_ELEMENTS
from noloco_node.identity.peer_id import PeerId
from noloco_node.outer.modulo_codes import DITHER_LEVELS, WEYL, signs
from noloco_node.peers.hop import ASK_SECONDS
from noloco_node.peers.scorecard import PeerBook
from noloco_node.tallies import moved
from noloco_node.training.trainer import NUMBERS
from noloco_node.transport.messages import BODY_FRAME_BYTES

STEPS = torch.iinfo(torch.int8).max
"""Codes of int8 go from minus so many to plus so many."""
INT4_STEPS = 7
"""The largest number of a rotated block is so many steps of int4."""
_HALF = INT4_BLOCK // 2
_NEXT_TOKEN = 27571
"""An odd number by which the dither goes on from a token to the next, as by `WEYL` from a number to the next."""

INLINE_NUMBERS = INLINE_ELEMENTS // 8
"""The count of numbers that are coded on the event loop, which takes 0.2 ms; more are coded beside it."""
DTYPES: dict[ActivationCodec, torch.dtype] = {**NUMBERS, "int8": torch.uint8, "int4": torch.uint8}
"""Type of what travels, by the codec's name."""

CARRIED_SHARE = 1 / 4
"""A link is quick enough if carrying takes at most this share of the time that the work takes."""
PROBES = 1 / 32
"""This share of microbatches goes by another codec than the link's own, to measure what that one takes now. They also
hide which microbatches are copies for an audit, since those go by the codec of the first."""
LONGER = 1 / 256
"""The least time of carrying grows by this part towards the latest time. A way that has become longer is believed after
some hundreds of microbatches. A way that only has more traffic is found free now and then by that time."""


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
        if len(self._allowed) == 1:
            return self._allowed[0]
        if self._rng.random() < PROBES:
            return self._rng.choice(self._allowed)
        link = self._book.of(peer).hop
        if link is None or not link.carrying:
            return self._allowed[-1]
        return codec_for(self._bytes, link.carrying, link.work)

    def asks_first(self, peer: PeerId, wire: Tensor, codec: ActivationCodec) -> bool:
        """Whether a microbatch and its gradient take so long to cross the line that it asks first.

        A peer that is full refuses only when the bytes have crossed the line, and then they cross it again. To ask
        takes a round trip. A large one asks first if nothing is known yet: the first ones of an origin fill its line
        together.
        """
        link = self._book.of(peer).hop
        seconds = None if link is None else link.carrying.get(codec)
        return wire.nbytes > BODY_FRAME_BYTES if seconds is None else seconds > ASK_SECONDS

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


def encode(tensor: Tensor, codec: ActivationCodec) -> Tensor:
    """Finite numbers [..., n] on the host as they travel; itself where it needs no change. What fp16 cannot hold is
    its largest number."""
    if codec == "int8":
        return _to_codes(tensor)
    if codec == "int4":
        return _to_nibbles(tensor)
    if codec == "fp16" and tensor.dtype != torch.float16:
        largest = torch.finfo(torch.float16).max
        tensor = tensor.clamp(-largest, largest)
    return tensor.to(DTYPES[codec])


def decode(wire: Tensor, codec: ActivationCodec, dtype: torch.dtype, numbers: int) -> Tensor:
    """The numbers again, so many of each token. From codes of a liar they may be NaN or infinite, as they may be with
    any codec."""
    if codec == "int8":
        return _from_codes(wire, numbers).to(dtype)
    return (_from_nibbles(wire, numbers) if codec == "int4" else wire).to(dtype)


def wire_length(numbers: int, codec: ActivationCodec) -> int:
    """Elements of `DTYPES[codec]` that so many numbers of a token become."""
    return token_bytes(numbers, codec) // DTYPES[codec].itemsize


def there_and_back(tensor: Tensor, codec: ActivationCodec) -> Tensor:
    """What arrives of a tensor, in its own precision."""
    return (
        tensor
        if tensor.dtype == DTYPES[codec]
        else decode(encode(tensor, codec), codec, tensor.dtype, tensor.shape[-1])
    )


def _to_codes(tensor: Tensor) -> Tensor:
    numbers = tensor.shape[-1]
    whole = F.pad(tensor.to(torch.float32), (0, -numbers % INT8_BLOCK))
    blocks = whole.reshape(*whole.shape[:-1], -1, INT8_BLOCK)
    scales = (blocks.abs().amax(-1) / STEPS).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (blocks / scales.unsqueeze(-1)).round_().clamp_(-STEPS, STEPS).to(torch.int8)
    return torch.cat((codes.flatten(-2)[..., :numbers].view(torch.uint8), scales.view(torch.uint8)), -1)


def _from_codes(wire: Tensor, numbers: int) -> Tensor:
    scales = wire[..., numbers:].contiguous().view(torch.float32)
    codes = wire[..., :numbers].contiguous().view(torch.int8)
    whole = F.pad(codes.to(torch.float32), (0, -numbers % INT8_BLOCK))
    blocks = whole.reshape(*whole.shape[:-1], -1, INT8_BLOCK)
    return (blocks * scales.unsqueeze(-1)).flatten(-2)[..., :numbers]


def _to_nibbles(tensor: Tensor) -> Tensor:
    numbers, tokens = tensor.shape[-1], tensor.shape[:-1]
    whole = F.pad(tensor.to(torch.float32), (0, -numbers % INT4_BLOCK)).reshape(-1, INT4_BLOCK)
    turned = whole @ _rotation()
    tallest = turned.abs().amax(-1, keepdim=True)
    scales = (tallest / INT4_STEPS).clamp_min(torch.finfo(torch.float32).tiny).to(torch.bfloat16)
    rows = turned.div_(scales).view(math.prod(tokens), -1)
    codes = rows.add_(_dither(*rows.shape)).floor_().add_(INT4_STEPS).clamp_(0, 15).to(torch.uint8).view(-1, INT4_BLOCK)
    packed = codes[:, :_HALF] | codes[:, _HALF:] << 4
    return torch.cat((packed.view(*tokens, -1), scales.view(torch.uint8).view(*tokens, -1)), -1)


def _from_nibbles(wire: Tensor, numbers: int) -> Tensor:
    tokens, blocks = wire.shape[:-1], -(-numbers // INT4_BLOCK)
    packed = wire[..., : blocks * _HALF].reshape(-1, _HALF)
    scales = wire[..., blocks * _HALF :].contiguous().view(torch.bfloat16).reshape(-1, 1)
    rows = torch.cat((packed & 15, packed >> 4), -1).to(torch.float32).view(math.prod(tokens), -1)
    turned = rows.sub_(_dither(*rows.shape)).sub_(INT4_STEPS - 0.5).view(-1, INT4_BLOCK).mul_(scales)
    return (turned @ _rotation().T).view(*tokens, -1)[..., :numbers]


@cache
def _rotation() -> Tensor:
    """Random signs and a Hadamard transform, orthonormal: fp32 [64, 64], rotated = row @ matrix."""
    matrix = torch.ones(1, 1)
    while len(matrix) < INT4_BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return signs(_NEXT_TOKEN)[:INT4_BLOCK, None] * matrix / math.sqrt(INT4_BLOCK)


def _dither(tokens: int, numbers: int) -> Tensor:
    """In [0, 1), by the place of the token and of the number in it: fp32 [tokens, numbers], evenly spread."""
    first = torch.arange(tokens, dtype=torch.int64).mul_(_NEXT_TOKEN).remainder_(DITHER_LEVELS).to(torch.float32)
    within = torch.arange(numbers, dtype=torch.int64).mul_(WEYL).remainder_(DITHER_LEVELS).to(torch.float32)
    return (first[:, None] + within).remainder_(DITHER_LEVELS).div_(DITHER_LEVELS)
