"""A stranger joins a real swarm that is under way, with one address: of its own configuration, or of nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from noloco_node.config.load import load_config
from noloco_node.errors import ExitCode
from noloco_node.launch.local_swarm import LocalSwarm
from noloco_node.telemetry.events import AnyEvent, EventReader, InnerStep, NodeStarted, NodeStopped, OuterStep
from tests.chaos.paced_node import OPERATION_SECONDS
from tests.chaos.swarm import PACED, program
from tests.fork_server import spawning
from tests.made_runs import OWN_TEXT
from tests.support import eventually, printed_file

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(900)]

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
DEAD = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWKrCeA5nCWnQ5gm5FLAszTb6cDMk2hX8BH7Hj8MhGeFx9"
ENDLESS = "run.inner.target_tokens=1_000_000_000"


@contextlib.asynccontextmanager
async def node(folder: Path, *arguments: str) -> AsyncIterator[list[AnyEvent]]:
    """A daemon of this command; its events so far. Its terminal closes at the end of the block. What it prints goes
    to `folder`/printed. A device of a set speed where OPERATION_SECONDS is in the environment."""
    with printed_file(folder) as printed:
        process = await asyncio.create_subprocess_exec(
            *program(), *arguments, "--run-folder", str(folder), stdout=printed, stderr=printed
        )
    reader, events = EventReader(folder / "events.jsonl"), list[AnyEvent]()

    async def follow() -> None:
        while True:
            events.extend(reader.new_events())
            await asyncio.sleep(0.1)

    following = asyncio.create_task(follow())
    try:
        yield events
        process.send_signal(signal.SIGHUP)
        try:
            assert await asyncio.wait_for(process.wait(), 180) == ExitCode.INTERRUPTED
        except TimeoutError:
            said = (folder / "printed").read_text(encoding="utf-8").splitlines()[-20:]
            raise AssertionError(f"{folder.name} did not leave: {said}, {events[-5:]}") from None
        events.extend(reader.new_events())
    finally:
        following.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def looked_at(address: str) -> tuple[str, str]:
    """What `eval` and `generate` say of a run under way."""

    async def said(*arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "noloco_node", *arguments, stdout=asyncio.subprocess.PIPE
        )
        told, _ = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == ExitCode.OK, arguments
        return told.decode()

    speak = ("generate", address, "--prompt", "import ", "--seed", "3", "--max-tokens", "8")
    scores, text = await asyncio.gather(said("eval", address, "--set", OWN_TEXT[1]), said(*speak))
    return scores, text


async def test_a_late_joiner_copies_a_stage_peer_trains_and_leaves_in_order(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a stage by itself, starts from a stage peer's state at its clock, and averages with stage peers. On
    SIGTERM it says goodbye: the others see it come and go. Before that `eval` and `generate` look on."""
    monkeypatch.setenv(OPERATION_SECONDS, "0.2")  # a swarm without end leaves the others of this machine something
    swarm = LocalSwarm(load_config(MICRO, [ENDLESS, *OWN_TEXT]), tmp_path / "run", command=(*PACED, "run"))
    try:
        await swarm.start()
        waiting = asyncio.create_task(swarm.wait())
        first = swarm.node("s0-r0")

        def under_way() -> bool:
            rounds = [[e for e in node.events if isinstance(e, OuterStep)] for node in swarm.nodes]
            return all(each and each[-1].outer_steps_taken >= 2 and each[-1].clock > 8_000 for each in rounds)

        await eventually(under_way, within=150, what="rounds of everybody")
        assert first.started is not None
        arguments = ["run", str(MICRO), "--initial-peers", first.started.addresses[0]]
        arguments += [word for setting in (ENDLESS, *OWN_TEXT) for word in ("--set", setting)]
        scores, text = await looked_at(first.started.addresses[0])
        assert scores.count("\nstage 0 of …") == scores.count("\nstage 1 of …") == 2
        assert text.startswith("import ")
        assert len(text.encode()) > len("import ")
        async with node(tmp_path / "joiner", *arguments) as events:
            started = await eventually(lambda: [e for e in events if isinstance(e, NodeStarted)], 150, "it is up")
            paired = await eventually(
                lambda: [e for e in events if isinstance(e, OuterStep) and e.kind == "paired"], 150, "it has averaged"
            )
        assert started[0].origin == "peer"
        assert started[0].run_id == first.started.run_id
        assert paired[0].outer_steps_taken > 1, "it went on from the state source's number"
        assert paired[0].clock > 8_000
        known = {node.started.peer_id for node in swarm.nodes if node.started}
        assert paired[0].partner in known
        stopped = [e for e in events if isinstance(e, NodeStopped)]
        assert [e.reason for e in stopped] == ["interrupted"]
        assert stopped[0].final_weights == "final"
        waiting.cancel()
    finally:
        await swarm.stop()
    assert not any(node.died for node in swarm.nodes)


async def test_a_stranger_joins_with_nothing_but_an_address(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address is the one in the line that the first node prints. The joiner shows the run before it trains, takes
    the stage that nobody serves, passes over a dead address, and says when it had first trained and averaged. The run
    trains on a text of each volunteer's own, which the joiner does not have, so it leaves the first stage to others."""
    founder, stranger = tmp_path / "founder", tmp_path / "stranger"
    own_text = [word for setting in OWN_TEXT for word in ("--set", setting)]
    monkeypatch.setenv(OPERATION_SECONDS, "0.1")  # the founder's alone: the stranger's command is as users start it
    async with node(founder, "run", str(MICRO), "--set", ENDLESS, *own_text, "--stage", "0") as events:
        monkeypatch.delenv(OPERATION_SECONDS)
        first = (await eventually(lambda: [e for e in events if isinstance(e, NodeStarted)], 150, "it is up"))[0]
        assert f"join {first.addresses[0]} --data-path PATH\n" in (founder / "printed").read_text()
        command = (founder / "printed").read_text().partition("others join with: noloco-node ")[2].split()[:2]
        assert command == ["join", first.addresses[0]]
        async with contextlib.AsyncExitStack() as stack:
            with spawning():
                joined = await stack.enter_async_context(node(stranger, *command, DEAD))
            trained = await eventually(lambda: [e for e in joined if isinstance(e, InnerStep)], 150, "it trains")
            await eventually(lambda: [e for e in joined if isinstance(e, OuterStep)], 150, "an outer step")
            await eventually(lambda: [e for e in events if isinstance(e, InnerStep)], 150, "the first one trains too")
    started = [e for e in joined if isinstance(e, NodeStarted)]
    assert [(e.run_id, e.run_name, e.stage) for e in started] == [(first.run_id, "micro", 1)]
    assert trained[0].tokens > 0
    printed = (stranger / "printed").read_text()
    shown, _, later = printed.partition("is up: run micro")
    assert f"run micro ({first.run_id})" in shown
    assert "of 1,000,000,000 tokens" in shown
    assert "not known: stage 1 has no node" in shown
    assert f"passed over {DEAD}: refused" in shown
    for shown in (r"inner step \d+: loss", r"outer step \d+ "):
        assert re.search(shown, later)


async def test_a_stranger_whom_nobody_answers_is_told_why(tmp_path: Path, temporary: Path) -> None:
    """One line an address, the remedy, an exit code of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "noloco_node", "join", DEAD, "nonsense", "--run-folder", str(tmp_path / "node")),
        stderr=asyncio.subprocess.PIPE,
    )
    _, complaint = await asyncio.wait_for(process.communicate(), 120)
    lines = complaint.decode().splitlines()
    assert process.returncode == ExitCode.PEERS_UNREACHABLE
    assert f"  {DEAD}: refused: nothing listens on that port" in lines
    assert any(line.startswith("  nonsense: malformed") for line in lines)
    assert any("remedy" in line for line in lines)


async def test_a_node_comes_back_without_an_address_by_the_peers_that_it_met(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that it once joined by is gone for good: the file in its run folder has another door."""
    monkeypatch.setenv(OPERATION_SECONDS, "0.08")
    founder, second, third = tmp_path / "founder", tmp_path / "second", tmp_path / "third"
    patient = ["--set", ENDLESS, "--set", "run.limits.grace_seconds=60"]
    async with contextlib.AsyncExitStack() as others:
        async with node(founder, "run", str(MICRO), *patient, "--stage", "0") as events:
            address = (await eventually(lambda: started_in(events), 120, "it is up"))[0].addresses[0]
            met = await others.enter_async_context(node(second, "join", address, "--stage", "1"))
            own = (await eventually(lambda: started_in(met), 120, "it is up"))[0]
            async with node(third, "join", address, "--stage", "1") as joined:
                await eventually(lambda: started_in(joined), 120, "it is up")
                file = third / "peers.json"
                await eventually(
                    lambda: file.exists() and own.addresses[0] in file.read_text(), 150, "it met the other joiner"
                )
        async with node(third, "join", "--stage", "1") as joined:
            await eventually(lambda: len(started_in(joined)) == 2, 120, "it is back")
        assert "addresses of peers seen before" in (third / "printed").read_text()


def started_in(events: list[AnyEvent]) -> list[NodeStarted]:
    """The starts among these events."""
    return [event for event in events if isinstance(event, NodeStarted)]


async def test_a_stranger_without_an_address_who_met_nobody_is_told_what_to_do(tmp_path: Path, temporary: Path) -> None:
    """`join` alone is no command for a first start."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "noloco_node", "join", "--run-folder", str(tmp_path / "node")),
        stderr=asyncio.subprocess.PIPE,
    )
    _, complaint = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == ExitCode.PEERS_UNREACHABLE
    assert "no address was given" in complaint.decode()
