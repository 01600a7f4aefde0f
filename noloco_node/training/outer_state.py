"""What a stage brings to its outer steps: φ, δ and their memory, as the run's settings say."""

from __future__ import annotations

import torch

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.outer.codec import CODECS
from noloco_node.outer.replica import OuterReplica, fragments_of
from noloco_node.outer.update import OuterRule
from noloco_node.training.trainer import Trainer


def outer_of(spec: RunSpec, trainer: Trainer) -> OuterReplica:
    """The outer state of a stage that begins at the trainer's weights, on the host. UserError (CONFIG) as
    `check_fragments`."""
    outer = spec.outer
    slow = trainer.master.to(device="cpu", dtype=torch.float32, copy=True)
    check_fragments(spec, slow.numel())
    replica = OuterReplica(
        OuterRule(outer.alpha, outer.beta, outer.effective_gamma, outer.momentum),
        slow,
        codec=CODECS[outer.codec],
        chunk_bytes=spec.limits.chunk_bytes,
        fragments=outer.fragments,
        seed=ambient.chance().getrandbits(32),
    )
    replica.snapshot = trainer.copies.room(slow.shape, slow.dtype)
    return replica


def check_fragments(spec: RunSpec, size: int) -> None:
    """Raise UserError (CONFIG) where a stage of `size` weights cannot be cut into the run's fragments."""
    try:
        fragments_of(size, spec.outer.fragments)
    except ValueError as error:
        raise UserError(
            ExitCode.CONFIG,
            f"run.outer.fragments is {spec.outer.fragments}, and a stage of this model is too small for it: {error}",
            "lower run.outer.fragments, or cut the model into fewer stages",
        ) from None
