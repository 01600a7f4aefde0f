"""Judgements of a machine: pure functions of what was measured, each with what to do about it."""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch

from noloco_node import PROTOCOL_VERSION, __version__, ambient
from noloco_node.bootstrap.hello import measure_hello, serve_hello
from noloco_node.config.load import load_config
from noloco_node.config.node_settings import NodeSettings
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.node import checks as machine_checks
from noloco_node.node.checks import (
    WANTED_FILES,
    Check,
    CheckOutcome,
    check_clock,
    check_disk,
    check_files,
    check_memory,
    check_versions,
    first_failure,
    free_disk,
    memory,
    raise_file_limit,
)
from noloco_node.node.start_checks import among_peers, for_a_stage, report
from noloco_node.process_memory import refused_memory
from noloco_node.sizing import screen
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.memory import free_memory, planned_memory
from noloco_node.sizing.screen import cost_lines, memory_lines
from noloco_node.storage.run_folder import RunFolder
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport

MICRO = Path(__file__).parent / "configs" / "micro.yaml"
GB = 10**9
MILLION = 10**6


@pytest.mark.parametrize(
    ("check", "outcome", "words"),
    [
        (check_disk(9 * GB, "here", 8 * GB, GB), CheckOutcome.PASS, "9.0 GB free in here, up to 8.0 GB wanted"),
        (check_disk(7 * GB, "here", 8 * GB, GB), CheckOutcome.WARN, "7.0 GB free"),
        (check_disk(GB, "here", 8 * GB, GB), CheckOutcome.FAIL, "1.0 GB free"),
        (check_disk(GB, "here"), CheckOutcome.PASS, "1.0 GB free in here; a run says at the start what it wants"),
        (check_disk(GB // 20, "here"), CheckOutcome.FAIL, "50.0 MB free"),
        (check_memory(8 * GB, 16 * GB, 4 * GB), CheckOutcome.PASS, "8.0 GB of 16.0 GB free, about 4.0 GB needed"),
        (check_memory(3 * GB, 16 * GB, 4 * GB), CheckOutcome.WARN, "3.0 GB of 16.0 GB"),
        (check_memory(16 * GB, 16 * GB, 40 * GB, 20 * GB), CheckOutcome.FAIL, "about 40.0 GB needed"),
        (check_memory(16 * GB, 16 * GB, 20 * GB, 16 * GB), CheckOutcome.WARN, "about 20.0 GB needed"),
        (check_files(8192), CheckOutcome.PASS, "8,192"),
        (check_files(256), CheckOutcome.WARN, "256"),
        (check_clock([]), CheckOutcome.PASS, "not compared"),
        (check_clock([(0.2, 0.1)]), CheckOutcome.PASS, "0.20 s behind 1 peer (± 0.10 s)"),
        (check_clock([(-2.0, 0.1)]), CheckOutcome.WARN, "2.00 s ahead of 1 peer"),
        (check_clock([(4.0, 0.1)]), CheckOutcome.FAIL, "4.00 s behind"),
        (check_clock([(4.0, 2.0)]), CheckOutcome.WARN, "± 2.00 s"),
        (check_clock([(0.1, 0.1), (500.0, 0.1), (0.0, 0.1)]), CheckOutcome.PASS, "3 peers"),
        (check_versions((1, "0.2"), {}), CheckOutcome.PASS, "noloco-node 0.2, protocol 1"),
        (check_versions((1, "0.2"), {"a": (1, "0.2")}), CheckOutcome.PASS, "0.2"),
        (check_versions((1, "0.2"), {"a": (1, "0.3")}), CheckOutcome.WARN, "0.2 here, 0.3 elsewhere"),
        (check_versions((1, "0.2"), {"a": (2, "0.3"), "b": (1, "0.2")}), CheckOutcome.WARN, "0.3 elsewhere"),
        (check_versions((1, "0.2"), {"a": (2, "0.3")}), CheckOutcome.FAIL, "protocol 2 (noloco-node 0.3)"),
    ],
)
def test_what_was_measured_is_judged_and_said(check: Check, outcome: CheckOutcome, words: str) -> None:
    """In figures; and whatever does not pass has a remedy."""
    assert check.outcome is outcome
    assert words in check.found
    assert bool(check.remedy) == (outcome is not CheckOutcome.PASS)


def test_the_first_failure_ends_the_start_and_a_warning_does_not(caplog: pytest.LogCaptureFixture) -> None:
    """With an exit code of its own."""
    good, bad = check_files(8192), check_clock([(9.0, 0.0)])
    assert first_failure([good, check_files(3)]) is None
    report([good, check_files(3)])
    assert "ulimit" in caplog.text
    with pytest.raises(UserError, match=r"clock: 9\.00 s behind") as caught:
        report([good, bad])
    assert caught.value.exit_code is ExitCode.CHECK_FAILED


def test_the_machine_is_measured(tmp_path: Path) -> None:
    """A folder that is not there yet lies where its parent does; a stage of this run fits here."""
    assert free_disk(tmp_path / "not" / "there") == pytest.approx(free_disk(tmp_path), rel=0.2)
    available, total = memory()
    assert 0 < available <= total
    checks = for_a_stage(load_config(MICRO).run, NodeSettings(), 1, RunFolder.create(tmp_path))
    assert [check.name for check in checks] == ["disk", "memory"]


def test_validation_a_joiners_outlook_and_its_first_check_tell_one_figure_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were three. To the byte, a node that moves wants a checkpoint of the other stage, too."""
    for module in (machine_checks, screen):
        monkeypatch.setattr(module, "as_bytes", lambda count: f"{count} B")
    config, folder = load_config(MICRO), RunFolder.create(tmp_path)

    def wanted(node: NodeSettings, stages: Sequence[int]) -> int:
        ours = config.model_copy(update={"node": node})
        lines = [*memory_lines(ours, footprint_of(config.run)), *cost_lines(ours, 1000.0, (1, 1), 0.0)]
        planned = [int(each) for each in re.findall(r"up to (\d+) B (?:in each|of the disk)", "\n".join(lines))]
        checked = [for_a_stage(config.run, node, stage, folder)[0].found for stage in stages]
        found = [int(told.split("up to ")[1].split()[0]) for told in checked]
        assert planned == [max(found)] * 2
        return found[-1]

    other = wanted(NodeSettings(), (0, 1)) - wanted(NodeSettings(stage=1), (1,))
    assert other == planned_memory(config, footprint_of(config.run))[0].saved


@pytest.fixture
def few_files() -> Iterator[None]:
    """A process that may have few open files, and more if it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_file_limit_is_raised_as_far_as_the_system_grants(few_files: None) -> None:
    """Up to what is wanted, or the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_file_limit() == (WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard))
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1000


def test_what_a_process_may_not_take_is_no_free_memory() -> None:
    """`ulimit -v`, and many batch systems, bound the address space, whatever the machine has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    left = 64 << 20
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + left, hard))
    try:
        free, (available, _) = free_memory("cpu").host, memory()
        with pytest.raises(RuntimeError) as refused:
            torch.empty(4 * left, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert 0 < free <= left
    assert 0 < available <= left
    assert refused_memory(refused.value) is refused.value
    assert isinstance(refused_memory(ExceptionGroup("", [ValueError(), MemoryError()])), MemoryError)
    assert refused_memory(RuntimeError("something else")) is None


@pytest.mark.parametrize(
    ("ahead", "outcome"), [(0.0, CheckOutcome.PASS), (10.0, CheckOutcome.FAIL), (-10.0, CheckOutcome.FAIL)]
)
async def test_a_clock_is_compared_over_the_wire(
    ahead: float, outcome: CheckOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a peer that answers hello by a clock of its own; one that does not answer does not count."""
    real = ambient.wall
    network = MemoryNetwork()
    ids = [PeerId(f"12D3KooWKrCeA5nCWnQ5gm5FLAszTb6cDMk2hX8BH7Hj8MhGeFx{n}") for n in (8, 9)]
    one, two = (MemoryTransport(network, peer) for peer in ids)
    try:
        serve_hello(two, load_config(MICRO).run, lambda: 0)

        def skewed() -> float:
            task = asyncio.current_task()
            asking = task is not None and task.get_name() == "asking"
            return real() + (0.0 if asking else ahead)

        monkeypatch.setattr(ambient, "wall", skewed)

        async def ask(peer: PeerId) -> Check:
            measured = await measure_hello(one, peer)
            return check_clock([] if measured is None or measured.skew is None else [(measured.skew, measured.doubt)])

        assert (await asyncio.create_task(ask(ids[1]), name="asking")).outcome is outcome
        assert "not compared" in (await asyncio.create_task(ask(PeerId("nobody")), name="asking")).found
        versions = (await among_peers(one, [f"/ip4/127.0.0.1/tcp/1/p2p/{ids[1]}"]))[1]
        assert versions == Check(
            "versions", CheckOutcome.PASS, f"noloco-node {__version__}, protocol {PROTOCOL_VERSION}"
        )
    finally:
        for transport in (one, two):
            await transport.close()
