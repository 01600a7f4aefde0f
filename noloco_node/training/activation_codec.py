"""Activations and their gradients as they travel between stages (`pipeline.activations`).

fp32, bf16 and fp16 are rounded numbers. int8 has a scale of its own for every `INT8_BLOCK` numbers of a token: what one
block holds spoils no other, and no token any other. A token's codes come first, then its scales in fp32.

int4 rotates each block of `INT4_BLOCK` numbers by a fixed matrix. Whatever they are, they look Gaussian then, and none
is much larger than the others. A dither by the number's place is added before rounding and taken off afterwards. The
error depends on no number then, and a peer, its jurors and its repeats make the same codes of the same activations. A
token's codes come first, two to a byte, then its scales in bf16.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from noloco_node.config.run_spec import INT4_BLOCK, INT8_BLOCK, ActivationCodec, token_bytes
from noloco_node.outer.modulo_codes import signs

STEPS = 127
"""Codes of int8 go from minus so many to plus so many."""
INT4_STEPS = 7
"""The largest number of a rotated block is so many steps of int4."""
_HALF = INT4_BLOCK // 2
_PERIOD = 1 << 16
_WEYL, _NEXT_TOKEN = 40503, 27571
"""Odd numbers: by them the dither goes on from a number to the next, and from a token to the next."""

DTYPES: dict[ActivationCodec, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.uint8,
    "int4": torch.uint8,
}
"""Type of what travels, by the codec's name."""


def carried_dtype(allowed: tuple[ActivationCodec, ...]) -> torch.dtype:
    """In which activations are held on the host: the widest that may travel, fp32 where only codes may."""
    return torch.float32 if DTYPES[allowed[0]] == torch.uint8 else DTYPES[allowed[0]]


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
    first = torch.arange(tokens, dtype=torch.int64).mul_(_NEXT_TOKEN).remainder_(_PERIOD).to(torch.float32)
    within = torch.arange(numbers, dtype=torch.int64).mul_(_WEYL).remainder_(_PERIOD).to(torch.float32)
    return (first[:, None] + within).remainder_(_PERIOD).div_(_PERIOD)
