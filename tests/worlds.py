"""Small swarms for tests: real stages and real training, in memory or on real p2pd processes."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec

import torch
from torch import Tensor

from noloco_node import PROTOCOL_VERSION
from noloco_node.bootstrap.hello import serve_hello
from noloco_node.config.data_spec import DataSpec
from noloco_node.config.model_spec import ModelSpec
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import EvaluationSpec, InnerSpec, LimitsSpec, OuterSpec, PipelineSpec, RunSpec
from noloco_node.data.samples import Batch, Samples
from noloco_node.directory.dht import join_directory
from noloco_node.directory.records import Directory, PeerRecord, PeerState
from noloco_node.document_marks import inputs_and_labels
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.start import running_p2p
from noloco_node.model.stage import Stage, build_stage
from noloco_node.node.replica import Replica
from noloco_node.simulator.loop import SimulatedLoop, in_virtual_time
from noloco_node.simulator.node import SimulatedDevice
from noloco_node.telemetry.events import Account, AnyEvent, Evaluation
from noloco_node.training.compute_thread import Compute, ComputeThread, Priority
from noloco_node.training.placing import on_its_device
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import Transport, Withdraw
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.memory import Carrier, Fault, MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import JsonObject, TensorSpec
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.support import eventually, last_account

VOCABULARY = 61
LENGTH = 16
WINDOWS = 4
MICROBATCH = WINDOWS * LENGTH

ALONE_IS_NEUTRAL = OuterSpec(inner_steps=10_000, alpha=0.0, beta=1.0, gamma=1.0)
"""With it a step alone leaves the fast weights as they are: φ + Δ = θ."""

NAMED = "/ip4/127.0.0.1/tcp/7000/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
"""An initial peer, for a node that joins others; in memory nobody dials it."""


def record_of(peer: str, stage: int = 0, state: PeerState = PeerState.TRAINING, **says: Any) -> PeerRecord:
    """What a node of this release says of itself in the directory."""
    return PeerRecord(peer_id=peer, stage=stage, state=state, protocol=PROTOCOL_VERSION, version="0", **says)


def no_tensors(_peer: PeerId, _header: JsonObject, specs: tuple[TensorSpec, ...]) -> None:
    """Admits requests that are a header only, where a test serves a method by hand."""
    if specs:
        raise Refused(Refusal.MALFORMED, "this method takes no tensors")


def micro_spec(
    *,
    stages: int = 2,
    layers: int | None = None,
    steps: int = 50,
    microbatches_a_step: int = 1,
    subspace: dict[str, object] | None = None,
    inner: dict[str, object] | None = None,
    outer: OuterSpec | None = None,
    pipeline: PipelineSpec | None = None,
    limits: LimitsSpec | None = None,
) -> RunSpec:
    """A run of a tiny Llama on random windows that lasts `steps` inner steps of the whole swarm.

    It has one layer a stage, and two at least, where `layers` says no other number. `subspace` is more of its model."""
    batch = MICROBATCH * microbatches_a_step
    return RunSpec(
        name="micro",
        model=ModelSpec.model_validate(
            {
                "seed": 3,
                "stages": stages,
                "config": {
                    "model_type": "llama",
                    "vocab_size": VOCABULARY,
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": layers or max(2, stages),
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "max_position_embeddings": 64,
                    "tie_word_embeddings": False,
                },
                **(subspace or {}),
            }
        ),
        data=DataSpec(sequence_length=LENGTH),
        inner=InnerSpec.model_validate(
            {
                "target_tokens": batch * steps,
                "global_batch_tokens": batch,
                "microbatch_windows": WINDOWS,
                "learning_rate": 3e-3,
                "warmup_tokens": batch * 4,
                "clip_norm": 0.5,
                **(inner or {}),
            }
        ),
        outer=outer or ALONE_IS_NEUTRAL,
        pipeline=pipeline or PipelineSpec(),
        evaluation=EvaluationSpec(every_tokens=batch * steps, windows=4),
        limits=limits or LimitsSpec(record_seconds=3, grace_seconds=2, chunk_bytes=16384),
    )


OPERATION_SECONDS = {Priority.STEP: 0.01, Priority.BACKWARD: 0.04, Priority.FORWARD: 0.02, Priority.DRAW: 0.02}
"""What a replica's device takes in virtual time."""

Arguments = ParamSpec("Arguments")


def virtually(test: Callable[Arguments, Coroutine[Any, Any, None]]) -> Callable[Arguments, None]:
    """Run a test in virtual time: it takes the same course on a machine of any speed, and waits for no clock."""

    @functools.wraps(test)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        in_virtual_time(lambda: test(*args, **kwargs))

    return run


IN_SUBSPACE: dict[str, object] = {"subspace_rank": 8, "embedding_std": 0.3}
"""The micro run's activations are 8 numbers a token, in place of 32."""


@functools.cache
def _built(model: str, index: int) -> Stage:
    return build_stage(ModelSpec.model_validate_json(model), index)


def fresh_stage(model: ModelSpec, index: int) -> Stage:
    """What `build_stage` makes of the micro run's model: a copy of one that it has made, in a quarter of the time."""
    if model.config["model_type"] != "llama" or model.subspace_rank is not None or model.from_pretrained is not None:
        return build_stage(model, index)  # its layers refer to more than themselves, or to files that change
    return copy.deepcopy(_built(model.model_dump_json(), index))


@functools.cache
def _window_row(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    start, stride = torch.randint(VOCABULARY, (2,), generator=generator).tolist()
    row = (start + (1 + stride % 5) * torch.arange(LENGTH + 1)) % VOCABULARY
    noise = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
    return torch.where(torch.rand(LENGTH + 1, generator=generator) < 0.1, noise, row)


def window_rows(indices: Sequence[int]) -> Tensor:
    """Numbered windows: a learnable sequence with noise, a pure function of the numbers."""
    return torch.stack([_window_row(index) for index in indices]).to(torch.int32)


def window_batch(indices: Sequence[int]) -> Batch:
    """Inputs and labels of numbered windows."""
    return inputs_and_labels(window_rows(indices))


@dataclass
class Drawn:
    """Counts up through window numbers and remembers what was drawn."""

    start: int = 0
    batches: list[list[int]] = field(default_factory=list)

    def draw(self) -> list[int]:
        """The next microbatch's windows."""
        first = self.start + len(self.batches) * WINDOWS
        self.batches.append(list(range(first, first + WINDOWS)))
        return self.batches[-1]


def samples_of(drawn: Drawn) -> Samples:
    """Training windows from `drawn`, held-out windows far away from them."""

    async def draw() -> Tensor:
        return window_rows(drawn.draw())

    return Samples(draw=draw, held_out=window_rows(range(10**6, 10**6 + 4)))


@dataclass
class Swarm:
    """Replicas, what stage 0 drew, and what each emitted."""

    replicas: list[Replica] = field(default_factory=list[Replica])
    drawn: list[Drawn] = field(default_factory=list[Drawn])
    events: list[list[AnyEvent]] = field(default_factory=list[list[AnyEvent]])
    hellos: list[Withdraw] = field(default_factory=list[Withdraw])
    """How each replica's answer to `hello` is taken back."""

    def of_stage(self, stage: int) -> list[Replica]:
        """Replicas of one stage."""
        return [replica for replica in self.replicas if replica.stage == stage]


@dataclass
class World(Swarm):
    """A swarm on one in-memory network."""

    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    hub: MemoryDirectoryHub = field(default_factory=lambda: MemoryDirectoryHub(1))


Place = tuple[Transport, Directory]


def peer_name(stage: int, index: int) -> PeerId:
    """A name for an in-memory peer, as long as a record asks for."""
    return PeerId(f"memory-peer-{stage}-{index}")


async def _populate(
    made: Swarm,
    stack: AsyncExitStack,
    spec: RunSpec,
    replicas: int,
    settings: NodeSettings,
    place: Callable[[int, int], AbstractAsyncContextManager[Place]],
    device: Callable[[], Compute] | None = None,
) -> None:
    """Put `replicas` a stage into `made`, each where `place(stage, index)` says, on a `device` of its own. The stack
    ends all of it, transports before the compute thread. All share that if no `device` is given: many threads in one
    process would starve the event loop. In virtual time each has a simulated one."""
    if device is None and isinstance(asyncio.get_running_loop(), SimulatedLoop):
        device = functools.partial(SimulatedDevice, OPERATION_SECONDS.__getitem__)
    shared = None if device else ComputeThread()
    if shared:
        stack.push_async_callback(shared.close)
    for number in range(spec.stages * replicas):
        stage, index = divmod(number, replicas)
        transport, directory = await stack.enter_async_context(place(stage, index))
        drawn, events = Drawn(start=index * 100_000), list[AnyEvent]()
        thread = shared or (device or ComputeThread)()
        replica = Replica(
            spec,
            settings,
            await on_its_device(spec, settings, fresh_stage(spec.model, stage), thread),
            transport,
            directory,
            thread,
            samples=samples_of(drawn) if stage == 0 else None,
            emit=events.append,
        )
        made.hellos.append(serve_hello(transport, spec, lambda stage=stage: stage))
        replica.serve()
        made.replicas.append(replica)
        made.drawn.append(drawn)
        made.events.append(events)


def trainer_of(worker: StageWorker) -> StageTrainer:
    """What a worker's compute thread works on. No node looks there: for tests of what a microbatch leaves behind."""
    trainer = worker._trainer  # pyright: ignore[reportPrivateUsage]
    assert isinstance(trainer, StageTrainer)
    return trainer


@asynccontextmanager
async def world(
    spec: RunSpec,
    replicas: int = 1,
    settings: NodeSettings | None = None,
    device: Callable[[], Compute] | None = None,
    carrier: Carrier | None = None,
) -> AsyncIterator[World]:
    """A swarm of `replicas` a stage, served but not yet running; compute threads and transports end with the block."""
    made = World(network=MemoryNetwork(carrier), hub=MemoryDirectoryHub(spec.stages))

    @asynccontextmanager
    async def place(stage: int, index: int) -> AsyncIterator[Place]:
        transport = MemoryTransport(made.network, peer_name(stage, index))
        try:
            yield transport, MemoryDirectory(made.hub)
        finally:
            await transport.close()

    async with AsyncExitStack() as stack:
        await _populate(
            made, stack, spec, replicas, settings or NodeSettings(in_flight=1, drain_seconds=1), place, device
        )
        yield made


@asynccontextmanager
async def libp2p_world(
    spec: RunSpec,
    folder: Path,
    replicas: int = 1,
    settings: NodeSettings | None = None,
    device: Callable[[], Compute] | None = None,
) -> AsyncIterator[Swarm]:
    """This swarm on real p2pd processes, one a replica, which find each other through hivemind's DHT. Identities lie in
    `folder`; every process and socket ends with the block."""
    made = Swarm()
    known: list[str] = []

    @asynccontextmanager
    async def place(stage: int, index: int) -> AsyncIterator[Place]:
        identity = load_or_create_identity(folder / f"{stage}-{index}.key")
        async with running_p2p(NodeSettings(initial_peers=tuple(known[:1])), identity) as daemon:
            known.extend(daemon.visible_addresses())
            transport = Libp2pTransport(daemon, identity=identity)
            await transport.start()
            try:
                met, life = transport.peer_stats, spec.limits.record_seconds
                directory = await join_directory(
                    daemon, identity, spec.run_id, spec.stages, peer_stats=met, record_seconds=life
                )
                try:
                    yield transport, directory
                finally:
                    await directory.close()
            finally:
                await transport.close()

    async with AsyncExitStack() as stack:
        await _populate(
            made, stack, spec, replicas, settings or NodeSettings(in_flight=1, drain_seconds=1), place, device
        )
        yield made


async def run_ahead(replica: Replica, tokens: float) -> None:
    """Move a replica's clock by `tokens` in an outer step alone that moves nothing else of what its stage peers
    weigh."""
    snapshot = await replica.worker.snapshot()
    replica.worker.outer.open(members=1, weight=1.0)
    await replica.worker.commit(snapshot, scale=0.0, clock_shift=tokens)


async def all_train(made: Swarm) -> None:
    """Let every replica serve its stage, say that it trains, and read what the others say; none draws anything."""
    for replica in made.replicas:
        replica.pipeline.open()
        await replica.membership.announce(PeerState.TRAINING)
    for replica in made.replicas:
        await replica.membership.refresh()


def last_accounts(made: World) -> list[Account]:
    """The last accounts of each replica, those of stage 0 first."""
    return [last_account(events) for events in made.events]


async def run_to_the_end(made: Swarm, within: float = 110.0) -> None:
    """Run every replica until the run's end."""
    async with asyncio.timeout(within), asyncio.TaskGroup() as group:
        for replica in made.replicas:
            group.create_task(replica.run())


async def run_with_faults(made: World, *faults: Fault) -> None:
    """Run to the end, with faults injected once every origin's first evaluation is through (it would eat some)."""

    async def inject() -> None:
        origins = [events for replica, events in zip(made.replicas, made.events, strict=True) if replica.stage == 0]
        await eventually(lambda: all(any(isinstance(e, Evaluation) for e in events) for events in origins))
        for fault in faults:
            made.network.inject(fault)

    async with asyncio.TaskGroup() as group:
        group.create_task(inject())
        group.create_task(run_to_the_end(made))
