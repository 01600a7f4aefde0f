"""The life of a run in which this node takes part. It has nothing to do with peers in another life.

A RunSpec's hash names what is trained, and stays the same when somebody begins the run anew with the same file. A birth
(`BirthId`), an id that the run's first node draws, names one training of it.

A node keeps the birth of the state in its folder. Otherwise it takes that of the peers by which it
comes in, and if none names one it draws one. A drawn birth can be exchanged for that of others until this node has
worked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from noloco_node import ambient
from noloco_node.bootstrap.hello import Hello, hello_or_none
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.records import REFRESH_SECONDS, Directory, LiveRecord, PeerRecord
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.addresses import parse_address
from noloco_node.identity.peer_id import PeerId
from noloco_node.tallies import PeerTable
from noloco_node.telemetry.events import Warned
from noloco_node.telemetry.words import as_utc
from noloco_node.transport.calls import ASKED_AT_ONCE
from noloco_node.transport.interface import Transport

logger = logging.getLogger(__name__)


def draw_birth() -> str:
    """A birth of this moment."""
    return f"{min(int(ambient.wall()), 0xFFFFFFFF):08x}{ambient.token(8)}"


def born_at(birth: str) -> float:
    """When its first node drew it, by that node's clock: seconds since 1970."""
    return float(int(birth[:8], 16))


def most_named(births: Iterable[str]) -> str | None:
    """The birth that is named most often, of several the elder. None where none is named."""
    named = Counter(births)
    return min(named, key=lambda birth: (-named[birth], birth), default=None)


class OwnLife:
    """Implements `Screen`: deals with peers of the same birth, and with those that name none.

    `settled`: the birth was kept or told. One that was drawn settles when this node has worked (`settle`), and until
    then it deals with everybody.
    """

    def __init__(self, birth: str, *, settled: bool = True) -> None:
        self.birth = birth
        self.settled = settled
        self.changed: Callable[[str], None] = lambda _birth: None
        """Told the birth that has settled, to be kept."""
        self._elsewhere = PeerTable[PeerId, str]()
        """Births that peers have named in their last records, other than the own one."""
        self.changes = 0
        """See `Screen.changes`."""

    def deals(self, peer: PeerId, row: LiveRecord) -> bool:
        """Tell whether the record is of a peer in the same life. Others are refused from then on (`admits`)."""
        theirs = row.record.birth
        if theirs is None or self.bears(row.record):
            self._elsewhere.pop(peer, None)
            return True
        if self._elsewhere.get(peer) != theirs:
            self._elsewhere[peer] = theirs
        return not self.settled

    def bears(self, record: PeerRecord) -> bool:
        """Whether a record of any age is of this life, or names none."""
        return record.birth in (None, self.birth)

    def admits(self, peer: PeerId) -> bool:
        """Whether this node answers a peer: nothing is known of another life of it."""
        return not self.settled or self._elsewhere.get(peer, self.birth) == self.birth

    def elsewhere(self) -> dict[PeerId, str]:
        """Peers whose last record named another birth, and that birth."""
        return {peer: birth for peer, birth in self._elsewhere.items() if birth != self.birth}

    def choose(self, named: Sequence[str]) -> None:
        """Take the birth that most others name, this node's own vote included, while it is not settled."""
        chosen = most_named([*named, self.birth])
        if self.settled or chosen is None or chosen == self.birth:
            return
        logger.info("takes part in the life of the run that began on %s, as others do", as_utc(born_at(chosen)))
        self.birth, self.changes = chosen, self.changes + 1

    def settle(self) -> None:
        """This node has worked: from now on other lives are strangers."""
        if not self.settled:
            self.settled, self.changes = True, self.changes + 1
            self.changed(self.birth)


class LifeWatch:
    """Watches for peers of other lives: it joins them while this node has not worked, and else reports them.

    `directory` is the one with everybody in it. `worked()` says whether this node has worked, or a seed seen work.
    """

    def __init__(self, life: OwnLife, transport: Transport, directory: Directory, spec: RunSpec) -> None:
        self._life = life
        self._transport = transport
        self._directory = directory
        self._spec = spec
        self._rng = ambient.chance()
        self._told: set[str] = set()
        self._worked_at: float | None = None
        self.worked: Callable[[], bool] = lambda: False
        """Whether this node has trained; of a seed, whether it has seen somebody train."""
        self.emit: Callable[[Warned], None] = lambda warning: logger.warning(warning.detail)
        """Takes warnings for the user that runs the node."""

    async def keep(self) -> None:
        """Look every two seconds, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(min(REFRESH_SECONDS, self._spec.limits.record_seconds / 5))

    async def look(self) -> None:
        """Judge what the last view shows."""
        named = self._named()
        if not self._life.settled:
            known = self._transport.peer_stats
            births = [birth for peer, birth in named.items() if known.answers(peer)]
            self._life.choose(births)
            self._settle_if_due(births)
            return
        await self._say_if_another(named)

    def _settle_if_due(self, births: Sequence[str]) -> None:
        """Settle once this node has worked and all that answer name its birth. At the latest that is when those that
        had another one must have renewed their records."""
        now = self._directory.now()
        if self._worked_at is None and self.worked():
            self._worked_at = now
        if self._worked_at is None:
            return
        late = now - self._worked_at > self._spec.limits.record_seconds
        if late or all(birth == self._life.birth for birth in births):
            self._life.settle()

    def _named(self) -> dict[PeerId, str]:
        """The birth that each peer names in its record."""
        view, now = self._directory.view, self._directory.now()
        rows = [record for stage in range(len(view.stages)) for record in view.live(stage, now)]
        return {
            PeerId(record.peer_id): record.birth
            for record in rows
            if record.birth is not None and record.peer_id != self._transport.peer_id
        }

    async def _say_if_another(self, named: dict[PeerId, str]) -> None:
        """A record alone proves nothing: its peer is asked."""
        others = [peer for peer, birth in named.items() if birth != self._life.birth and birth not in self._told]
        # Anybody can make up births.
        if len(self._told) >= 3 or not others:
            return
        asked = self._rng.sample(others, min(ASKED_AT_ONCE, len(others)))
        hellos = await asyncio.gather(*(hello_or_none(self._transport, peer) for peer in asked))
        for peer, hello in zip(asked, hellos, strict=True):
            same = hello is not None and hello.run == self._spec.run_id and hello.birth == named[peer]
            if same and named[peer] not in self._told:
                self._told.add(named[peer])
                self.emit(another_life(self._spec, self._life.birth, named[peer], peer))


def another_life(spec: RunSpec, own: str, theirs: str, peer: PeerId) -> Warned:
    """What to say where two nodes have begun the same run, and meet."""
    return Warned(
        what="another_life",
        detail=f"RUN '{spec.name}' HAS TWO BEGINNINGS: this node takes part in the one of {as_utc(born_at(own))}, peer "
        f"{peer} in the one of {as_utc(born_at(theirs))}. They are two swarms, and never train together. If you meant "
        "one run, stop the nodes of one of them and start them in new folders with --initial-peers and an address of "
        "the other",
    )


async def agree_birth(transport: Transport, spec: RunSpec, joined: Sequence[str], kept: str | None) -> OwnLife:
    """The life in which this node takes part.

    It is that of its `kept` state, else the one that most of the peers at these addresses name, else a new one. Peers
    that do not train yet count only if no other names a birth.

    Raises UserError: RUN_FOLDER if the state kept is of one life and most of those peers train in another. It raises
    WRONG_RUN if it has kept none and they are of several lives, none of which is most.
    """
    asked = await asyncio.gather(*(hello_or_none(transport, parse_address(address).peer) for address in joined))
    hellos = [hello for hello in asked if hello is not None and hello.run == spec.run_id]
    trained = _births(hello for hello in hellos if hello.over is not None)
    if kept is not None:
        if 2 * sum(birth != kept for birth in trained) > len(trained):
            raise another_life_kept(spec, kept, most_named(trained) or kept)
        return OwnLife(kept)
    said = trained or _births(hellos)
    chosen = most_named(said)
    if chosen is None:
        return OwnLife(draw_birth(), settled=False)
    if trained and 2 * trained.count(chosen) <= len(trained):
        raise _several_lives(spec, trained)
    return OwnLife(chosen)


def _births(hellos: Iterable[Hello]) -> list[str]:
    return [hello.birth for hello in hellos if hello.birth is not None]


def another_life_kept(spec: RunSpec, kept: str, theirs: str) -> UserError:
    """The error for a node that comes home with a state of another life of its run."""
    return UserError(
        ExitCode.RUN_FOLDER,
        f"run '{spec.name}' was begun anew: node.run_folder holds a state of the life that began on "
        f"{as_utc(born_at(kept))}, and the peers train in the one that began on {as_utc(born_at(theirs))}. A state of "
        "one is never mixed into the other",
        "to take part in the new one name another folder with --run-folder, and keep this one as long as you want its "
        "weights; to go on with the old one name peers of it, or leave --initial-peers out",
    )


def _several_lives(spec: RunSpec, births: Sequence[str]) -> UserError:
    began = ", ".join(as_utc(born_at(birth)) for birth in sorted(set(births)))
    return UserError(
        ExitCode.WRONG_RUN,
        f"run '{spec.name}' has several beginnings ({began}), and the addresses belong to nodes of each: they are "
        "swarms of their own",
        "name addresses of one of them only; if you began the run twice by mistake, stop one of them",
    )
