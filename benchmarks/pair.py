"""Two replicas of one stage in two processes, each on a p2pd of its own: `benchmarks.outer` measures between them.

They have a stage with its optimizer, its outer steps and its donor as a node has them, and train nothing. The other
process is told by requests over the same transport which stage to hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import random
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import uvloop
from torch import Tensor

from benchmarks.command import command, parser_of
from benchmarks.other_process import other_process
from noloco_node.aio import Pulse, cancel_and_wait
from noloco_node.averaging.step import Averaging
from noloco_node.config.model_spec import ModelSpec
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import EvaluationSpec, InnerSpec, LimitsSpec, OuterSpec, RunSpec
from noloco_node.directory.clocks import PeerClocks
from noloco_node.errors import UserError
from noloco_node.identity.addresses import parse_address
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.daemon import PrivateP2P
from noloco_node.libp2p.start import running_p2p
from noloco_node.model.cut import cut_model
from noloco_node.model.stage import build_stage
from noloco_node.outer import CodecName
from noloco_node.participant import ReplicaContext
from noloco_node.state_transfer.donor import StateDonor
from noloco_node.telemetry.events import AnyEvent, OuterStep
from noloco_node.training.compute_thread import ComputeThread
from noloco_node.training.placing import outer_of
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.interface import Transport, Withdraw
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.messages import JsonObject, Message

START_SECONDS = 120.0
HOLD_SECONDS = 600.0
HOLD, SWAP = "bench.hold", "bench.swap"
APART = 1e-3
"""How far a replica's weights are moved before each exchange, as a standard deviation."""
WIDTHS = {1: (128, 5), 10: (384, 6), 30: (640, 6), 100: (1024, 8), 300: (1536, 10)}
"""Hidden size and layers of a Llama of about so many million parameters."""
DIALS, DIAL_PAUSE_SECONDS = 100, 0.05
PEAK = "VmHWM"


def spec_of(millions: int, codec: CodecName) -> RunSpec:
    """A run of one stage of about so many million parameters."""
    hidden, layers = WIDTHS[millions]
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    return RunSpec(
        name="pair",
        model=ModelSpec(config=config),
        inner=InnerSpec(target_tokens=1_000_000_000, global_batch_tokens=4096, learning_rate=1e-3, warmup_tokens=4096),
        outer=OuterSpec(inner_steps=8, alpha=0.0, beta=1.0, codec=codec),
        evaluation=EvaluationSpec(every_tokens=1_000_000_000),
        limits=LimitsSpec(exchange_progress_seconds=120.0),
    )


class HeldReplica:
    """A stage, and what averages it and gives it away, on one transport. It takes one outer step after another."""

    def __init__(self, transport: Transport, settings: NodeSettings) -> None:
        self._transport = transport
        self._settings = settings
        self._thread = ComputeThread()
        self._trainer: StageTrainer | None = None
        self._millions = 0
        self._served: list[Withdraw] = []
        self._running: list[asyncio.Task[None]] = []
        self._steps: asyncio.Queue[OuterStep] = asyncio.Queue()

    async def hold(self, millions: int, codec: CodecName) -> int:
        """Serve a stage of that size with that codec from now on. Returns its parameters."""
        await self.let_go()
        self.spec = spec = spec_of(millions, codec)
        trainer = self._trainer
        if trainer is None or self._millions != millions:
            self._trainer = trainer = None
            gc.collect()
            self._trainer = trainer = await asyncio.to_thread(trainer_of, spec)
            self._millions = millions
        outer = await asyncio.to_thread(outer_of, spec, trainer)
        self.worker = StageWorker(spec, trainer, outer, self._thread, lambda _: None)
        cut, moved = cut_model(spec.model)[0], Pulse()
        context = ReplicaContext(
            spec, self._settings, cut, self._transport, self.worker, random.Random(1), moved, self._tell
        )
        clocks = PeerClocks(math.inf, lambda: self.worker.progress.clock, lambda: (), lambda: ())
        self.averaging = Averaging(context, clocks)
        self.averaging.side.begin_last_round()  # so that it steps whenever it is asked
        self.giving = StateDonor(context)
        for participant in (self.averaging, self.giving):
            self._served += participant.serve()
            participant.open()
        self._running = [asyncio.create_task(self.averaging.run()), asyncio.create_task(self._tend())]
        return outer.size

    def _tell(self, event: AnyEvent) -> None:
        if isinstance(event, OuterStep):
            self._steps.put_nowait(event)

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.giving.tend()

    async def move_apart(self, seed: int) -> None:
        """As training would move the fast weights, differently on each side."""
        trainer = self._trainer
        assert trainer is not None
        noise = torch.randn(trainer.layout.size, generator=torch.Generator().manual_seed(seed)).mul_(APART)
        await asyncio.to_thread(trainer.add_to_weights, noise)

    async def average_with(self, peer: PeerId) -> OuterStep:
        """One exchange that this side dials. SystemExit where it comes to nothing."""
        while not self._steps.empty():
            self._steps.get_nowait()
        for _ in range(DIALS):  # the other side may still be at its last commit
            committed = await self.averaging.dial(peer)
            if not self._steps.empty():
                step = self._steps.get_nowait()
                if not committed:
                    raise SystemExit(f"an exchange came to nothing: {step.reason}")
                return step
            await asyncio.sleep(DIAL_PAUSE_SECONDS)
        raise SystemExit("the other side refused every exchange")

    async def let_go(self) -> None:
        """Serve nothing any more."""
        for withdraw in self._served:
            withdraw()
        self._served.clear()
        await cancel_and_wait(self._running)
        self._running.clear()
        if self._millions:
            self.giving.close()
            self.worker.let_go()

    async def close(self) -> None:
        """End its thread, too."""
        await self.let_go()
        await self._thread.close()


def trainer_of(spec: RunSpec) -> StageTrainer:
    """A stage with its optimizer; takes seconds where it is large."""
    return StageTrainer(build_stage(spec.model, 0), spec.inner, device="cpu", wire_dtype=torch.float32)


def peak_bytes(pid: int) -> int:
    """Most resident memory of a process since `reset_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(PEAK):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no {PEAK} in /proc/{pid}/status: this benchmark needs Linux")


def reset_peak(pid: int) -> int:
    """Begin anew with the highest resident memory; what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")
    return psutil.Process(pid).memory_info().rss


def _anyone(*_request: object) -> None:
    return None


async def serve(folder: Path) -> None:
    """Hold what is asked for until standard input ends; print where."""
    identity = load_or_create_identity(folder / "other.key")
    async with running_p2p(NodeSettings(), identity) as daemon:
        transport = Libp2pTransport(daemon, identity=identity)
        replica = HeldReplica(transport, NodeSettings())

        async def hold(_peer: PeerId, message: Message) -> Message:
            header: Any = message.header
            if header["moved"]:
                await replica.move_apart(header["seed"])
                return Message({}, ())
            return Message({"size": await replica.hold(header["millions"], header["codec"])}, ())

        async def swap(_peer: PeerId, message: Message) -> Message:
            return Message({}, message.tensors)

        for name, handler in ((HOLD, hold), (SWAP, swap)):
            transport.serve(name, _anyone, handler, max_concurrent_per_peer=64)
        await transport.start()
        print(json.dumps({"address": daemon.visible_addresses()[0], "p2pd": daemon.pid}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await replica.close()
        await transport.close()


@dataclass
class Pair:
    """This process's replica and the other one."""

    own: HeldReplica
    transport: Libp2pTransport
    daemon: PrivateP2P
    other: PeerId
    pids: tuple[int, int]
    """Of the two replicas."""
    p2pds: tuple[int, int]

    async def _ask(self, name: str, header: JsonObject, *tensors: Tensor) -> Message:
        most = sum(tensor.nbytes for tensor in tensors)
        request = Message(header, tensors)
        return await self.transport.call(
            self.other, name, request, timeout=HOLD_SECONDS, progress=HOLD_SECONDS, max_answer_bytes=most
        )

    async def hold(self, millions: int, codec: CodecName) -> int:
        """Both sides hold a stage of that size from now on; its parameters."""
        size = await self.own.hold(millions, codec)
        told = await self._ask(HOLD, {"millions": millions, "codec": codec, "moved": False})
        assert told.header["size"] == size
        return size

    async def move_apart(self, seed: int) -> None:
        """Both sides' fast weights, differently."""
        await self.own.move_apart(2 * seed)
        await self._ask(HOLD, {"moved": True, "seed": 2 * seed + 1})

    async def swap(self, tensor: Tensor) -> Tensor:
        """The other side's tensor of the same size."""
        return (await self._ask(SWAP, {}, tensor)).tensors[0]


@contextlib.asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[Pair]:
    """Two replicas on this machine, whose keys lie in `folder`."""
    try:
        async with contextlib.AsyncExitStack() as stack:
            where, pid = await stack.enter_async_context(
                other_process("benchmarks.pair", "--serve", str(folder), seconds=START_SECONDS)
            )
            address = parse_address(where["address"])
            identity = load_or_create_identity(folder / "own.key")
            entrance = f"/ip4/127.0.0.1/tcp/{address.port}/p2p/{address.peer}"
            settings = NodeSettings(initial_peers=(entrance,))
            daemon = await stack.enter_async_context(running_p2p(settings, identity))
            transport = Libp2pTransport(daemon, identity=identity)
            await transport.start()
            stack.push_async_callback(transport.close)
            own = HeldReplica(transport, settings)
            stack.push_async_callback(own.close)
            pids = (psutil.Process().pid, pid)
            yield Pair(own, transport, daemon, address.peer, pids, (daemon.pid, where["p2pd"]))
    except UserError as error:
        raise SystemExit(f"{error.message}\n{error.remedy}") from None


def main() -> None:
    """The other process."""
    parser = parser_of(__doc__, out=False)
    parser.add_argument("--serve", type=Path, metavar="DIR", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    uvloop.run(serve(options.serve))


if __name__ == "__main__":
    command(main)
