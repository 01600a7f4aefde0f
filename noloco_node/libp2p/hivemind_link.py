"""hivemind's client of p2pd, kept when the p2pd behind it is a new one. The untyped surface of that is all here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from hivemind.p2p import P2P  # pyright: ignore[reportMissingTypeStubs]
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError  # pyright: ignore[reportMissingTypeStubs]
from hivemind.utils.multiaddr import Multiaddr  # pyright: ignore[reportMissingTypeStubs]

from noloco_node.aio import cancel_and_wait

Counted = Callable[[int, int], None]
"""A function that is told how many bytes of a message were sent, and received."""


async def connect_hivemind(folder: Path, counted: Counted) -> P2P:
    """hivemind's client of the p2pd whose socket is `folder`/d; its own socket lies there too."""
    # hivemind puts its own socket where this class attribute says, and has no other way to be told.
    kind = type("FolderP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})
    p2p = cast("P2P", await cast("Any", kind).replicate(Multiaddr(f"/unix{folder}/d")))
    control = cast("Any", p2p)._client.control
    forgive_late_answers(control)
    forget_ended_requests(control)
    count_messages(control, counted)
    return p2p


_Handler = Callable[[bytes, Any], Awaitable[bytes]]


class _WaitingCalls(dict[Any, "asyncio.Future[bytes]"]):
    """Calls by id, of which those count that still wait."""

    def __contains__(self, call: object) -> bool:
        waiting = self.get(call)
        return waiting is not None and not waiting.done()


def forgive_late_answers(control: Any) -> None:
    """Have a client of p2pd ignore an answer to a call that has just been given up.

    hivemind's would set it all the same, fail, and read no answer any more. The node would be deaf in its directory
    while p2pd is well.
    """
    control._pending_calls = _WaitingCalls(control._pending_calls)


class _UnderWay(dict[Any, "asyncio.Task[None]"]):
    """Requests that are being answered, by id."""

    def __setitem__(self, call: object, answering: asyncio.Task[None]) -> None:
        super().__setitem__(call, answering)
        answering.add_done_callback(lambda _: self.pop(call, None))


def forget_ended_requests(control: Any) -> None:
    """Have a client of p2pd keep no request that has ended.

    hivemind's keeps each request that was given up while it was being answered, some kilobytes, for good. A peer that
    asks and hangs up would fill a node's memory.
    """
    control._handler_tasks = _UnderWay(control._handler_tasks)


class _CountedHandlers(dict[str, _Handler]):
    """Handlers by protocol; what one is asked and answers is counted when a request is handed to it, and only then."""

    def __init__(self, handlers: dict[str, _Handler], counted: Counted) -> None:
        super().__init__(handlers)
        self._counted = counted

    def __getitem__(self, protocol: str) -> _Handler:
        handler, counted = super().__getitem__(protocol), self._counted

        async def answer(request: bytes, peer: Any) -> bytes:
            counted(0, len(request))
            answered = await handler(request, peer)
            counted(len(answered), 0)
            return answered

        return answer


def count_messages(control: Any, counted: Counted) -> None:
    """Have a client of p2pd tell how many bytes its messages have, those of its calls and of calls to it."""
    call = control.call_unary_handler

    async def counted_call(peer: Any, protocol: str, request: bytes) -> bytes:
        counted(len(request), 0)
        answered: bytes = await call(peer, protocol, request)
        counted(0, len(answered))
        return answered

    control.call_unary_handler = counted_call
    control.unary_handlers = _CountedHandlers(control.unary_handlers, counted)


async def withdraw_handler(p2p: P2P, protocol: str) -> None:
    """Have p2pd bring no more streams of a protocol. One that was on its way is hung up on; hivemind's client has
    nobody for it, and would let an exception out that nobody awaits. KeyError where it was not served, and what
    hivemind raises."""
    await cast("Any", p2p).remove_binary_stream_handler(protocol)
    cast("Any", p2p)._client.control.handlers[protocol] = _hang_up


async def _hang_up(_info: Any, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def reconnect_hivemind(p2p: P2P) -> None:
    """Connect the same object to a new p2pd at the old socket, and register all that it served again.

    Calls that the old one did not answer fail with P2PDaemonError now; requests that it had brought are dropped.
    """
    control: Any = cast("Any", p2p)._client.control
    await _close(control)
    for call in list(control._pending_calls.values()):
        if not call.done():
            call.set_exception(P2PDaemonError("p2pd died"))
    await cancel_and_wait(list(control._handler_tasks.values()))
    control._handler_tasks.clear()
    control._pending_messages = asyncio.Queue()
    await control._ensure_persistent_conn()
    unary = dict(control.unary_handlers.items())  # as they were given, not those that count
    streams = {name: handler for name, handler in control.handlers.items() if handler is not _hang_up}
    for name, handler in unary.items():
        # One at a time: those that come after are not lost where this p2pd dies as well.
        control.unary_handlers.pop(name, None)
        await control.add_unary_handler(name, handler)
    for name, handler in streams.items():
        await control.stream_handler(name, handler)


async def disconnect_hivemind(p2p: P2P) -> None:
    """End every task of hivemind's client and remove its socket. p2pd stays."""
    untyped = cast("Any", p2p)
    listening = untyped._listen_task
    await untyped.shutdown()
    await _close(untyped._client.control)
    if listening is not None:
        await cancel_and_wait((listening,))


async def _close(control: Any) -> None:
    tasks: list[asyncio.Task[Any]] = [task for task in (control._read_task, control._write_task) if task is not None]
    await cancel_and_wait(tasks)
