"""Precision of the exchanged tensor on the wire. Any codec keeps the mean over replicas (see `replica.py`)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

CodecName = Literal["fp32", "fp16"]

WIRE_DTYPE: dict[CodecName, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16}

_FP16_MAX = 65504.0


def encode(values: Tensor, codec: CodecName) -> Tensor:
    """fp32 values as they travel. fp16 saturates instead of overflowing; NaN stays NaN and is found by the receiver."""
    if codec == "fp16":
        return values.clamp(-_FP16_MAX, _FP16_MAX).to(torch.float16)
    return values


def decode(wire: Tensor) -> Tensor:
    """What arrived, as fp32."""
    return wire.to(torch.float32)
