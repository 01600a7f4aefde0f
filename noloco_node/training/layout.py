"""All parameters of a stage as one flat vector."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

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
