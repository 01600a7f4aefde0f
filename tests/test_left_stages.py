"""A node that leaves a stage keeps nothing of it: two stages may be more than its memory holds."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from noloco_node.averaging.session import PROPOSE
from noloco_node.directory.records_call import RECORDS
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.checkpointing import CheckpointKeeper
from noloco_node.node.journey import spare_the_collector
from noloco_node.node.replica import Replica
from noloco_node.peers.scorecard import Offence
from noloco_node.state_transfer.fetch import OFFER
from noloco_node.storage.checkpoint import CheckpointFolder
from noloco_node.training.compute_thread import ComputeThread, Priority
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.messages import Message
from tests.support import eventually
from tests.test_off_the_loop import SETTINGS, replicas
from tests.worlds import peer_name, trainer_of


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without it only what nobody refers to is freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def live(replica: Replica, folder: Path) -> None:
    """A stay: train, give its state, be averaged with, take a checkpoint, and leave in order."""
    life = asyncio.create_task(replica.run())
    await eventually(lambda: replica.worker.progress.steps > 2, what="it trains")
    with CheckpointKeeper(replica, CheckpointFolder(folder, 1), lambda _: None, SETTINGS) as keeper:
        await keeper.save()
    replica.stop.set()
    await life


async def test_a_stage_that_was_left_is_freed_at_once_and_its_replica_is_held_by_nobody(
    tmp_path: Path, no_collector: None
) -> None:
    """The vectors go with the stay, without any collector; transport, directory, thread and ledger live on and refer to
    nothing of it."""
    async with replicas(2) as made:
        leaver, stage_peer = made
        del made[:]
        transport, ledger = leaver.context.transport, leaver.pipeline.ledger
        transport.conduct.offended(PeerId("somebody"), Offence.MALFORMED)
        await live(leaver, tmp_path)
        leaver.donor.open()
        await stage_peer.copier.copy_from(peer_name(0, 0))
        trainer, outer = trainer_of(leaver.worker), leaver.worker.outer
        vectors = [weakref.ref(tensor) for tensor in (trainer.master, trainer.gradient, outer.slow, outer.snapshot)]
        vectors.append(weakref.ref(trainer))
        held = leaver.donor._held
        assert held is not None
        vectors.append(weakref.ref(held.digests))
        del held
        replica = weakref.ref(leaver)
        del trainer, outer
        leaver.close()
        del leaver
        assert [vector() for vector in vectors] == [None] * len(vectors)
        gc.collect()
        assert replica() is None
        assert ledger.drawn > 0
        for _ in range(20):
            transport.conduct.offended(PeerId("somebody"), Offence.MALFORMED)
        assert transport.conduct.banned(PeerId("somebody"))


async def test_the_compute_thread_keeps_nothing_of_its_last_call(no_collector: None) -> None:
    """Neither what the call held nor what it gave."""

    class Given:
        """Something that can be referred to weakly."""

    thread, given = ComputeThread(), [Given()]
    reference = weakref.ref(given[0])
    assert await thread.run(Priority.STEP, given.pop) is not None
    await eventually(lambda: reference() is None, what="the thread has let go")
    await thread.close()


async def test_who_leaves_takes_back_its_own_methods_and_no_others() -> None:
    """It takes back all that its protocols answer, so that the next stay may serve it. What another part of the node
    serves stays, even if its name is of the same family."""
    async with replicas(2) as made:
        asking, leaver = (replica.context.transport for replica in made)

        async def handle(_peer: PeerId, message: Message) -> Message:
            return message

        async def ask(method: str) -> Message:
            return await asking.call(peer_name(0, 1), method, Message(), timeout=5, progress=5, max_answer_bytes=0)

        leaver.serve("outer.by_another", lambda *_: None, handle, max_concurrent_per_peer=1)
        made[1].close()
        await ask("outer.by_another")
        for method in (PROPOSE, OFFER, RECORDS):
            with pytest.raises(Refused) as refused:
                await ask(method.name)
            assert refused.value.reason is Refusal.UNKNOWN_METHOD
        made[1].serve()


async def test_a_request_that_outlives_its_replica_is_told_that_it_has_left(caplog: pytest.LogCaptureFixture) -> None:
    """`draining`, which nobody holds against the node, and no failure in its log."""
    async with replicas(2) as made:
        asking, leaver = (replica.context.transport for replica in made)
        began, left = asyncio.Event(), asyncio.Event()

        async def handle(_peer: PeerId, _message: Message) -> Message:
            began.set()
            await left.wait()
            made[1].worker.current_learning_rate()
            await made[1].worker.joiner_state()
            return Message()

        withdraw = leaver.serve("state.test", lambda *_: None, handle, max_concurrent_per_peer=1)
        call = asking.call(peer_name(0, 1), "state.test", Message(), timeout=5, progress=5, max_answer_bytes=0)
        asked = asyncio.create_task(call)
        await began.wait()
        withdraw()
        made[1].close()
        left.set()
        with pytest.raises(Refused) as refused:
            await asked
        assert refused.value.reason is Refusal.DRAINING
        assert not caplog.records


def test_what_is_left_of_a_stay_can_be_freed_after_the_next_has_begun() -> None:
    """The replica of the stay before a pause was still held as the next began, and frozen then: each pause of a node
    left one there for good, with the answers that it kept."""

    class Left:
        """Holds itself, as a replica does."""

        def __init__(self) -> None:
            self.itself = self

    left = Left()
    reference = weakref.ref(left)
    spare_the_collector(first=False)
    del left
    gc.collect()
    assert reference() is None
