"""What each fault of a schedule does to a world, when its moment has come, and how it ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from noloco_node.directory.dht import DhtDirectory
from noloco_node.directory.records import PeerRecord
from noloco_node.placement.balancing import Move
from noloco_node.simulator.faults import (
    Crash,
    Death,
    DrawnFault,
    Freeze,
    FullDisk,
    Join,
    LateMessages,
    Leave,
    Liar,
    LostMessages,
    LostStage,
    Partition,
    Relocate,
    RepeatedMessages,
    Schedule,
    SkewedClock,
    SlowLink,
    Twin,
)
from noloco_node.simulator.node import Node
from noloco_node.simulator.world import World
from noloco_node.transport.memory import Fault, FaultKind
from noloco_node.transport.messages import Message

LOST = {"request": FaultKind.LOSE_REQUEST, "answer": FaultKind.LOSE_ANSWER, "dial": FaultKind.UNREACHABLE}


@dataclass(slots=True)
class Strikes:
    """Carries a schedule out. `fired` says which of its faults have done something."""

    world: World
    schedule: Schedule
    fired: list[bool] = field(init=False)
    dead: set[int] = field(default_factory=set[int])
    """Nodes that a fault has ended: what they hold is lost."""
    liars: set[int] = field(default_factory=set[int])
    twins: set[int] = field(default_factory=set[int])
    """Nodes that share an identity."""
    slept: set[int] = field(default_factory=set[int])
    """Nodes that stood still for longer than records live."""
    cut_off: set[int] = field(default_factory=set[int])
    """Nodes between which and others a partition lay for as long."""
    lost_stage: bool = False
    """A stage has lost all of its replicas, or those left answer nothing that trains anybody."""
    retraced: bool = False
    """A node of stage 0 has come back from its checkpoint."""
    _useless: set[int] = field(default_factory=set[int])
    """Nodes of later stages that train nobody any more."""
    _apart: dict[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    _still: Counter[int] = field(default_factory=Counter[int])
    _slow: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    _rules: dict[int, list[Fault]] = field(default_factory=dict[int, list[Fault]])
    _full: dict[int, Node] = field(default_factory=dict[int, Node])

    def __post_init__(self) -> None:
        self.fired = [False] * len(self.schedule.faults)

    def share(self) -> float:
        """How much of the run is done, by the furthest clock of the honest."""
        honest = [node for node in self.world.nodes if node.number not in self.liars and node.replica is not None]
        clocks = [node.replica.worker.progress.clock for node in honest if node.replica is not None]
        return max(clocks, default=0.0) / self.world.spec.inner.target_tokens

    async def run(self) -> None:
        """Strike, until all faults have; to be cancelled when the run is over."""
        order = sorted(range(len(self.schedule.faults)), key=lambda index: self.schedule.faults[index].at)
        for index in order:
            fault = self.schedule.faults[index]
            while self.share() < fault.at:  # noqa: ASYNC110 - nothing tells that a clock has moved
                await asyncio.sleep(0.25)
            await self._strike(index, fault)

    def settle(self) -> None:
        """The run is over: what was to befall messages and disks has, or has not."""
        for index, node in self._full.items():
            self.fired[index] = node.disk is not None and node.disk.refused > 0
        for index, rules in self._rules.items():
            self.fired[index] = any(rule.fired for rule in rules)

    def _node(self, fault: DrawnFault) -> Node | None:
        """The fault's node, if it is one of a node that lives."""
        number: int | None = getattr(fault, "node", None)
        node = self.world.nodes[number] if number is not None and number < len(self.world.nodes) else None
        return node if node is not None and node.condition == "running" else None

    async def _strike(self, index: int, fault: DrawnFault) -> None:
        world, node = self.world, self._node(fault)
        match fault:
            case Join():
                self.fired[index] = bool(world.running)
                if world.running:
                    world.start(0, auto=True)
            case LostStage(stage=stage):
                for each in [each for each in world.running if each.stage == stage]:
                    self._end(each)
                    self.fired[index] = True
            case Partition(nodes=nodes, seconds=seconds):
                self._apart[index] = frozenset(nodes)
                self._part()
                asyncio.get_running_loop().call_later(seconds, self._heal, index)
                self.fired[index] = len({node.number in nodes for node in world.running}) > 1
                if self.fired[index] and seconds > world.spec.limits.record_seconds:
                    self.cut_off |= {node.number for node in world.running}
            case _ if node is not None:
                self.fired[index] = await self._strike_node(index, fault, node)
            case _:
                pass

    async def _strike_node(self, index: int, fault: DrawnFault, node: Node) -> bool:
        """Whether it has fired; of what befalls messages and disks `settle` says so."""
        world, later = self.world, asyncio.get_running_loop().call_later
        match fault:
            case Death(silent=silent):
                self._end(node, silent=silent)
            case Leave(back_after=back_after):
                world.stop(node)
                self._goes(node)
                self._comes_back(node, back_after)
            case Crash(back_after=back_after):
                self._end(node)
                self._comes_back(node, back_after)
            case FullDisk(seconds=seconds):
                self._full[index] = node
                self._set_full(node, full=True)
                later(seconds, self._set_full, node, False)
                return False
            case Relocate(stage=stage) if stage != node.stage and node.replica and node.lifecycle:
                node.lifecycle.move = Move(stage, "poor")
                node.replica.stop.set()
            case Freeze(seconds=seconds):
                self._still[node.number] += 1
                world.freeze(node)
                if seconds > world.spec.limits.record_seconds:
                    self.slept.add(node.number)
                later(seconds, self._thaw, node)
            case SlowLink(seconds=seconds, times=times):
                self._slow.setdefault(node.number, []).append(times)
                self._slow_down(node)
                later(seconds, self._speed_up, node, times)
            case SkewedClock(by=by):
                node.machine.clock_ahead = by
            case Twin():
                other = world.start(node.stage, twin_of=node)
                self.twins |= {node.number, other.number}
            case Liar(how=how):
                self.liars.add(node.number)
                if node.stage > 0 and (how == "busy" or how in _GRADIENTS):
                    self._useless.add(node.number)
                    self._look_at(node.stage)
                if rules := _lies(how, node):
                    self._rules[index] = [world.network.inject(rule) for rule in rules]
                    return False
                return await self._turn(node, how)
            case LostMessages() | LateMessages() | RepeatedMessages():
                self._rules[index] = [world.network.inject(_rule(fault, node))]
                return False
            case _:
                return False
        return True

    def _comes_back(self, node: Node, seconds: float | None) -> None:
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, self._start_again, node)

    def _start_again(self, node: Node) -> None:
        if node.condition == "running":  # it is leaving still
            asyncio.get_running_loop().call_later(1.0, self._start_again, node)
        elif self.world.running:
            self.retraced |= node.stage == 0
            self.world.start(node.stage, twin_of=node)

    def _set_full(self, node: Node, full: bool) -> None:
        if node.disk is not None:
            node.disk.full = full

    def _goes(self, node: Node) -> None:
        """It leaves its stage, whatever the way."""
        self.dead.add(node.number)
        self._look_at(node.stage)

    def _look_at(self, stage: int) -> None:
        gone = self.dead | self._useless
        self.lost_stage |= not any(n.stage == stage and n.number not in gone for n in self.world.running)

    def _end(self, node: Node, *, silent: bool = False) -> None:
        self._goes(node)
        if silent:
            self.world.vanish(node)
        else:
            self.world.kill(node)

    def _part(self) -> None:
        """A node that no partition has cut off is on no side; so is a newcomer."""
        sides: dict[tuple[bool, ...], list[Node]] = {}
        for node in self.world.nodes:
            cut_off = tuple(node.number in cut for cut in self._apart.values())
            if any(cut_off):
                sides.setdefault(cut_off, []).append(node)
        self.world.part(*sides.values())

    def _heal(self, index: int) -> None:
        del self._apart[index]
        self._part()

    def _thaw(self, node: Node) -> None:
        self._still[node.number] -= 1
        if not self._still[node.number] and node.condition == "running":
            self.world.thaw(node)

    def _slow_down(self, node: Node) -> None:
        self.world.slow(node, max(self._slow[node.number], default=1.0))

    def _speed_up(self, node: Node, times: float) -> None:
        self._slow[node.number].remove(times)
        self._slow_down(node)

    async def _turn(self, node: Node, how: str) -> bool:
        """A node's record or weights turn hostile; whether they could."""
        replica = node.replica
        if replica is None:
            return False
        if how == "ahead":
            if node.directory is not None:
                _tell_far_clocks(node.directory)
        else:
            progress, weights = await replica.worker.slow_weights()
            await replica.worker.load_slow_weights(progress.clock, progress.outer_rounds, 1e3 * weights)
        return True


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


def _tell_far_clocks(directory: DhtDirectory) -> None:
    """From now on the records that are published here claim the end of time."""
    publish = directory.publish

    async def lying(record: PeerRecord, life: float) -> bool:
        return await publish(record.model_copy(update={"clock": 1e15, "finished": True}), life)

    directory.publish = lying


def _gradient(change: Callable[[Message], Message]) -> Callable[[Message], Message]:
    return lambda answer: change(answer) if answer.tensors else answer


_GRADIENTS: dict[str, Callable[[Message], Message]] = {
    "flipped": _gradient(lambda answer: replace(answer, tensors=tuple(-each for each in answer.tensors))),
    "huge": _gradient(lambda answer: replace(answer, tensors=tuple(1e6 * each for each in answer.tensors))),
    "nan": _gradient(lambda answer: replace(answer, tensors=tuple(float("nan") * each for each in answer.tensors))),
}


def _rule(fault: LostMessages | LateMessages | RepeatedMessages, node: Node) -> Fault:
    match fault:
        case LostMessages(what=what, calls=calls):
            return Fault(LOST[what], target=node.peer, times=calls)
        case RepeatedMessages(calls=calls):
            return Fault(FaultKind.REPEAT, target=node.peer, times=calls)
        case LateMessages(calls=calls, seconds=seconds):
            return Fault(FaultKind.DELAY, target=node.peer, times=calls, wait=_after(seconds))


def _lies(how: str, node: Node) -> list[Fault]:
    """What befalls calls to a hostile node: of its answers, as it has them; nothing where it lies otherwise. A node
    that nobody calls so has told no lie."""
    if how in _GRADIENTS:
        return [Fault(FaultKind.TAMPER, target=node.peer, method="microbatch", change=_GRADIENTS[how])]
    if how == "busy":
        return [Fault(FaultKind.REFUSE, target=node.peer, method=method) for method in ("microbatch", "outer.propose")]
    return [Fault(FaultKind.DELAY, target=node.peer, method="outer.open", wait=_for_ever)] if how == "mute" else []


def _after(seconds: float) -> Callable[[], Awaitable[None]]:
    return lambda: asyncio.sleep(seconds)
