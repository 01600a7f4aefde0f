"""Activations and their gradients as they travel between stages (`pipeline.activations`).

fp32, bf16 and fp16 are rounded numbers. int8 has a scale of its own for every `INT8_BLOCK` numbers of a token: what one
block holds spoils no other, and no token any other. A token's codes come first, then its scales in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from noloco_node.config.run_spec import INT8_BLOCK, ActivationCodec, token_bytes

STEPS = 127
"""Codes go from minus so many to plus so many."""

DTYPES: dict[ActivationCodec, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.uint8,
}
"""Of what travels."""


def carried_dtype(allowed: tuple[ActivationCodec, ...]) -> torch.dtype:
    """In which activations are held on the host: the widest that may travel, fp32 where only codes may."""
    return torch.float32 if allowed[0] == "int8" else DTYPES[allowed[0]]


def encode(tensor: Tensor, codec: ActivationCodec) -> Tensor:
    """Finite numbers [..., n] on the host as they travel; itself where it needs no change. What fp16 cannot hold is
    its largest number."""
    if codec == "int8":
        return _to_codes(tensor)
    if codec == "fp16" and tensor.dtype != torch.float16:
        largest = torch.finfo(torch.float16).max
        tensor = tensor.clamp(-largest, largest)
    return tensor.to(DTYPES[codec])


def decode(wire: Tensor, codec: ActivationCodec, dtype: torch.dtype) -> Tensor:
    """The numbers again. From codes of a liar they may be NaN or infinite, as they may be with any codec."""
    return _from_codes(wire).to(dtype) if codec == "int8" else wire.to(dtype)


def wire_length(numbers: int, codec: ActivationCodec) -> int:
    """Elements of `DTYPES[codec]` that so many numbers of a token become."""
    return token_bytes(numbers, codec) // DTYPES[codec].itemsize


def there_and_back(tensor: Tensor, codec: ActivationCodec) -> Tensor:
    """What arrives of a tensor, in its own precision."""
    return tensor if tensor.dtype == DTYPES[codec] else decode(encode(tensor, codec), codec, tensor.dtype)


def _to_codes(tensor: Tensor) -> Tensor:
    numbers = tensor.shape[-1]
    whole = F.pad(tensor.to(torch.float32), (0, -numbers % INT8_BLOCK))
    blocks = whole.reshape(*whole.shape[:-1], -1, INT8_BLOCK)
    scales = (blocks.abs().amax(-1) / STEPS).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (blocks / scales.unsqueeze(-1)).round_().clamp_(-STEPS, STEPS).to(torch.int8)
    return torch.cat((codes.flatten(-2)[..., :numbers].view(torch.uint8), scales.view(torch.uint8)), -1)


def _from_codes(wire: Tensor) -> Tensor:
    numbers = _numbers_of(wire.shape[-1])
    scales = wire[..., numbers:].contiguous().view(torch.float32)
    codes = wire[..., :numbers].contiguous().view(torch.int8)
    whole = F.pad(codes.to(torch.float32), (0, -numbers % INT8_BLOCK))
    blocks = whole.reshape(*whole.shape[:-1], -1, INT8_BLOCK)
    return (blocks * scales.unsqueeze(-1)).flatten(-2)[..., :numbers]


def _numbers_of(length: int) -> int:
    """How many numbers a token of so many bytes holds: each block takes up to `INT8_BLOCK` + 4."""
    return length - 4 * -(-length // (INT8_BLOCK + 4))
