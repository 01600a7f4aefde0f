"""The divergence gauge: the spread of the weights across replicas, estimated from a few coordinates."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

SHARE_OF_STAGE = 512


def gauge_coordinates(seed: str, size: int, count: int) -> Tensor:
    """Coordinates (int64, drawn with replacement) of a vector of `size` weights, the same for all that know `seed`.

    They are at most 1/512 of the weights, so that in fp32 the gauge stays a small part of an exchange, by signs as
    well.
    """
    count = max(1, min(count, size // SHARE_OF_STAGE))
    digest = hashlib.blake2b(seed.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randint(size, (count,), generator=generator)


def spread(own: Tensor, other: Tensor) -> float:
    """mean((θ_i − θ_j)²)/2 over the sampled coordinates: estimates the variance of a weight across replicas."""
    return float((own.double() - other.double()).square().mean() / 2)
