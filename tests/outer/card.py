"""A device that is none, computes all the same, and counts the memory that lives on it.

Its tensors hold one of the processor and say that they lie on torch's meta device, which every machine has. Two places
in one operation are an error, as on a GPU; copies and numbers alone cross.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "meta"
aten: Any = torch.ops.aten
CROSSES = {aten._to_copy.default, aten.copy_.default}
"""They take tensors of two places."""


class OnCard(Tensor):
    """A tensor of the device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnCard:
        made = Tensor._make_wrapper_subclass(  # pyright: ignore
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=NAME,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is asked outside of the device")


class Card(TorchDispatchMode):
    """An `Accelerator`."""

    def __init__(self, room: int = 1 << 40, refuses: Callable[[str], RuntimeError] | None = None) -> None:
        super().__init__()
        self.device = torch.device(NAME)
        self.room = room
        self.refuses = refuses
        """The error of the operation with number `refuses_at`: a new one, since it holds what it was raised over."""
        self.refuses_at = 0
        self.operations: list[str] = []
        self.now = self.most = 0
        self._known: set[int] = set()

    def has_room(self, size: int) -> bool:
        """As much as was said."""
        return size <= self.room

    @contextmanager
    def beside(self) -> Generator[None]:
        """The device computes."""
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, OnCard)]
        wanted = kwargs.get("device")
        asked = wanted is not None and torch.device(wanted).type == NAME
        if not there and not asked:
            return func(*args, **kwargs)
        self.operations.append(func.name())
        if self.refuses is not None and len(self.operations) == self.refuses_at:
            raise self.refuses("no memory, says the test")
        apart = there and any(each.ndim and not isinstance(each, OnCard) for each in tensors)
        if func not in CROSSES and apart:
            raise AssertionError(f"two places meet in {func}: {[type(each).__name__ for each in tensors]}")
        if wanted is not None:
            kwargs["device"] = "cpu"
        if func is aten._to_copy.default:
            args = (args[0].inner.clone() if isinstance(args[0], OnCard) else args[0].clone(),)
        inner = tree_map(lambda leaf: leaf.inner if isinstance(leaf, OnCard) else leaf, (args, kwargs))
        if func is aten.histc.default:  # a processor counts no whole numbers
            inner = ((inner[0][0].float(), *inner[0][1:]), inner[1])
        made = func(*inner[0], **inner[1])
        stays = asked or (bool(there) and wanted is None)
        if func is aten.copy_.default:
            return args[0]
        return tree_map(lambda leaf: self._placed(leaf, tensors, stays=stays), made)

    def _placed(self, leaf: Any, given: list[Tensor], *, stays: bool) -> Any:
        if not isinstance(leaf, Tensor) or not stays:
            return leaf
        for each in given:
            if isinstance(each, OnCard) and each.inner is leaf:
                return each
        storage = leaf.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return OnCard(leaf)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
