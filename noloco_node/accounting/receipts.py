"""Receipts between peers: now and then each node signs, for each peer that served it, how much that peer did.

Amounts are what came since the last receipt. One that may have been lost is sent again as it was. The receiver knows it
by its serial number, so that nothing is counted twice. A node files only what it has counted itself since its start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from noloco_node import ambient
from noloco_node.accounting.statements import ContributionFile, Receipt, Work, statement_text
from noloco_node.aio import Pulse, cancel_and_wait, run_to_end, some_at_a_time
from noloco_node.ambient import SOON_SECONDS
from noloco_node.identity.peer_id import PeerId
from noloco_node.pipeline.messages import Ledger
from noloco_node.tallies import PeerTable
from noloco_node.training.progress import Progress
from noloco_node.transport.calls import ASKED_AT_ONCE, ATTEMPTS, NOTHING, QUESTION_SECONDS, Method, Nothing, call, on
from noloco_node.transport.errors import PeerUnreachable, Refusal, Refused, TransportError
from noloco_node.transport.interface import Transport, Withdraw
from noloco_node.transport.messages import WireModel

logger = logging.getLogger(__name__)

EVERY_SECONDS = 300.0
"""Seconds between two lines of the own work, and between two receipts for each peer: what came since is lost if a node
dies."""
LEAST_SECONDS = 5.0
"""In the long run two receipts of one peer are at least so many seconds apart. Two may come at once, and what comes
more often is refused as `busy`."""


class ReceiptHeader(WireModel):
    """Carries a receipt as text, and its seal as hex."""

    statement: str
    seal: str


RECEIPT = Method("contribution.receipt", ReceiptHeader, Nothing)


@dataclass(slots=True)
class _Pending:
    header: ReceiptHeader
    tries: int = 0


def _say_if_it_failed(keeping: asyncio.Task[None]) -> None:
    """At once: the run may go on for a month."""
    if not keeping.cancelled() and keeping.exception() is not None:
        logger.warning("the contribution file is no longer kept: %r", keeping.exception())


class Receipts:
    """Keeps this node's contribution file: its own work, and the receipts of the peers that it serves.

    `progress()` gives the replica's counts. Times in statements are wall times; how far they lie apart is measured by
    the monotonic clock, since the wall's may be set meanwhile.
    """

    def __init__(
        self,
        run_id: str,
        stage: int,
        transport: Transport,
        ledger: Ledger,
        progress: Callable[[], Progress],
        file: ContributionFile,
    ) -> None:
        self._run = run_id
        self._stage = stage
        self._transport = transport
        self._ledger = ledger
        self._progress = progress
        self._file = file
        self._session = ambient.token(8)
        self._serials = count()
        """One row of serial numbers for all peers: each sees it rise, and nothing is remembered of peers that are
        gone."""
        self._pending: dict[PeerId, _Pending] = {}
        self._filed = PeerTable[tuple[PeerId, str], int]()
        """The last serial number of each sender's session: what comes again comes soon."""
        self._settled = PeerTable[PeerId, float]()
        """When each peer would have sent as many receipts as it has, one in `LEAST_SECONDS`."""
        self._last = False
        self._writing = asyncio.Lock()
        self._written = ambient.monotonic()
        self._counted = (0, 0, 0, 0)
        self._withdraw: Withdraw | None = None

    def start(self) -> None:
        """Register with the transport, and count from here."""
        self._counted = self._counts()
        self._withdraw = on(self._transport, RECEIPT, self._handle)

    def close(self) -> None:
        """Take no more receipts."""
        if self._withdraw is not None:
            self._withdraw()

    async def beside(self, work: Awaitable[None], moved: Pulse, leaving: Callable[[], bool]) -> None:
        """Await `work` while the file is kept, and settle a last time at its end. It does not settle if it is
        cancelled, since that means to leave at once. `leaving()`, asked whenever `moved` fires, says that little or
        nothing more comes."""
        keeping = asyncio.create_task(self._keep(moved, leaving), name="receipts")
        keeping.add_done_callback(_say_if_it_failed)
        at_once = False
        try:
            await work
        except asyncio.CancelledError:
            at_once = True
            raise
        finally:
            await cancel_and_wait((keeping,))
            if not at_once:
                await self.finish()

    async def _keep(self, moved: Pulse, leaving: Callable[[], bool]) -> None:
        """Send receipts and write down the own work now and then, and as soon as this node is leaving. Its peers may
        leave, too, before it has come to its end."""
        loop, told = asyncio.get_running_loop(), False
        due = loop.time() + EVERY_SECONDS
        while True:
            await moved.wait(max(0.0, due - loop.time()))
            leaves = leaving() and not told
            if leaves or loop.time() >= due:
                told, due = told or leaves, loop.time() + EVERY_SECONDS
                await self.settle()

    async def settle(self) -> None:
        """Write down the own work and send receipts now."""
        self._make_receipts()  # first: they are for the time since the own work was written down last
        await self._write_work()
        answers = self._transport.peer_stats.answers
        await some_at_a_time(ASKED_AT_ONCE, sorted(self._pending, key=lambda peer: not answers(peer)), self._send)

    async def finish(self) -> None:
        """Settle a last time, within seconds; peers that are gone are not waited for."""
        self._last = True
        try:
            # Most have been sent when it began to leave.
            async with asyncio.timeout(4.0):
                await self.settle()
                while self._pending:
                    # Nothing tells that a peer would take it now: asking again is the only way.
                    await asyncio.sleep(SOON_SECONDS)
                    await self.settle()
        except TimeoutError:
            logger.info("%d peers did not take their last receipt", len(self._pending))

    def _counts(self) -> tuple[int, int, int, int]:
        progress = self._progress()
        return progress.tokens, self._ledger.drawn, self._ledger.served, progress.own_rounds

    def _since(self) -> float:
        """When this file was settled last, as the wall's clock would have said it had it not been set since."""
        return max(0.0, ambient.wall() - (ambient.monotonic() - self._written))

    async def _write_work(self) -> None:
        now, counts = ambient.monotonic(), self._counts()
        tokens, drawn, served, rounds = (max(0, new - old) for new, old in zip(counts, self._counted, strict=True))
        if not any((tokens, drawn, served, rounds)):
            return
        work = Work(
            run=self._run,
            stage=self._stage,
            since=self._since(),
            until=ambient.wall(),
            tokens=tokens,
            drawn=drawn,
            served=served,
            outer_rounds=rounds,
        )
        text = statement_text(work)
        seal = self._transport.sign(text.encode())
        self._written, self._counted = (now, counts)  # before it is written: even when cancelled, it will be
        await self._append(self._transport.peer_id, text, seal)

    def _make_receipts(self) -> None:
        for peer, done in list(self._ledger.done_by.items()):
            if peer in self._pending:
                continue
            receipt = Receipt(
                run=self._run,
                since=self._since(),
                until=ambient.wall(),
                server=peer,
                session=self._session,
                serial=next(self._serials),
                microbatches=done.microbatches,
                tokens=done.tokens,
            )
            del self._ledger.done_by[peer]
            text = statement_text(receipt)
            seal = self._transport.sign(text.encode()).hex()
            self._pending[peer] = _Pending(ReceiptHeader(statement=text, seal=seal))

    async def _send(self, peer: PeerId) -> None:
        pending = self._pending[peer]
        pending.tries += 1
        try:
            await call(self._transport, peer, RECEIPT, pending.header, seconds=QUESTION_SECONDS)
        except (Refused, TransportError) as error:
            logger.debug("receipt for %s came to nothing: %r", peer, error)
            final = isinstance(error, Refused) and error.reason is not Refusal.BUSY
            final = final or (self._last and isinstance(error, PeerUnreachable))
            if not final and (self._last or pending.tries < ATTEMPTS):
                return
        del self._pending[peer]

    async def _handle(self, peer: PeerId, header: ReceiptHeader) -> Nothing:
        receipt = self._checked(peer, header)
        name = (peer, receipt.session)
        if receipt.serial <= self._filed.get(name, -1):
            return NOTHING
        now = ambient.monotonic()
        settled = max(now, self._settled.get(peer, now))
        if settled - now > LEAST_SECONDS:
            raise Refused(Refusal.BUSY, f"one receipt in {LEAST_SECONDS:g} s")
        done = self._ledger.done_for.get(peer)
        if done is None or receipt.microbatches > done.microbatches or receipt.tokens > done.tokens:
            raise Refused(Refusal.NOT_COUNTED, "the receipt is for more than this node has counted")
        done.microbatches -= receipt.microbatches
        done.tokens -= receipt.tokens
        if not done.microbatches:
            del self._ledger.done_for[peer]
        self._settled[peer], self._filed[name] = settled + LEAST_SECONDS, receipt.serial
        self._transport.peer_stats.worked(peer)
        await self._append(peer, header.statement, bytes.fromhex(header.seal))
        return NOTHING

    def _checked(self, peer: PeerId, header: ReceiptHeader) -> Receipt:
        """The receipt, if `peer` signed it and made it out to this node."""
        try:
            receipt, seal = Receipt.model_validate_json(header.statement), bytes.fromhex(header.seal)
        except ValueError:
            raise Refused(Refusal.MALFORMED, "no receipt") from None
        if receipt.run != self._run:
            raise Refused(Refusal.WRONG_RUN)
        signed = self._transport.signed_by(peer, seal, header.statement.encode())
        if not signed or receipt.server != self._transport.peer_id:
            raise Refused(Refusal.MALFORMED, "the receipt is not signed by its sender, or made out to another node")
        return receipt

    async def _append(self, signer: PeerId, text: str, seal: bytes) -> None:
        """One after another, and to its end also where the caller is cancelled: a thread cannot be called back."""
        await run_to_end(self._append_in_turn(signer, text, seal))

    async def _append_in_turn(self, signer: PeerId, text: str, seal: bytes) -> None:
        async with self._writing:
            try:
                await ambient.elsewhere(self._file.append, signer, text, seal)
            except OSError as error:  # a full disk must not end the training
                logger.warning("the contribution file cannot be written: %s", error)


async def open_receipts(
    path: Path, run_id: str, stage: int, transport: Transport, ledger: Ledger, progress: Callable[[], Progress]
) -> Receipts:
    """Open the contribution file at `path`, and serve receipts from now on. OSError as the file system says."""
    file = await ambient.elsewhere(ContributionFile, path)
    receipts = Receipts(run_id, stage, transport, ledger, progress, file)
    receipts.start()
    return receipts
