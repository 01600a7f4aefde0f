"""All parameters of a stage as one flat vector, and the precisions (`inner.precision`) in which it is kept and used."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from noloco_node.config.run_spec import ActivationCodec, PrecisionName

Kind = Literal["embedding", "matrix", "head", "vector"]
"""What a parameter is to the optimizer: the table of token embeddings, the head, another matrix, or a norm or bias."""


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """One parameter's place in the vector."""

    name: str
    offset: int
    shape: torch.Size

    @property
    def end(self) -> int:
        """One past its last element."""
        return self.offset + self.shape.numel()

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies to it: to two or more dimensions."""
        return len(self.shape) >= 2

    @property
    def kind(self) -> Kind:
        """By its dimensions and its name."""
        return kind_of(self.name, len(self.shape))


def kind_of(name: str, dimensions: int) -> Kind:
    """The kind of a parameter by its name, in a stage or in the whole model."""
    if dimensions < 2:
        return "vector"
    module = name.removesuffix(".weight").rpartition(".")[2]
    return "embedding" if module == "embed_tokens" else "head" if module == "lm_head" else "matrix"


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Order of the parameters: first those that weight decay applies to (two or more dimensions), then the others.

    Both groups are contiguous, so that an optimizer sees two tensors instead of hundreds.
    """

    entries: tuple[LayoutEntry, ...]
    decayed: int
    """Elements of the first group."""
    size: int

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> FlatLayout:
        """The layout of a stage's named parameters; their order within a group is kept."""
        matrices = {name: p for name, p in parameters.items() if p.dim() >= 2}
        vectors = {name: p for name, p in parameters.items() if p.dim() < 2}
        entries: list[LayoutEntry] = []
        offset = 0
        for name, parameter in (*matrices.items(), *vectors.items()):
            entries.append(LayoutEntry(name, offset, parameter.shape))
            offset += parameter.numel()
        return cls(tuple(entries), sum(p.numel() for p in matrices.values()), offset)

    def flatten(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """A new fp32 vector [size] of the parameters."""
        return torch.cat([parameters[entry.name].detach().reshape(-1).to(torch.float32) for entry in self.entries])

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters as views into a vector [size], in layout order."""
        return {entry.name: flat[entry.offset : entry.end].view(entry.shape) for entry in self.entries}

    def contract(self, *details: str) -> str:
        """Hash of order, names, shapes and further details: equal where vectors may be averaged."""
        digest = hashlib.blake2b(digest_size=16)
        for entry in self.entries:
            digest.update(f"{entry.name}:{tuple(entry.shape)};".encode())
        for detail in details:
            digest.update(f"|{detail}".encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Precision:
    """One of `PRECISIONS`. Slow weights and all else of the outer step stay fp32 whatever it is."""

    masters: torch.dtype
    """Type of the weights that the optimizer changes, of its moments, and of the gradient that accumulates."""
    published: torch.dtype
    """Type of the copies that forward and backward use, and of the activations that come in."""
    autocast: bool = False
    """Whether products are computed in bf16 although all tensors are fp32."""

    @property
    def computed(self) -> torch.dtype:
        """The type of what goes into products."""
        return torch.bfloat16 if self.autocast else self.published

    def computing(self, device: torch.device) -> AbstractContextManager[object]:
        """The context of a forward on `device`; backward needs none."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.autocast)


PRECISIONS: dict[PrecisionName, Precision] = {
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16),
    "bf16-mixed": Precision(torch.float32, torch.float32, autocast=True),
    "bf16-pure": Precision(torch.bfloat16, torch.bfloat16),
}

NUMBERS: dict[ActivationCodec, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Codecs of activations that are rounded numbers, and their types. Others are codes."""


def carried_dtype(allowed: tuple[ActivationCodec, ...]) -> torch.dtype:
    """In which activations are held on the host: the widest that may travel, fp32 where only codes may."""
    return NUMBERS.get(allowed[0], torch.float32)
