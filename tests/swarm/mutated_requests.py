"""Requests that start valid and are then changed: recipes drawn by hypothesis, and what they do to tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.swarm import (
    access,
    dial_back,
    exchange_messages,
    guard,
    hello,
    microbatch,
    receipts,
    records_call,
    spec_fetch,
    state_messages,
)
from noloco_node.swarm.wire import WireModel
from tests.worlds import VOCABULARY

REQUESTS: Mapping[str, type[WireModel] | None] = {
    microbatch.METHOD: microbatch.MicrobatchHeader,
    exchange_messages.PROPOSE: exchange_messages.Proposal,
    exchange_messages.OPEN: exchange_messages.Opening,
    exchange_messages.CHUNK: exchange_messages.ChunkHeader,
    exchange_messages.LEAVE: exchange_messages.Leave,
    state_messages.OFFER: state_messages.StateRequest,
    state_messages.OPEN: state_messages.StateRequest,
    state_messages.CHUNK: state_messages.StateRequest,
    guard.OPEN: guard.CopyRequest,
    guard.CHUNK: guard.CopyRequest,
    receipts.METHOD: receipts.ReceiptHeader,
    access.METHOD: access.ShownProof,
    dial_back.METHOD: dial_back.DialBack,
    hello.METHOD: None,
    spec_fetch.METHOD: None,
    records_call.METHOD: records_call.RecordsMessage,
    "no.such.method": None,
}
"""Every method that a node serves, and what its header is parsed as. A test compares it with what the code serves."""
METHODS = tuple(REQUESTS)
TENSOR_CHANGES = (
    "none", "drop", "add", "dtype", "longer", "empty", "scalar", "flat", "nan", "inf", "-inf", "huge", "tiny", "low",
)  # fmt: skip

odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63) + 1, (1 << 63) - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["NaN", "Infinity", "-1", "1e400", "", "\x00", "A" * 32, "a" * 32 + "\n", "a" * 5000, "é💥" * 16]),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
    st.recursive(
        st.integers(-1, 1),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab"), inner, max_size=2),
        max_leaves=4,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A valid request and what is then changed in it."""

    method: str
    number: int
    """Chooses the microbatch's id, or the chunk."""
    mode: str = "train"
    changed: tuple[tuple[str, object], ...] = ()
    removed: tuple[str, ...] = ()
    tensor_change: str = "none"
    which: int = 0
    peer: int = 0


def fields_of(method: str) -> tuple[str, ...]:
    """Names of all that a method's header may hold, and one that none knows."""
    model = REQUESTS[method]
    return (*(model.model_fields if model else ("run", "stage")), "new_field")


@st.composite
def recipes(draw: st.DrawFn, methods: tuple[str, ...] = METHODS) -> Recipe:
    """Half of them have a sound header, so that the body is looked at."""
    sound, method = draw(st.booleans()), draw(st.sampled_from(methods))
    fields = fields_of(method)
    few = st.lists(st.tuples(st.sampled_from(fields), odd_values), min_size=1, max_size=3)
    return Recipe(
        method=method,
        number=draw(st.integers(0, 150)),
        mode=draw(st.sampled_from(("train", "evaluate"))),
        changed=() if sound else tuple(draw(few)),
        removed=() if sound else tuple(draw(st.lists(st.sampled_from(fields), max_size=2))),
        tensor_change=draw(st.sampled_from(TENSOR_CHANGES)) if draw(st.booleans()) else "none",
        which=draw(st.integers(0, 1)),
        peer=draw(st.integers(0, 1)),
    )


def changed_tensors(tensors: tuple[Tensor, ...], change: str, which: int) -> tuple[Tensor, ...]:
    """The tensors with one of them changed."""
    if change == "add":
        return (*tensors, torch.zeros(2))
    if not tensors or change == "none":
        return tensors
    position = which % len(tensors)
    if change == "drop":
        return tensors[:position] + tensors[position + 1 :]
    tensor = tensors[position]
    whole = not tensor.is_floating_point()
    filler = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "huge": 3e38, "tiny": 1e-42, "low": -7.0}
    changed = {
        "dtype": lambda: tensor.to(torch.int64 if tensor.dtype == torch.int32 else torch.int32),
        "longer": lambda: torch.cat((tensor, tensor)),
        "empty": lambda: tensor[:0].contiguous(),
        "scalar": lambda: tensor.reshape(-1)[0].clone(),
        "flat": lambda: tensor.reshape(-1),
    }
    if change in changed:
        result = changed[change]()
    elif whole:
        odd = {"huge": (1 << 31) - 1, "low": -7}.get(change, VOCABULARY)
        result = torch.full_like(tensor, odd & 0xFF if tensor.dtype == torch.uint8 else odd)
    else:
        result = tensor.clone()
        result.view(-1)[:: 1 + 3 * which] = filler[change]
    return (*tensors[:position], result, *tensors[position + 1 :])
