"""Requests that start valid and are then changed: recipes from a seeded generator, and what they do to tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from noloco_node.accounting import receipts
from noloco_node.averaging import session as exchange_messages
from noloco_node.bootstrap import hello, reachability, spec_fetch
from noloco_node.directory import records_call, signed_end
from noloco_node.pipeline import messages as microbatch
from noloco_node.state_transfer import copies as copy_messages
from noloco_node.state_transfer import fetch as state_messages
from noloco_node.transport.messages import WireModel
from noloco_node.trust import admission as access
from tests.worlds import VOCABULARY

REQUESTS: Mapping[str, type[WireModel] | None] = {
    microbatch.MICROBATCH.name: microbatch.MicrobatchHeader,
    exchange_messages.PROPOSE.name: exchange_messages.Proposal,
    exchange_messages.OPEN.name: exchange_messages.Opening,
    exchange_messages.CHUNK.name: exchange_messages.ChunkHeader,
    exchange_messages.LEAVE.name: exchange_messages.LeaveExchange,
    state_messages.OFFER.name: state_messages.StateRequest,
    state_messages.OPEN.name: state_messages.StateRequest,
    state_messages.CHUNK.name: state_messages.StateRequest,
    copy_messages.OPEN_COPY.name: copy_messages.CopyRequest,
    copy_messages.COPY_CHUNK.name: copy_messages.CopyRequest,
    receipts.RECEIPT.name: receipts.ReceiptHeader,
    access.ACCESS.name: access.ShownProof,
    reachability.DIAL_BACK.name: reachability.DialBack,
    hello.HELLO.name: None,
    spec_fetch.SPEC.name: None,
    signed_end.END.name: None,
    records_call.RECORDS.name: records_call.RecordsMessage,
    "no.such.method": None,
}
"""Every method that a node serves, and what its header is parsed as. A test compares it with what the code serves."""
METHODS = tuple(REQUESTS)
TENSOR_CHANGES = (
    "none", "drop", "add", "dtype", "longer", "empty", "scalar", "flat", "nan", "inf", "-inf", "huge", "tiny", "low",
)  # fmt: skip

TEXTS = ("NaN", "Infinity", "-1", "1e400", "", "\x00", "A" * 32, "a" * 32 + "\n", "a" * 5000, "é💥" * 16, "ab", "\x7f~")


def odd_value(rng: Random) -> object:
    """What a header's field may hold by JSON, and mostly must not by its type."""
    match rng.randrange(7):
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2:
            return rng.choice((0, 1, -1, 2, rng.randint(-300, 300), (1 << 63) - 1, 1 - (1 << 63), rng.getrandbits(62)))
        case 3:
            return rng.choice((0.0, -0.0, 0.5, -1.5, 5e-324, 1.7e308, -1.7e308, 1e16, rng.gauss(0.0, 1e4)))
        case 4 | 5:
            return rng.choice(TEXTS)
        case _:
            return rng.choice(([], [0], [[]], [[1, -1], []], {}, {"a": 1}, {"a": {"b": [0]}}, {"ab": {}, "": []}))


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


def recipe(rng: Random, methods: Sequence[str] = METHODS) -> Recipe:
    """Half of them have a sound header, so that the body is looked at."""
    sound, method = rng.random() < 0.5, rng.choice(methods)
    fields = fields_of(method)
    return Recipe(
        method=method,
        number=rng.randint(0, 150),
        mode=rng.choice(("train", "evaluate")),
        changed=() if sound else tuple((rng.choice(fields), odd_value(rng)) for _ in range(rng.randint(1, 3))),
        removed=() if sound else tuple(rng.choices(fields, k=rng.choice((0, 0, 1, 2)))),
        tensor_change=rng.choice(TENSOR_CHANGES) if rng.random() < 0.5 else "none",
        which=rng.randrange(2),
        peer=rng.randrange(2),
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
