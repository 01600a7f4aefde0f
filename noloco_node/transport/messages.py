"""What travels between peers: a header, a small JSON object, and tensors of the few dtypes that have a name here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

JsonObject = Mapping[str, Any]

WIRE_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
}
"""The dtypes by their names on the wire. Nothing else can be sent."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in WIRE_DTYPES.items()}

MAX_HEADER_BYTES = 64 * 1024
MAX_TENSORS = 16
MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype name and shape of a tensor on the wire."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return prod(self.shape) * WIRE_DTYPES[self.dtype].itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor; KeyError for a dtype that has no name on the wire."""
        return cls(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


@dataclass(frozen=True, slots=True)
class Message:
    """A header and its tensors (contiguous, on the CPU, of a wire dtype)."""

    header: JsonObject = field(default_factory=dict[str, Any])
    tensors: tuple[torch.Tensor, ...] = ()
    parsed: object = None
    """What the admission has parsed a request's header into. It does not travel."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the tensors in order."""
        return specs_of(self.tensors)


def specs_of(tensors: Sequence[torch.Tensor]) -> tuple[TensorSpec, ...]:
    """The spec of each tensor, in order."""
    return tuple(map(TensorSpec.of, tensors))
