"""One request and one answer of every method, with values that are all told apart: what lies on the wire, frozen.

Tensors have the dtypes and ranks that travel, and few numbers, so that their bytes are the same on every machine.
"""

from __future__ import annotations

import asyncio
import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import noloco_node
from noloco_node.accounting import receipts
from noloco_node.accounting.statements import Receipt, statement_text
from noloco_node.averaging import session as exchange_messages
from noloco_node.bootstrap import hello, reachability, spec_fetch
from noloco_node.directory import records_call, signed_end
from noloco_node.identity.invitations import Grant, Proof
from noloco_node.pipeline import messages as microbatch
from noloco_node.state_transfer import copies as copy_messages
from noloco_node.state_transfer import fetch as state_messages
from noloco_node.state_transfer.copies import CopyManifest, CopyPrecision
from noloco_node.transport.calls import NOTHING, Method, Nothing
from noloco_node.transport.messages import Message, WireModel, encode_envelope
from noloco_node.transport.streams import FramedStream
from noloco_node.trust import admission as access

SERVED = re.compile(r"\bon(?:_tensors)?\([\w.]+,\s*([\w.]+)\s*,")
UNTYPED = re.compile(r"\btransport\.serve\(\s*[\w.]+\s*,")

RUN, OTHER_ID, ROOT, SEAL = "0123456789abcdef" * 2, "f" * 32, "ab" * 32, "5e" * 64
PEER = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"


@dataclass(frozen=True)
class Example:
    """A request and its answer as they are sent today."""

    method: Method[Any, Any]
    request: WireModel
    answer: WireModel
    request_tensors: tuple[Tensor, ...] = ()
    answer_tensors: tuple[Tensor, ...] = ()
    special: str = ""
    """What it shows that the first example of its method does not."""

    @property
    def name(self) -> str:
        """The method, and what is special."""
        return f"{self.method.name} {self.special}".strip()


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    """0, 1, 2, ... : the same bits everywhere in every dtype."""
    return torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape)


def _signed_record() -> records_call.ToldRecord:
    return records_call.ToldRecord(stage=1, peer=PEER, expires=1_700_000_060.5, signed="AQID")


def _told(stage: int | None) -> records_call.RecordsMessage:
    return records_call.RecordsMessage(run=RUN, protocol=3, stage=stage, records=[_signed_record()])


def _state_request(**more: Any) -> state_messages.StateRequest:
    return state_messages.StateRequest(run=RUN, protocol=3, stage=1, contract="c" * 64, **more)


def _state_manifest() -> str:
    manifest = state_messages.StateManifest(
        source=PEER, run=RUN, stage=1, contract="c" * 64, snapshot="5" * 16, clock=4096.0, outer_rounds=7, size=8192,
        root=ROOT,
    )  # fmt: skip
    return state_messages.canonical_json(manifest.model_dump(mode="json"))


def _copy_offer(precision: CopyPrecision) -> state_messages.SignedManifest:
    manifest = CopyManifest(
        source=PEER, run=RUN, stage=1, clock=4096.0, outer_rounds=7, size=2048, precision=precision, root=ROOT
    )
    return state_messages.SignedManifest(
        manifest=state_messages.canonical_json(manifest.model_dump(mode="json")), seal=SEAL
    )


def _copy_request(**more: Any) -> copy_messages.CopyRequest:
    return copy_messages.CopyRequest(run=RUN, stage=1, **more)


def _receipt() -> receipts.ReceiptHeader:
    statement = Receipt(
        run=RUN, since=1_700_000_000.5, until=1_700_000_060.5, server=PEER, session="1" * 16, serial=2, microbatches=3,
        tokens=192,
    )  # fmt: skip
    return receipts.ReceiptHeader(statement=statement_text(statement), seal=SEAL)


def _microbatch(**more: Any) -> microbatch.MicrobatchHeader:
    named = {"id": OTHER_ID, "budget_ms": 27_000, "run": RUN, "stage": 1, "origin": PEER, "origin_clock": 8192.0}
    return microbatch.MicrobatchHeader.model_validate({**named, "protocol": 3, **more})


def _pipeline() -> list[Example]:
    labels = numbers(torch.int32, 2, 3)
    return [
        Example(
            microbatch.MICROBATCH,
            _microbatch(),
            microbatch.MicrobatchAnswer(loss_sum=12.5, tokens=6, load=2, work_ms=41.5),
            (numbers(torch.float32, 2, 3, 4), labels),
            (numbers(torch.float32, 2, 3, 4),),
        ),
        Example(
            microbatch.MICROBATCH,
            _microbatch(attempt=1, chosen=(4, 8), codec="bf16"),
            microbatch.MicrobatchAnswer(loss_sum=12.5, tokens=6, load=2, chosen=(9, 15), work_ms=41.5),
            (numbers(torch.bfloat16, 2, 3, 4), labels),
            (numbers(torch.bfloat16, 2, 3, 4),),
            special="of experts",
        ),
        Example(
            microbatch.MICROBATCH,
            _microbatch(mode="evaluate"),
            microbatch.MicrobatchAnswer(loss_sum=12.5, tokens=6, load=0, work_ms=41.5),
            (numbers(torch.float32, 2, 3, 4), labels),
            special="to evaluate",
        ),
    ]


def _averaging() -> list[Example]:
    openings = (numbers(torch.float32, 2), numbers(torch.float32, 3))
    proposal = exchange_messages.Proposal(
        exchange=OTHER_ID, run=RUN, protocol=3, stage=1, contract="c" * 64, clock=4096.0, tokens=512
    )
    return [
        Example(
            exchange_messages.PROPOSE, proposal, exchange_messages.Acceptance(tokens=640, weightless=False, loss=3.25)
        ),
        Example(
            exchange_messages.PROPOSE,
            proposal.model_copy(update={"newcomer": True}),
            exchange_messages.Acceptance(tokens=640, weightless=True),
            special="by a newcomer",
        ),
        Example(
            exchange_messages.OPEN,
            exchange_messages.Opening(exchange=OTHER_ID, clock=4096.0),
            exchange_messages.Opening(exchange=OTHER_ID, clock=5120.0, bound=0.75),
            openings,
            openings,
        ),
        Example(
            exchange_messages.CHUNK,
            exchange_messages.ChunkHeader(exchange=OTHER_ID, index=2),
            Nothing(),
            (numbers(torch.uint8, 5),),
            (numbers(torch.uint8, 5),),
        ),
        Example(exchange_messages.LEAVE, exchange_messages.LeaveExchange(exchange=OTHER_ID), Nothing()),
    ]


def _transfers() -> list[Example]:
    return [
        Example(
            state_messages.OFFER,
            _state_request(),
            state_messages.StateOffer(clock=4096.0, outer_rounds=7, readers=1, places=2),
        ),
        Example(
            state_messages.OPEN,
            _state_request(snapshot="5" * 16),
            state_messages.SignedManifest(manifest=_state_manifest(), seal=SEAL),
            answer_tensors=(numbers(torch.uint8, 2, 16),),
        ),
        Example(
            state_messages.CHUNK,
            _state_request(snapshot="5" * 16, index=1),
            Nothing(),
            answer_tensors=(numbers(torch.uint8, 7),),
        ),
        Example(copy_messages.OPEN_COPY, _copy_request(), _copy_offer("fp16")),
        Example(
            copy_messages.OPEN_COPY, _copy_request(precision="fp32"), _copy_offer("fp32"), special="in full precision"
        ),
        Example(
            copy_messages.COPY_CHUNK,
            _copy_request(root=ROOT, index=1),
            Nothing(),
            answer_tensors=(numbers(torch.float16, 3),),
        ),
    ]


def _bootstrap() -> list[Example]:
    grant = Grant(run=RUN, expires=1_700_000_000, subject=PEER, by_key=True, signature=SEAL)
    node = hello.Hello(
        run=RUN, name="micro", protocol=3, version="0.1.0", stage=0, time=1_700_000_000.5,
        held_out=hello.HeldOutLoss(loss=3.25, clock=4096.0),
        birth="6553f1000123456789abcdef",
    )  # fmt: skip
    seed = hello.Hello(run="", name="", protocol=3, version="0.1.0", stage=None, time=1_700_000_000.5, over=True)
    seen = reachability.Dialled(seen_at=("192.0.2.7",), results={"192.0.2.7 7000": reachability.Reached.YES})
    return [
        Example(hello.HELLO, NOTHING, node),
        Example(hello.HELLO, NOTHING, seed, special="of a seed"),
        Example(spec_fetch.SPEC, NOTHING, Nothing(), answer_tensors=(numbers(torch.uint8, 9),)),
        Example(signed_end.END, NOTHING, Nothing(), answer_tensors=(numbers(torch.uint8, 2),)),
        Example(access.ACCESS, access.ShownProof(proof=Proof(grant=grant, holder=SEAL)), Nothing()),
        Example(reachability.DIAL_BACK, reachability.DialBack(ports=(7000, 7001)), seen),
        Example(records_call.RECORDS, _told(1), _told(None)),
        Example(receipts.RECEIPT, _receipt(), Nothing()),
    ]


def examples() -> dict[str, Example]:
    """All of them, by name."""
    every = (*_bootstrap(), *_pipeline(), *_averaging(), *_transfers())
    return {example.name: example for example in every}


class _Written:
    """The end of a stream at which bytes are kept."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.transport = self

    def get_write_buffer_size(self) -> int:
        """Nothing is left."""
        return 0

    def is_closing(self) -> bool:
        """It never is."""
        return False

    def writelines(self, parts: list[bytes | memoryview]) -> None:
        """Keep them."""
        self.data += b"".join(parts)

    async def drain(self) -> None:
        """Nothing waits."""


async def on_the_wire(method: str, message: Message) -> bytes:
    """All frames of a message, as the transport on libp2p writes them; an answer's method is empty."""
    written = _Written()
    stream = FramedStream(asyncio.StreamReader(), cast("asyncio.StreamWriter", written))
    await stream.write_message(encode_envelope(method, message.header, message.specs), message.tensors, 1.0)
    return bytes(written.data)


def served_methods() -> set[str]:
    """The name of every method that is passed to `on` or `on_tensors` anywhere in the package."""
    served: set[str] = set()
    package = Path(noloco_node.__file__).parent
    for path in package.rglob("*.py"):
        text = path.read_text()
        assert not UNTYPED.search(text) or "the one way to ask a peer" in text.lower(), f"{path}: `serve` past `on`"
        for name in SERVED.findall(text):
            parts = ("noloco_node", *path.relative_to(package).with_suffix("").parts)
            value: object = importlib.import_module(".".join(parts))
            for part in name.split("."):
                value = getattr(value, part, None)
            served |= {value.name} if isinstance(value, Method) else set()
    return served
