"""`noloco-node simulate`: what is refused, what comes of it, and that it is the same again."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import pytest
import torch

from noloco_node.cli.main import main
from noloco_node.config.files import shipped_config
from noloco_node.config.load import Config, HuntConfig, load_config, load_simulation
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import ACTIVATION_CODECS, ActivationCodec, LimitsSpec, OuterSpec, token_bytes
from noloco_node.errors import ExitCode, UserError
from noloco_node.outer import CodecName
from noloco_node.outer.codec import CODECS
from noloco_node.pipeline.activations import encode
from noloco_node.simulator.course import (
    SimulationFigures,
    Watcher,
    check_simulation,
    device_seconds,
    quadratic_of,
    simulate,
)
from noloco_node.simulator.links import Links
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.simulator.quadratic import DIMENSIONS, HIDDEN, Quadratic, weigh_as
from noloco_node.simulator.report import of_swarm, write_results
from noloco_node.simulator.world import World
from noloco_node.sizing.footprint import footprint_of
from noloco_node.telemetry.events import AnyEvent, NodeReassigned
from noloco_node.training.compute_thread import ComputeThread, Priority
from noloco_node.transport.memory import Parcel
from noloco_node.transport.messages import TensorSpec
from tests.simulator.populated import populate
from tests.worlds import micro_spec

PATIENT = "run.limits.exchange_progress_seconds=80"
"""So that a quadratic's whole state, which is one chunk, comes through."""


def shipped(*overrides: str) -> Config:
    """The configuration that comes with the package, changed."""
    return load_config(shipped_config("sim/swarm"), overrides)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sim.up_mbit=0", "sim.up_mbit"),
        ("sim.life_hours=-1", "sim.life_hours"),
        ("sim.round_trips_ms=[[20, 30]]", "sim.round_trips_ms"),
        ("sim.round_trips_ms=[[20, 30], [40, 20]]", "the same there and back"),
        ("sim.bandwith=3", "sim.bandwith"),
    ],
)
def test_what_cannot_be_is_refused_by_its_setting(override: str, words: str) -> None:
    """Before anything runs."""
    with pytest.raises(UserError, match=words):
        shipped(override)


def test_a_stage_that_nobody_holds_and_a_line_that_is_too_narrow_are_refused_with_the_remedy() -> None:
    """By numbers that only the run and the machine say."""
    footprint = footprint_of(shipped().run)
    with pytest.raises(UserError, match="nobody could hold stage 1") as too_few:
        check_simulation(shipped("sim.nodes=1"), footprint)
    assert "sim.nodes to 2" in (too_few.value.remedy or "")
    with pytest.raises(UserError, match="exchange_progress_seconds"):
        check_simulation(shipped("sim.up_mbit=1"), footprint)
    with pytest.raises(UserError, match=r"sim\.down_mbit 1e-06 an exchange takes"):
        check_simulation(shipped("sim.down_mbit=1e-6"), footprint)
    with pytest.raises(UserError, match=r"sim\.up_mbit 50 a stage peer's state takes") as one_chunk:
        check_simulation(shipped("sim.life_hours=1"), footprint)
    assert "run.limits.exchange_progress_seconds to 54" in (one_chunk.value.remedy or "")
    check_simulation(shipped("sim.life_hours=1", PATIENT), footprint)


def test_what_is_simulated_alone_is_refused_as_a_run(tmp_path: Path) -> None:
    """With the command that simulates it. What comes along is sound, and its mistakes are named."""
    assert isinstance(load_simulation(Path("sim/hunt")), HuntConfig)
    with pytest.raises(UserError) as refused:
        load_config(Path("sim/hunt"))
    assert "noloco-node simulate sim/hunt" in refused.value.remedy
    with pytest.raises(UserError, match=r"sim\.most"):
        load_simulation(Path("sim/hunt"), ["sim.most=65"])
    with pytest.raises(UserError, match=r"sim\.fewest \(9\) exceeds"):
        load_simulation(Path("sim/hunt"), ["sim.fewest=9"])
    unknown = tmp_path / "crowd.yaml"
    unknown.write_text("sim:\n  kind: crowd\n  nodes: [10]\n")
    with pytest.raises(UserError, match=r"sim\.kind: 'crowd' is not allowed: must be one of swarm, hunt"):
        load_simulation(unknown)


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not when hours of it are done."""
    taken = tmp_path / "taken"
    taken.write_text("a file")
    assert main(["simulate", "sim/swarm", "--out", str(taken)]) == ExitCode.RUN_FOLDER
    said = capsys.readouterr()
    assert f"--out {taken} cannot be written" in said.err
    assert "virtual hours" not in said.out


def test_who_comes_for_a_dead_node_has_a_device_for_its_stage() -> None:
    """Whatever its number: at the last stage a forward is with its loss and backward, at others it is not."""
    config = shipped("sim.device_spread=0")
    for number in range(4):
        assert [device_seconds(config, number, stage)(Priority.FORWARD) for stage in (0, 1)] == [1.0, 3.0]


def test_slow_devices_do_not_hold_up_quick_ones() -> None:
    """Devices unlike each other, on free links: those of one stage hardly ever wait. They work 0.76 of the time if
    nobody is told that a device is busy, and 0.83 as it is."""
    free = ("sim.up_mbit=1000", "sim.down_mbit=1000", "sim.round_trips_ms=[[5]]", "node.in_flight=auto")
    config = shipped("sim.nodes=8", "sim.hours=0.02", "sim.device_spread=0.8", *free)
    assert max(simulate(config, lambda _done, _all: None).figures.work_share) > 0.8


def test_figures_of_a_node_are_of_the_time_that_it_lived() -> None:
    """Nodes die all the time."""
    whole, dying = (
        simulate(
            shipped("sim.nodes=4", "sim.hours=0.015", f"sim.life_hours={life}", PATIENT), lambda _done, _all: None
        ).figures
        for life in ("null", "0.004")
    )
    assert dying.nodes_started > 3 * whole.nodes_started
    assert dying.directory_received[0] > 0.6 * whole.directory_received[0]


def test_a_simulation_has_figures_and_files(tmp_path: Path) -> None:
    """Half a virtual minute of four nodes."""
    config = shipped("sim.nodes=4", "sim.hours=0.01", "sim.sample_seconds=10")
    told = list[float]()
    found = simulate(config, lambda done, _all: told.append(done))
    assert told[-1] == pytest.approx(0.01)
    assert found.figures.tokens_per_second > 0
    assert 0.0 < min(found.figures.work_share) <= max(found.figures.work_share) <= 1.1
    assert len(found.figures.samples) == 3
    result = of_swarm(config, found)
    files = write_results(result, "noloco-node simulate", tmp_path)
    assert all(path.stat().st_size for path in files.values())
    assert found.trace in result.table
    assert result.node == {"in_flight": 3}


def test_what_an_exchange_takes_of_a_processor_is_in_the_course() -> None:
    """The nodes exchange within half a minute."""
    often = ("run.outer.inner_steps=2", "run.outer.min_inner_steps=1", "sim.operation_seconds=0.2")
    free, dear = (
        simulate(shipped("sim.nodes=4", "sim.hours=0.006", *often, f"sim.exchange_seconds={seconds}"), lambda *_: None)
        for seconds in (0, 0.3)
    )
    assert free.figures.outer_steps["paired"] > 0
    assert free.trace != dear.trace


def test_a_stage_that_all_its_nodes_left_is_brought_back_by_another_that_moves() -> None:
    """It takes the copy that a node of another stage kept, with the clock that the copy has. Figures tell what is done
    at which stage, wherever a node has been before."""
    limits = LimitsSpec(record_seconds=2.0, grace_seconds=2, standby_seconds=1.0)
    spec = micro_spec(steps=10_000, microbatches_a_step=4, outer=OuterSpec(inner_steps=2, min_inner_steps=1))
    spec = spec.model_copy(update={"limits": limits, "standby_copies": 1})

    async def work() -> tuple[list[AnyEvent], SimulationFigures]:
        settings = NodeSettings(in_flight=2, seed=1)
        async with World(spec, settings, learning=Quadratic(), links=Links(), seed=1) as world:
            watcher = Watcher(world)
            populate(world, 3)
            await asyncio.sleep(8.0)
            for node in world.running[3:]:
                world.kill(node)
            before = watcher.figures()
            await asyncio.sleep(14.0)
            after = watcher.figures()
            assert after.tokens_per_second * 22.0 > before.tokens_per_second * 8.0
            assert [node.condition for node in world.nodes] == ["running"] * 3 + ["killed"] * 3
            assert {node.stage for node in world.running} == {0, 1}
            return [event for events in world.events for event in events], after

    told, figures = in_virtual_time(work, seed=1)
    moved = [event for event in told if isinstance(event, NodeReassigned)]
    first = moved[0]
    assert (first.why, first.origin, first.from_stage, first.stage) == ("lost", "standby", 0, 1)
    assert first.clock > 0.0
    assert figures.moves == len(moved)


@pytest.mark.parametrize("codec", ["int8", "int4", "fp32"])
def test_an_exchange_of_the_quadratic_weighs_what_the_codec_makes_of_the_stage(codec: CodecName) -> None:
    """Its few weights travel as one block of the codec."""
    footprint, wire = footprint_of(shipped().run), CODECS[codec].wire_bytes
    octets = wire(DIMENSIONS)
    weighed = weigh_as(footprint, codec)(Parcel("outer.chunk", 0, (TensorSpec("u8", (octets,)),)))
    assert weighed == pytest.approx(wire(round(statistics.fmean(footprint.parameters))))


@pytest.mark.parametrize("rank", [None, 64])
@pytest.mark.parametrize("codec", ACTIVATION_CODECS)
def test_activations_of_the_quadratic_weigh_what_the_codec_makes_of_the_models(
    codec: ActivationCodec, rank: int | None
) -> None:
    """The one number that stands for a token has a scale of its own, as int8; a block of the model's share one."""
    run = shipped(*([] if rank is None else [f"run.model.subspace_rank={rank}"])).run
    footprint = footprint_of(run)
    assert footprint.cut_width == rank or rank is None
    wire = encode(torch.zeros(run.inner.microbatch_windows, run.data.sequence_length, HIDDEN), codec)
    weighed = weigh_as(footprint, "int8")(Parcel("forward", 7, (TensorSpec.of(wire),)))
    assert weighed == pytest.approx(7 + run.microbatch_tokens * token_bytes(footprint.cut_width, codec))


def test_a_joiner_in_the_simulator_takes_over_less_where_muon_keeps_one_moment() -> None:
    """Of each matrix, in the state that crosses and in the least speed of a line that bears it."""

    async def state_of(config: Config) -> float:
        footprint = footprint_of(config.run)
        thread = ComputeThread()
        try:
            placed = await quadratic_of(config, footprint).place(config.run, 0, thread)
        finally:
            await thread.close()
        vectors = (torch.zeros(size) for size in (64, 64, *placed.trainer.moment_sizes.values()))
        parcel = Parcel("state.chunk", 0, tuple(TensorSpec.of(vector) for vector in vectors))
        return weigh_as(footprint, "int8")(parcel)

    for optimizer in ("adamw", "muon"):
        config = shipped(f"run.inner.optimizer={optimizer}")
        wanted = statistics.fmean(footprint_of(config.run).state_bytes)
        assert asyncio.run(state_of(config)) == pytest.approx(wanted, rel=0.01)
