"""Requests that start valid and are then changed: recipes drawn by hypothesis, and what they do to tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.swarm import exchange, hello, microbatch, records_call, spec_fetch, state_transfer
from tests.worlds import VOCABULARY

METHODS = (
    microbatch.METHOD,
    exchange.PROPOSE,
    exchange.OPEN,
    exchange.CHUNK,
    state_transfer.OPEN,
    state_transfer.CHUNK,
    hello.METHOD,
    spec_fetch.METHOD,
    records_call.METHOD,
    "no.such.method",
)
FIELDS = (
    "id", "attempt", "budget_ms", "mode", "run", "stage", "protocol", "exchange", "contract", "clock", "tokens",
    "index", "snapshot", "fragment", "origin", "origin_clock", "new_field",
)  # fmt: skip
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


@st.composite
def recipes(draw: st.DrawFn, methods: tuple[str, ...] = METHODS) -> Recipe:
    """Half of them have a sound header, so that the body is looked at."""
    sound = draw(st.booleans())
    few = st.lists(st.tuples(st.sampled_from(FIELDS), odd_values), min_size=1, max_size=3)
    return Recipe(
        method=draw(st.sampled_from(methods)),
        number=draw(st.integers(0, 150)),
        mode=draw(st.sampled_from(("train", "evaluate"))),
        changed=() if sound else tuple(draw(few)),
        removed=() if sound else tuple(draw(st.lists(st.sampled_from(FIELDS), max_size=2))),
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
