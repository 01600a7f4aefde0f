"""Why p2pd did not start: from what can be seen to the likely cause and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.addresses import peers_unreachable

BOOTSTRAP_FAILED = "failed to connect to bootstrap peers"
"""p2pd says this before it ends, when every initial peer accepted a TCP connection and none was a peer."""
ADDRESS_IN_USE = "address already in use"
NOT_THIS_PEER = "something listens there, but it is not this peer"
NOT_IN_TIME = f"{NOT_THIS_PEER}, or it is too busy to answer"
"""p2pd does not tell which of these two it was."""
BUSY_LOAD = 2.0
"""A machine counts as busy from so many processes waiting for each core on."""


@dataclass(frozen=True, slots=True)
class FailedStart:
    """What is known of a start that came to nothing."""

    what: str
    """`did not start within ...`, or how it ended."""
    output: str
    """p2pd's last words."""
    status: int | None
    """Exit status; None where it still ran, negative where a signal ended it."""
    process: str
    """What the system said of the process at that moment, as psutil names it; empty where nothing."""
    load: float
    """Processes waiting for each core, as the mean over the last minute."""
    peers: Sequence[str]
    """Initial peers that it was told to connect to."""
    probe: bool
    """It was the short-lived one that asks whether the identity is free."""


def explain(failed: FailedStart) -> UserError:
    """The error for a person: what happened, the likely cause, the remedy."""
    if BOOTSTRAP_FAILED in failed.output and failed.peers:
        return peers_unreachable(dict.fromkeys(failed.peers, NOT_IN_TIME))
    cause, remedy = _likely(failed)
    code = ExitCode.PORT_IN_USE if ADDRESS_IN_USE in failed.output else ExitCode.P2P_DAEMON
    purpose = " (the one that asks whether this identity is free)" if failed.probe else ""
    return UserError(
        code,
        f"hivemind's p2pd{purpose} {failed.what}. Likely cause: {cause}. Its last words:\n  {failed.output}",
        remedy,
    )


def _likely(failed: FailedStart) -> tuple[str, str]:
    longer = "wait and start again, or raise node.p2pd_start_seconds"
    if ADDRESS_IN_USE in failed.output:
        remedy = "stop the program that uses the port, or choose another with --port"
        return "the port was taken while it started", remedy
    if failed.status == -9:
        return "the system killed it, most often for want of memory", "free memory, or look into the system's log"
    if failed.status is not None:
        return (
            "it refused its arguments or its files",
            "see its last words, which name what it does not take; if they name nothing of yours, report this",
        )
    if failed.process == "disk-sleep":
        return "a slow disk, which it still waits for", longer
    if failed.process == "stopped":
        return "somebody stopped its process", "let it go on (kill -CONT), or start the node again"
    if failed.load > BUSY_LOAD:
        return f"a busy machine: {failed.load:.1f} processes wait for each core", longer
    if failed.peers:
        stuck = "the identity probe is stuck: " if failed.probe else ""
        return (
            f"{stuck}a dead seed, which takes connections and answers nothing ({', '.join(failed.peers)})",
            "name other initial peers, or none of these; the identity is fine"
            if failed.probe
            else "name other initial peers, or none of these",
        )
    return "none that can be seen", f"{longer}; if it happens again, report this"
