"""What a node does when it is told to stop, or to rest: by a person (`pause`, `resume`), or by the hours in which it
works."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from noloco_node import ambient
from noloco_node.aio import Pulse
from noloco_node.ambient import LOOK_SECONDS
from noloco_node.config.node_settings import Hours, as_time, inside, next_begin
from noloco_node.errors import ExitCode, UserError
from noloco_node.node.way_out import AT_ONCE_SECONDS, LISTENING, WayOut

logger = logging.getLogger(__name__)


Word = Literal["pause", "resume"]


@dataclass(frozen=True, slots=True)
class PauseState:
    """What is known of a node's rest. `inside`: the clock stands within its hours."""

    by_hand: bool = False
    """A person has told it to pause, and not to go on since."""
    despite_hours: bool = False
    """A person has told it to go on outside its hours: until they have come and gone once more."""
    inside: bool = True

    @property
    def rests(self) -> bool:
        return self.by_hand or not (self.inside or self.despite_hours)


def told(state: PauseState, word: Word) -> PauseState:
    """After a person's word."""
    if word == "pause":
        return PauseState(by_hand=True, inside=state.inside)
    return PauseState(despite_hours=not state.inside, inside=state.inside)


def looked(state: PauseState, *, inside: bool) -> PauseState:
    """After a look at the clock."""
    return PauseState(state.by_hand, state.despite_hours and not inside, inside)


class PauseSwitch:
    """Follows a person's words and the machine's clock, and tells those that wait for a change."""

    def __init__(self, hours: Hours) -> None:
        self._hours = hours
        self._changed = Pulse()
        self._state = looked(PauseState(), inside=inside(hours, _minute()))

    @property
    def rests(self) -> bool:
        """Whether the node is to rest now."""
        return self._state.rests

    def told(self, word: Word) -> None:
        """A person has said so."""
        self._take(told(self._state, word))

    def why(self) -> str:
        """Why it rests, and what ends that, in one line."""
        if self._state.by_hand:
            return "paused: device and line are free; noloco-node resume goes on"
        begins = f"{as_time(next_begin(self._hours, _minute()))} {time.localtime(ambient.wall()).tm_zone}"
        return f"paused until {begins} (node.hours): device and line are free; noloco-node resume goes on at once"

    async def begins(self) -> None:
        """Wait until the node is to rest."""
        while not self.rests:
            await self._changed.wait()

    async def ends(self) -> None:
        """Wait until the node is to work."""
        while self.rests:
            await self._changed.wait()

    async def keep(self) -> None:
        """Follow the machine's clock, until cancelled."""
        while self._hours:
            await asyncio.sleep(LOOK_SECONDS)
            self._take(looked(self._state, inside=inside(self._hours, _minute())))

    def _take(self, state: PauseState) -> None:
        before, self._state = self._state, state
        if state.rests != before.rests:
            logger.info("%s", self.why() if state.rests else "going on after the pause")
            self._changed.fire()


def _minute() -> int:
    """The minute of the day, by the machine's clock and place."""
    now = time.localtime(ambient.wall())
    return 60 * now.tm_hour + now.tm_min


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The last one comes as a terminal closes, as at the end of a session over SSH."""
WORDS: dict[int, Word] = {signal.SIGUSR1: "pause", signal.SIGUSR2: "resume"}
"""These signals tell a node to rest and to go on; `noloco-node pause` and `resume` send them."""


def heeded_signals() -> tuple[signal.Signals, ...]:
    """Those that tell this process to leave. What its starter has it ignore is none, as SIGHUP under nohup."""
    return tuple(number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)


class Interrupts:
    """Signals to leave: the first asks for an orderly end, the second (or one before training) cancels at once.

    From then on the node has `seconds` for its `way_out`, if it has one, whatever makes it leave. If it is to leave at
    once, it has `AT_ONCE_SECONDS`.
    """

    def __init__(self, way_out: WayOut | None = None, seconds: float = AT_ONCE_SECONDS) -> None:
        self._main = asyncio.current_task()
        self._stop: asyncio.Event | None = None
        self._way_out, self._seconds = way_out, seconds
        self._heard = 0
        self.asked = False
        """A signal has come."""
        self.cancelled_by_signal = False
        self.at_rest = False
        """The node is paused, or was as it was cancelled: nothing is under way."""
        self.told: Callable[[], None] = lambda: None
        """Called when a signal has come."""
        self.word: Callable[[Word], None] = _nothing_to_pause
        """Called with the word of a signal that is none to leave."""

    def graceful(self, stop: asyncio.Event) -> None:
        """From now on the first signal sets `stop`; at once where it has come already."""
        self._stop = stop
        if self.asked:
            stop.set()

    def heard(self) -> None:
        """A signal has come: on the thread that hears them, whatever the event loop does."""
        self._heard += 1
        if self._way_out is not None:
            in_order = self._heard == 1 and self._stop is not None
            seconds = self._seconds if in_order else min(self._seconds, AT_ONCE_SECONDS)
            self._way_out.begin(seconds, ExitCode.INTERRUPTED)

    def on_signal(self) -> None:
        """A signal has come: on the event loop."""
        self.told()
        if self._stop is not None and not self.asked:
            self.asked = True
            logger.info("stopping: finishing what is under way; once more to leave at once")
            self._stop.set()
        else:
            self._cancel()

    def on_word(self, word: Word) -> None:
        """A signal has said this: on the event loop."""
        if self.asked or self.cancelled_by_signal:
            logger.warning("leaving already: '%s' changes nothing, and all is saved; the same command goes on", word)
        else:
            self.word(word)

    def leaves(self, code: ExitCode = ExitCode.FAILURE) -> None:
        """The node is on its way out; if that takes too long, it ends with this code, or INTERRUPTED after a signal."""
        if self._way_out is not None:
            self._way_out.begin(self._seconds, ExitCode.INTERRUPTED if self._heard else code)

    def moves_on(self) -> None:
        """The node goes on at another stage. Until it trains there a signal cancels at once. So does a signal that has
        come since it left: nobody is to wait for a state that is on its way."""
        self._stop = None
        if self.asked:
            self._cancel()
        elif self._way_out is not None and not self._heard:  # else the loop has yet to hear of it, and to cancel
            self._way_out.over()

    def _cancel(self) -> None:
        if self._main is not None:
            self.cancelled_by_signal = True
            self._main.cancel()

    @contextlib.contextmanager
    def leaving(self, *, only_failed: bool = False) -> Generator[None]:
        """When this block has ended, however it has (or `only_failed`), the node is on its way out. `moves_on` takes
        that back after a move or a pause."""
        try:
            yield
        except BaseException as error:
            self.leaves(error.exit_code if isinstance(error, UserError) else ExitCode.FAILURE)
            raise
        if not only_failed:
            self.leaves(ExitCode.OK)


@contextlib.contextmanager
def interruptible(way_out: WayOut | None = None, seconds: float = AT_ONCE_SECONDS) -> Generator[Interrupts]:
    """The signals of this process, as long as the block lasts; see `Interrupts`."""
    loop = asyncio.get_running_loop()
    interrupts = Interrupts(way_out, seconds)
    if way_out is not None:
        way_out.loop = loop

    def heard(number: int) -> None:
        word = WORDS.get(number)
        if word is None:
            interrupts.heard()
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            if word is None:
                loop.call_soon_threadsafe(interrupts.on_signal)
            else:
                loop.call_soon_threadsafe(interrupts.on_word, word)

    with _hearing(heard):
        yield interrupts


@contextlib.contextmanager
def _hearing(heard: Callable[[int], None]) -> Generator[None]:
    """Call `heard` on a thread of its own with the number of each signal: the event loop may hang."""
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    signals = (*heeded_signals(), *map(signal.Signals, WORDS))

    def listen() -> None:
        while numbers := ear.recv(64):
            for number in numbers:
                if number in signals:
                    heard(number)

    def nothing(number: int, frame: FrameType | None) -> None:
        """The system's handler has written its number to the socket; without one of ours it would end the process."""

    thread = threading.Thread(target=listen, name=LISTENING, daemon=True)
    thread.start()
    others_ear = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, nothing) for number in signals}
    for number in signals:
        signal.siginterrupt(number, False)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(others_ear)
        mouth.close()
        thread.join()
        ear.close()


def _nothing_to_pause(word: Word) -> None:
    logger.info("'%s' changes nothing: only a node that trains can be paused", word)
