"""One phase, changed by one object, and only as the table allows."""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path
from typing import cast

import pytest

from noloco_node.averaging.session import LEAVE, PROPOSE, Acceptance, LeaveExchange, Proposal, Session
from noloco_node.averaging.side import (
    BEGINNING_CHANGES,
    DIALLED,
    TRANSITIONS,
    Change,
    Engagement,
    NotAllowed,
    Phase,
    after,
)
from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.calls import NOTHING, Nothing, call, on
from noloco_node.transport.memory import MemoryTransport
from tests.swarm.test_exchange import two_replicas

PACKAGE = Path(__file__).parents[2] / "noloco_node"
SMALLER = PeerId("0-a-smaller-id")
THEIRS = "7" * 32

ALLOWED = {
    Phase.FREE: "propose agree step_alone take_state",
    Phase.PROPOSING: "accepted refused agree",
    Phase.LEADING: "complete break_off",
    Phase.AGREED: "open break_off",
    Phase.OPENING: "opened break_off",
    Phase.ANSWERING: "complete break_off",
    Phase.ALONE: "complete break_off",
    Phase.COMMITTING: "done",
    Phase.TAKING_STATE: "state_taken",
}


def session() -> Session:
    """A session with some partner."""
    return Session(THEIRS, SMALLER, "dialled", None, None)  # type: ignore[arg-type]


def engaged_in(phase: Phase, present: Session) -> Engagement:
    """By the shortest way there from free."""
    ways: dict[Phase, tuple[Change, ...]] = {Phase.FREE: ()}
    for before in Phase:
        for change, to in TRANSITIONS[before].items():
            ways.setdefault(to, (*ways[before], change))
    engagement = Engagement()
    for change in ways[phase]:
        if change in BEGINNING_CHANGES:
            engagement.begin(change, present)
        else:
            engagement.go_on(present, change)
    assert engagement.phase is phase
    return engagement


@pytest.mark.parametrize(("phase", "change"), list(product(Phase, Change)))
def test_each_change_in_each_phase_is_allowed_or_refused_as_it_is_written_here(phase: Phase, change: Change) -> None:
    """What is not in the list is impossible, and leaves everything as it was."""
    engagement, new = engaged_in(phase, session()), session()
    present = engagement.session
    allowed = change in ALLOWED[phase].split()
    ways = {"begin": lambda: engagement.begin(change, new), "go on": lambda: engagement.go_on(present, change)}
    right = ways.pop("begin" if change in BEGINNING_CHANGES else "go on")
    for wrong in (*ways.values(), *(() if allowed else (right, lambda: after(phase, change)))):
        with pytest.raises(NotAllowed):
            wrong()
        assert (engagement.phase, engagement.session) == (phase, present)
    if allowed:
        right()
        assert engagement.phase is after(phase, change) is TRANSITIONS[phase][change]
        over = engagement.phase is Phase.FREE
        assert engagement.session is (new if change in BEGINNING_CHANGES else None if over else present)


def test_every_phase_can_be_reached_and_left() -> None:
    """From free and back to free; a commit has no other way than to its end, and only before it can one give up."""

    def reached(start: Phase) -> set[Phase]:
        seen, new = {start}, {start}
        while new := {to for phase in new for to in TRANSITIONS[phase].values()} - seen:
            seen |= new
        return seen

    assert all(reached(phase) == set(Phase) for phase in Phase)
    assert {change for changes in TRANSITIONS.values() for change in changes} == set(Change)
    assert all(TRANSITIONS[phase][Change.BREAK_OFF] is Phase.FREE for phase in DIALLED)
    assert {phase for phase in Phase if Phase.COMMITTING in TRANSITIONS[phase].values()} == {
        Phase.LEADING,
        Phase.ANSWERING,
        Phase.ALONE,
    }


def test_who_is_no_longer_present_changes_nothing() -> None:
    """Not even under the present one's name: a namesake may have come meanwhile."""
    engagement, former, present = Engagement(), session(), session()
    engagement.begin(Change.AGREE, former)
    engagement.go_on(former, Change.BREAK_OFF)
    engagement.begin(Change.AGREE, present)
    with pytest.raises(NotAllowed, match="is over"):
        engagement.go_on(former, Change.OPEN)
    assert not engagement.holds(former)
    assert engagement.holds(present, Phase.AGREED)
    assert not engagement.holds(present, Phase.OPENING)


def _assigned(tree: ast.AST) -> set[str]:
    """Attributes of a session, and an engagement's own fields, that are assigned anywhere."""
    found = set[str]()
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in (each for given in targets for each in (given.elts if isinstance(given, ast.Tuple) else [given])):
            if isinstance(target, ast.Attribute):
                owner = ast.unparse(target.value)
                if owner.endswith(("session", "engagement")) or target.attr in ("_phase", "_session"):
                    found.add(ast.unparse(target))
    return found


def test_one_object_writes_the_phase_and_a_session_writes_itself() -> None:
    """Nobody else assigns to either, in the whole room and where it is used."""
    rooms = [path for room in ("averaging", "node") for path in (PACKAGE / room).glob("*.py")]
    written = {path.stem: _assigned(ast.parse(path.read_text(encoding="utf-8"))) for path in rooms}
    assert {name: found for name, found in written.items() if found} == {"side": {"self._phase", "self._session"}}, (
        "the law sees what it looks for, and nothing else"
    )


async def test_an_own_proposal_is_void_once_the_partners_stands_and_is_taken_back_if_it_is_accepted() -> None:
    """Two dial each other, and the one with the smaller id agrees all the same: it is told, and need not wait."""
    async with two_replicas() as (made, _, right):
        partner, left_behind = MemoryTransport(made.network, SMALLER), list[str]()

        async def accept(_peer: PeerId, own: Proposal) -> Acceptance:
            theirs = own.model_copy(update={"exchange": THEIRS})
            await call(partner, right.context.transport.peer_id, PROPOSE, theirs, seconds=5.0)
            assert right.averaging.side.engagement.phase is Phase.AGREED
            left_behind.append(own.exchange)
            return Acceptance(tokens=64)

        async def leave(_peer: PeerId, gone: LeaveExchange) -> Nothing:
            left_behind.remove(gone.exchange)
            return NOTHING

        on(partner, PROPOSE, accept)
        on(partner, LEAVE, leave)
        assert not await right.averaging.dial(SMALLER)
        assert not left_behind
        present = cast(Session, right.averaging.side.engagement.session)
        assert (present.exchange, present.role) == (THEIRS, "dialled")
        await call(partner, right.context.transport.peer_id, LEAVE, LeaveExchange(exchange=THEIRS), seconds=5.0)
        assert not right.averaging.under_way
        await partner.close()


async def test_a_step_alone_waits_for_nobody_and_takes_nobodys_place() -> None:
    """While a stage peer's state is taken over, or an exchange is open, it is refused as the mistake that it would
    be."""
    async with two_replicas() as (_, left, _right):
        with left.averaging.taking_state():
            with pytest.raises(NotAllowed):
                await left.averaging.step_alone()
            with pytest.raises(NotAllowed), left.averaging.taking_state():
                pass
            assert left.averaging.side.engagement.phase is Phase.TAKING_STATE
        await left.averaging.step_alone()
        assert not left.averaging.under_way
