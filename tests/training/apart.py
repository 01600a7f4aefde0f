"""A device apart from the host for a stage that trains: a `Card`, on all threads that give it something."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from noloco_node.training.compute_thread import ComputeThread
from noloco_node.training.host_copies import HostCopies
from noloco_node.training.trainer import Precision
from tests.outer.card import CROSSES, NAME, Card, OnCard

READS = {"_local_scalar_dense", "nonzero", "equal", "bincount", "_unique2", "masked_select"}


class Apart(Card):
    """Refuses what a GPU would refuse or be waited for; knows what crosses otherwise than by `HostCopies`."""

    def __init__(self) -> None:
        super().__init__()
        self.by_copies = False
        self.crossed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = func.overloadpacket.__name__, kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        there = [isinstance(tensor, OnCard) for tensor in tensors]
        if func in CROSSES and not self.by_copies:
            to = named.get("device") if name == "_to_copy" else tensors[0].device
            if to is not None and (torch.device(to).type == NAME) is not there[-1]:
                self.crossed.append(torch.device(to).type)
        assert name not in READS or not any(there), f"{name} reads the device"
        return super().__torch_dispatch__(func, types, args, kwargs)

    def freely(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """What crosses in `work` crosses as it should."""

        def wrapped(*args: Any, **named: Any) -> Any:
            before, self.by_copies = self.by_copies, True
            try:
                with self:
                    return work(*args, **named)
            finally:
                self.by_copies = before

        return wrapped

    def here(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """What is done in `work`, on whatever thread, may be given to the device."""

        def wrapped(*args: Any, **named: Any) -> Any:
            with self:
                return work(*args, **named)

        return wrapped


def computing(_precision: Precision, _device: torch.device) -> AbstractContextManager[object]:
    """There is no autocast on this device."""
    return nullcontext()


@contextmanager
def apart_from_the_host() -> Generator[Apart]:
    """In the block `StageTrainer` computes on such a device, and attention is worked out alike there and on the
    processor."""
    card = Apart()
    with pytest.MonkeyPatch.context() as patched, sdpa_kernel([SDPBackend.MATH]):
        for name in ("to_device", "to_host", "bring", "begin_to_host", "piece_to_host", "fill"):
            patched.setattr(HostCopies, name, card.freely(getattr(HostCopies, name)))
        patched.setattr(ComputeThread, "_carry_out", card.here(ComputeThread._carry_out))  # pyright: ignore
        patched.setattr(Precision, "computing", computing)
        patched.setattr(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *_: None)
        yield card
