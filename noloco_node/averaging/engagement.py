"""A replica's outer steps are engaged in one thing at a time: a phase, its allowed changes as a pure function, one
writer.

That thing is an exchange on either side of it, a step alone, or the taking of a stage peer's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from noloco_node.averaging.session import Session


class Phase(StrEnum):
    """What this replica is in."""

    FREE = "free"
    PROPOSING = "proposing"
    """An own proposal is under way."""
    LEADING = "leading"
    """It was accepted: openings and chunks go to the partner."""
    AGREED = "agreed"
    """A partner's proposal was accepted; its opening is awaited."""
    OPENING = "opening"
    """The partner's opening is worked on."""
    ANSWERING = "answering"
    """Both openings are known: the partner's chunks are answered."""
    ALONE = "alone"
    """A step without a partner is prepared."""
    COMMITTING = "committing"
    """All is there. From here on it is carried to its end."""
    TAKING_STATE = "taking_state"
    """A stage peer's state is fetched and loaded: an exchange would mix the two."""


class Change(StrEnum):
    """What may happen to it."""

    PROPOSE = "propose"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    """The partner's no, or no answer."""
    AGREE = "agree"
    """To a partner's proposal; an own one that is under way to it is void then."""
    OPEN = "open"
    OPENED = "opened"
    STEP_ALONE = "step_alone"
    COMPLETE = "complete"
    BREAK_OFF = "break_off"
    DONE = "done"
    TAKE_STATE = "take_state"
    STATE_TAKEN = "state_taken"
    """The taking of a state is over, with or without success."""


TRANSITIONS: Mapping[Phase, Mapping[Change, Phase]] = MappingProxyType(
    {
        Phase.FREE: {
            Change.PROPOSE: Phase.PROPOSING,
            Change.AGREE: Phase.AGREED,
            Change.STEP_ALONE: Phase.ALONE,
            Change.TAKE_STATE: Phase.TAKING_STATE,
        },
        Phase.PROPOSING: {Change.ACCEPTED: Phase.LEADING, Change.REFUSED: Phase.FREE, Change.AGREE: Phase.AGREED},
        Phase.LEADING: {Change.COMPLETE: Phase.COMMITTING, Change.BREAK_OFF: Phase.FREE},
        Phase.AGREED: {Change.OPEN: Phase.OPENING, Change.BREAK_OFF: Phase.FREE},
        Phase.OPENING: {Change.OPENED: Phase.ANSWERING, Change.BREAK_OFF: Phase.FREE},
        Phase.ANSWERING: {Change.COMPLETE: Phase.COMMITTING, Change.BREAK_OFF: Phase.FREE},
        Phase.ALONE: {Change.COMPLETE: Phase.COMMITTING, Change.BREAK_OFF: Phase.FREE},
        Phase.COMMITTING: {Change.DONE: Phase.FREE},
        Phase.TAKING_STATE: {Change.STATE_TAKEN: Phase.FREE},
    }
)
"""Each phase allows these changes and no others."""

BEGINNING_CHANGES = frozenset(TRANSITIONS[Phase.FREE])
"""These changes begin something new."""
DIALLED = (Phase.AGREED, Phase.OPENING, Phase.ANSWERING)
"""In these phases an exchange that a partner has dialled can still be given up."""


class NotAllowed(RuntimeError):
    """The phase does not allow this change, or the session is no longer the present one. It is a mistake of this
    program, never of a peer."""


def after(phase: Phase, change: Change) -> Phase:
    """The phase after `change`. Raises NotAllowed."""
    try:
        return TRANSITIONS[phase][change]
    except KeyError:
        raise NotAllowed(f"{change} while {phase}") from None


class Engagement:
    """The phase and the session that it is about. Nobody else changes them."""

    def __init__(self) -> None:
        self._phase = Phase.FREE
        self._session: Session | None = None

    @property
    def phase(self) -> Phase:
        """What this replica is in."""
        return self._phase

    @property
    def session(self) -> Session | None:
        """What the phase is about; None where that is no outer step."""
        return self._session

    def begin(self, change: Change, session: Session | None = None) -> None:
        """Engage in something new, in place of an own proposal if that was crossed. Raises NotAllowed."""
        if change not in BEGINNING_CHANGES:
            raise NotAllowed(f"{change} begins nothing")
        self._phase, self._session = after(self._phase, change), session

    def go_on(self, session: Session | None, change: Change) -> None:
        """A change of what this replica is engaged in. Raises NotAllowed, also where that is not `session`."""
        if session is not self._session or change in BEGINNING_CHANGES:
            raise NotAllowed(f"{change} of an outer step that is over")
        self._phase = after(self._phase, change)
        if self._phase is Phase.FREE:
            self._session = None

    def holds(self, session: Session, *phases: Phase) -> bool:
        """Tell whether `session` is the present one, and in one of `phases` if any are named.

        During any await it may have ended and another have begun, even of the same name.
        """
        return session is self._session and (not phases or self._phase in phases)
