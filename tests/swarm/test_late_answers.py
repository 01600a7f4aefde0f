"""Calls that are given up, by this node or by the caller: they cost no other call its answer, and leave nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hivemind.p2p import PeerID  # pyright: ignore[reportMissingTypeStubs]
from hivemind.p2p.p2p_daemon_bindings.control import (  # pyright: ignore[reportMissingTypeStubs]
    ControlClient,
    DaemonConnector,
)
from hivemind.proto import p2pd_pb2  # pyright: ignore[reportMissingTypeStubs]
from hivemind.utils.multiaddr import Multiaddr  # pyright: ignore[reportMissingTypeStubs]

from noloco_node.libp2p.hivemind_link import forget_ended_requests, forgive_late_answers, reconnect_hivemind
from tests.support import alongside, eventually, one_turn

pb: Any = p2pd_pb2
PEER: Any = PeerID.from_base58("12D3KooWKrCeA5nCWnQ5gm5FLAszTb6cDMk2hX8BH7Hj8MhGeFx9")
ANSWERS: dict[str, dict[str, Any]] = {
    "its answer": {"callUnaryResponse": pb.CallUnaryResponse(response=b"it")},
    "the peer's failure": {"callUnaryResponse": pb.CallUnaryResponse(error=b"no")},
    "p2pd's failure": {"daemonError": pb.DaemonError(message="no")},
    "an empty one": {},
}


def client() -> Any:
    """hivemind's client of a p2pd, connected to none."""
    connector: Any = DaemonConnector(Multiaddr("/unix/nowhere"))
    return ControlClient(connector, _initialized_with_create=True)


def packed(call: bytes, content: dict[str, Any]) -> bytes:
    """What p2pd says of a call, as it stands on the stream."""
    message = pb.PersistentConnectionResponse(callId=call, **content).SerializeToString()
    assert len(message) < 128, "one byte says how long it is"
    return bytes([len(message)]) + message


@pytest.mark.parametrize("comes", ANSWERS)
async def test_a_call_that_is_given_up_as_its_answer_comes_leaves_the_others_theirs(comes: str) -> None:
    """hivemind would end its reader of all answers. Every later call of this node's directory would be in vain, while
    p2pd itself still answers that it lives."""
    control = client()
    forgive_late_answers(control)
    stream = asyncio.StreamReader()
    async with alongside(control._read_from_persistent_conn(stream)) as (reading,):

        async def asked() -> tuple[asyncio.Task[bytes], bytes]:
            call = asyncio.create_task(control.call_unary_handler(PEER, "find", b""))
            await one_turn()
            (name,) = (UUID(bytes=(await control._pending_messages.get()).callId),)
            return call, name.bytes

        given_up, name = await asked()
        stream.feed_data(packed(name, ANSWERS[comes]))
        given_up.cancel()
        await asyncio.wait((given_up,))
        await one_turn()
        assert not reading.done(), "it reads on"
        assert (await control._pending_messages.get()).HasField("cancel")
        call, name = await asked()
        stream.feed_data(packed(name, ANSWERS["its answer"]))
        assert await asyncio.wait_for(call, 20) == b"it"


@pytest.mark.parametrize("given_up", [True, False])
async def test_of_a_request_that_has_ended_nothing_is_kept(given_up: bool) -> None:
    """Whether it was answered, or its caller hung up meanwhile: hivemind keeps the latter for good."""
    control, begun, may_end = client(), 0, asyncio.Event()
    forget_ended_requests(control)

    async def answered(_data: bytes, _peer: object) -> bytes:
        nonlocal begun
        begun += 1
        await may_end.wait()
        return b"it"

    control.unary_handlers["find"] = answered
    stream = asyncio.StreamReader()
    async with alongside(control._read_from_persistent_conn(stream)) as (reading,):
        names = [UUID(int=number).bytes for number in range(20)]
        request = pb.CallUnaryRequest(proto="find", peer=PEER.to_bytes(), data=b"")
        for name in names:
            stream.feed_data(packed(name, {"requestHandling": request}))
        await eventually(lambda: begun == 20, 20, "all are being answered")
        assert len(control._handler_tasks) == 20
        for name in names:
            if given_up:
                stream.feed_data(packed(name, {"cancel": pb.Cancel()}))
        if not given_up:
            may_end.set()
        await eventually(lambda: not control._handler_tasks, 20, "they have ended")
        assert control._pending_messages.qsize() == (0 if given_up else 20)
        assert not reading.done()


async def test_what_a_node_serves_is_not_lost_where_the_new_p2pd_dies_as_well() -> None:
    """It says nothing to the first handler: the next restart registers all of them."""
    control = client()
    served = dict.fromkeys(("find", "ping", "store"), asyncio.sleep)
    control.unary_handlers.update(served)
    control._ensure_persistent_conn = one_turn
    p2p: Any = SimpleNamespace(_client=SimpleNamespace(control=control))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await reconnect_hivemind(p2p)
    assert control.unary_handlers == served
