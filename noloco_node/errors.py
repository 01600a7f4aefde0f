"""What a person sees when something cannot go on: one message, one remedy, one exit code."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable, Sequence
from enum import IntEnum

SHOWN = 8
"""A message names, and a screen shows, at most so many of what there may be many of."""


class ExitCode(IntEnum):
    """Exit codes of `noloco-node`, the same for every command."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    CONFIG = 3
    PEERS_UNREACHABLE = 4
    PORT_IN_USE = 5
    IDENTITY_TAKEN = 6
    RUN_FOLDER = 7
    P2P_DAEMON = 8
    NO_STATE_SOURCE = 9
    WRONG_RUN = 10
    DATA = 11
    NODE_DIED = 12
    CHECK_FAILED = 20
    NOT_ADMITTED = 21
    INTERRUPTED = 130


EXIT_MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "the command did what was asked",
    ExitCode.FAILURE: "an unexpected failure: a defect of noloco-node, please report it",
    ExitCode.USAGE: "the command line was wrong",
    ExitCode.CONFIG: "a setting is wrong: unknown key, value out of bounds, or settings that contradict each other",
    ExitCode.PEERS_UNREACHABLE: "no initial peer or no hub answered, or nothing was trained here for too long",
    ExitCode.PORT_IN_USE: "a port that the node must listen on is taken",
    ExitCode.IDENTITY_TAKEN: "another running node uses the same identity file",
    ExitCode.RUN_FOLDER: "the run folder cannot be written, holds another run, or is in use by another node",
    ExitCode.P2P_DAEMON: "hivemind's p2pd did not start, or died",
    ExitCode.NO_STATE_SOURCE: "the run is under way and no replica of a stage gave its state, or its part of a text",
    ExitCode.WRONG_RUN: "the peer serves another run (its RunSpec differs) or speaks another protocol version",
    ExitCode.DATA: "the training text, or the weights to start from, cannot be used",
    ExitCode.NODE_DIED: "a node of the local swarm died before the run's end",
    ExitCode.CHECK_FAILED: "a check of this machine or its network failed: disk, memory, clock, versions, reachability",
    ExitCode.NOT_ADMITTED: "the run does not admit this node: not listed, or no invitation that holds",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C, SIGTERM or a closed terminal",
}


def describe_exit(code: int) -> str:
    """How a process of noloco-node ended, for a person. A negative code is the signal that killed it."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    meaning = EXIT_MEANINGS[ExitCode(code)] if code in set(ExitCode) else "no exit code of noloco-node"
    return f"exit code {code}: {meaning}"


class UserError(Exception):
    """Something the person at the keyboard can change.

    `message` names the setting and its value; `remedy` says what to do about it.
    """

    def __init__(self, exit_code: ExitCode, message: str, remedy: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}"

    def __reduce__(self) -> tuple[type[UserError], tuple[ExitCode, str, str]]:
        return UserError, (self.exit_code, self.message, self.remedy)  # so that one comes back from another process


def version_remedy(protocol: int, others: int, their_release: str) -> str:
    """The remedy if this node speaks one protocol version and its peers, with `their_release`, another."""
    install = f"install noloco-node {their_release} here"
    if others > protocol:
        return f"the peers are newer: {install}, or a newer one that speaks protocol version {others}"
    return f"the peers are older: {install}, or have all nodes of the run upgraded to this node's version"


def near_words(word: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
    """What may have been meant by a word that is none of the known ones, the nearest first."""
    return difflib.get_close_matches(word, list(known), n=most, cutoff=cutoff)


def suggestion(meant: Sequence[str], between: str = "or") -> str:
    """`did you mean …?`, for the end of a sentence; nothing where nothing is near."""
    return f"did you mean {f' {between} '.join(meant)}?" if meant else ""
