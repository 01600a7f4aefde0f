"""What is advised is what the changed configuration gives; quantities and devices are read as people write them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from noloco_node.config.load import Config, load_config
from noloco_node.config.node_settings import AUTO_MOST
from noloco_node.errors import ExitCode, UserError
from noloco_node.outer.codec import CODECS
from noloco_node.pipeline.admission import Rate, next_limit
from noloco_node.sizing.advice import (
    CODEC_SECONDS,
    arithmetic_seconds,
    check_outer_steps,
    expect,
    fitting_rank,
    outlook_with,
    planned_loads,
    under_way,
)
from noloco_node.sizing.devices import REACHED, Device, bytes_a_second, device_by_name, seconds
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.memory import planned_memory
from noloco_node.sizing.preflight import plan, plan_lines, plan_run
from noloco_node.sizing.screen import expectation_lines, memory_lines
from noloco_node.sizing.utilisation import Link, UtilisationOutlook

HOME = Link(2.5e6, 0.1)
SLOW = Device("slow", 2e11, None)
QUICK = Device("quick", 1e13, None)


def outlook_on(config: Config, link: Link, device: Device) -> UtilisationOutlook:
    """What the configuration gives, as it is."""
    footprint = footprint_of(config.run)
    return outlook_with(config, planned_loads(config, footprint, device, planned_memory(config, footprint)), link)


def test_every_suggestion_gives_what_it_says() -> None:
    """The file, loaded with the settings that are named, has that share; and each is better than what there is."""
    found = expect(load_config(Path("tiny")), HOME, SLOW)
    assert found.suggestions
    for suggestion in found.suggestions:
        changed = load_config(Path("tiny"), suggestion.settings)
        outlook = outlook_on(changed, HOME, SLOW)
        assert outlook.share == pytest.approx(suggestion.share)
        assert outlook.share > found.outlook.share
    assert [s.share for s in found.suggestions] == sorted((s.share for s in found.suggestions), reverse=True)


def test_every_codec_has_a_cost() -> None:
    """`config validate --device` asks for that of the run's codec."""
    assert CODEC_SECONDS.keys() == CODECS.keys()


def test_a_subspace_is_advised_where_a_line_limits_and_the_model_can_be_in_one() -> None:
    """It gives what the file with it gives, and is not named where the device limits or weights are there already."""
    config = load_config(Path("tiny"))
    found = expect(config, HOME, QUICK)
    told = next(each for each in found.suggestions if each.settings[0] == "run.model.subspace_rank=32")
    changed = load_config(Path("tiny"), told.settings)
    footprint = footprint_of(changed.run)
    assert outlook_on(changed, HOME, QUICK).share == pytest.approx(told.share)
    assert told.share > 2 * found.outlook.share
    assert footprint.cut_width == 32
    assert sum(footprint.parameters) < sum(footprint_of(config.run).parameters)
    assert sum(footprint.flop_per_token) < sum(footprint_of(config.run).flop_per_token)
    names = [each.settings[0] for each in expect(config, Link(1e9, 0.0), Device("slower", 2e9, None)).suggestions]
    assert not any("subspace" in name for name in names)
    for changes in ({"fingerprint": "weights-" + "0" * 32}, {"subspace_rank": 64}, {"config": _TIED, "stages": 1}):
        assert fitting_rank(config.run.model.model_copy(update=changes)) is None


def test_a_fixed_part_that_is_too_small_is_warned_of() -> None:
    """In a subspace the embedding's fixed part never grows; one of the right size is part of what is advised."""
    bare = ["run.model.embedding_std=null"]
    told = expect(load_config(Path("tiny"), bare), HOME, QUICK).suggestions
    assert any("run.model.embedding_std=0.3" in each.settings for each in told)
    warned = plan(load_config(Path("tiny"), [*bare, "run.model.subspace_rank=64"])).warnings
    assert any("embedding_std is not set" in line for line in warned)
    assert not any("embedding_std" in line for line in plan(load_config(Path("tiny"), bare)).warnings)


def test_a_plan_says_how_many_layers_a_subspace_binds() -> None:
    """The fewer it leaves free, the more it costs in loss; the last stage may have few of them."""
    shape = ["run.model.subspace_rank=32", "run.model.config.num_hidden_layers=4"]
    for free, cut, told, more in (
        ("true", "[3, 1]", "3 of 4 layers write into it", True),
        ("true", "[2, 2]", "2 of 4 layers write into it", False),
        ("false", "[3, 1]", "4 of 4 layers write into it", False),
    ):
        changes = [f"run.model.layers_per_stage={cut}", f"run.model.subspace_last_stage_free={free}"]
        run = load_config(Path("tiny"), [*shape, *changes]).run
        (line,) = [line for line in plan_lines(run, plan_run(run)) if "subspace" in line]
        assert told in line
        assert ("run.model.layers_per_stage" in line) is more


_TIED = {"model_type": "llama", "tie_word_embeddings": True, "hidden_size": 64}


@pytest.mark.parametrize("round_trip", [0.02, 0.1, 0.4, 1.6])
def test_auto_is_planned_to_keep_what_an_origin_keeps_that_sees_the_planned_rates(round_trip: float) -> None:
    """By one rule and one figure for how much of the best rate is enough."""
    config = load_config(Path("tiny"), ["node.in_flight=auto", "run.inner.global_batch_tokens=65536"])
    footprint, link = footprint_of(config.run), Link(5e6, round_trip)

    def rate(number: int) -> Rate:
        config = load_config(Path("tiny"), [f"node.in_flight={number}", "run.inner.global_batch_tokens=65536"])
        return Rate(outlook_on(config, link, SLOW).microbatches_a_second, window=1)

    seen = {number: rate(number) for number in range(1, AUTO_MOST + 1)}
    loads = planned_loads(config, footprint, SLOW, planned_memory(config, footprint))
    assert under_way(config, loads, link) == next_limit(seen, 1, AUTO_MOST)


def test_auto_is_planned_by_one_number_for_memory_speed_and_advice() -> None:
    """At most a replica's share of a step, which is one microbatch here: more under way takes more memory."""
    config = load_config(Path("tiny"), ["node.in_flight=auto", "run.inner.global_batch_tokens=2048"])
    footprint, one = footprint_of(config.run), load_config(Path("tiny"), ["node.in_flight=1"])
    assert planned_memory(config, footprint) == planned_memory(one, footprint)
    assert "at most 1 under way" in "\n".join(memory_lines(config, footprint))
    found = expect(config, HOME, SLOW)
    assert found.under_way == 1
    more = [each.more_memory for each in found.suggestions if each.settings[0].startswith("node.in_flight")]
    assert more
    assert all(memory > 0 for memory in more)


def test_outer_steps_that_a_bounded_line_cannot_carry_in_their_turn_are_refused_with_those_that_it_can() -> None:
    """The remedy is taken, and the file as it comes is as well: with fewer Mbit/s inner steps last longer, too."""
    for bound in (3.0, 20.0):
        seldom, often = (
            load_config(Path("consumer-24gb"), [f"node.uplink_mbit={bound}", f"run.outer.inner_steps={steps}"])
            for steps in (48, 4)
        )
        footprint, link = footprint_of(often.run), Link(bound / 8e-6, 0.1)
        card = device_by_name("RTX 4090", "bf16")
        check_outer_steps(seldom, footprint, link, card)
        with pytest.raises(UserError, match=r"run\.outer\.inner_steps is 4, too few for node\.uplink_mbit") as refused:
            check_outer_steps(often, footprint, link, card)
        assert refused.value.exit_code is ExitCode.CONFIG
        least = refused.value.remedy.removeprefix("set run.outer.inner_steps to ").split()[0]
        enough = load_config(Path("consumer-24gb"), [f"node.uplink_mbit={bound}", f"run.outer.inner_steps={least}"])
        check_outer_steps(enough, footprint, link, card)
        unbound = load_config(Path("consumer-24gb"), ["run.outer.inner_steps=4"])
        check_outer_steps(unbound, footprint, link, card)


@pytest.mark.parametrize("on_card", [False, True])
@pytest.mark.parametrize("name", ["consumer-24gb", "paper-1.3b"])
def test_a_quick_line_never_hides_the_arithmetic_of_outer_steps(name: str, on_card: bool) -> None:
    """At 10 Gbit/s and more an outer step takes what its largest stage's weights take of a thread, or of a card."""
    config, device = load_config(Path(name)), device_by_name("H100", "bf16")
    device = device if on_card else replace(device, memory=None)
    least = max(footprint_of(config.run).parameters) * arithmetic_seconds(config.run.outer.codec, on_card=on_card)
    for line in (1.25e9, 1e12):
        found = expect(config, Link(line, 0.0), device).outlook
        assert found.outer_seconds >= least
    assert found.outer_by_arithmetic


def test_a_fast_card_is_told_that_it_waits_for_python() -> None:
    """It was planned to work for nearly all of the time, whatever its microbatches."""
    config, link = load_config(Path("consumer-24gb")), Link(1e9, 1e-3)
    device = device_by_name("H100", config.run.inner.precision)
    found = expect(config, link, device)
    assert found.outlook.limit == "host"
    wider = [each for each in found.suggestions if "run.inner.microbatch_windows" in each.settings[0]]
    assert wider
    assert wider[0].share > 1.3 * found.outlook.share
    (compiling,) = (each for each in found.suggestions if each.settings == ("node.compile=true",))
    assert 1.2 * found.outlook.share < compiling.share < wider[0].share
    compiled = expect(load_config(Path("consumer-24gb"), compiling.settings), link, device)
    assert compiled.outlook.share == compiling.share
    assert not any("node.compile=true" in each.settings for each in compiled.suggestions)
    small = device_by_name("RTX 4090", config.run.inner.precision)
    unhurried = expect(config, link, small)
    assert unhurried.outlook.limit == "device"
    assert not any("node.compile=true" in each.settings for each in unhurried.suggestions)


def test_it_is_one_screen() -> None:
    """However many stages there are, no line is wider than 160 letters, and there are at most 40."""
    config = load_config(Path("paper-6.8b"), ["run.model.stages=16"])
    footprint = footprint_of(config.run)
    device = device_by_name("H100", config.run.inner.precision)
    needs = planned_memory(config, footprint)
    found = expect(config, HOME, device)
    lines = [*memory_lines(config, footprint), *expectation_lines(config, device, HOME, found, needs)]
    assert len(lines) < 40
    assert max(map(len, lines)) <= 160, max(lines, key=len)
    assert any("limited by" in line for line in lines)


def test_an_outer_step_that_no_exchange_has_the_time_for_is_said_so() -> None:
    """7 GB by a line of 20 Mbit/s take hours, and an exchange is given up after ten minutes."""
    for name, said in (("paper-6.8b", True), ("consumer-24gb", False)):
        config = load_config(Path(name))
        device, needs = (
            device_by_name("H100", config.run.inner.precision),
            planned_memory(config, footprint_of(config.run)),
        )
        lines = expectation_lines(config, device, HOME, expect(config, HOME, device), needs)
        assert any("NO replica would average" in line for line in lines) is said


def test_what_would_not_fit_the_device_is_said_so() -> None:
    """The whole model on one card is the quickest way, where there is room for it."""
    config = load_config(Path("consumer-24gb"))
    footprint = footprint_of(config.run)
    needs = planned_memory(config, footprint)
    for name, fits in (("RTX 4090", False), ("H100", True)):
        device = device_by_name(name, config.run.inner.precision)
        lines = expectation_lines(config, device, HOME, expect(config, HOME, device), needs)
        (line,) = [line for line in lines if "run.model.stages=1" in line]
        assert line.endswith("which does NOT fit") != fits


def test_devices_have_a_speed_and_a_memory() -> None:
    """A number of TFLOP is taken as it is."""
    card = device_by_name("NVIDIA GeForce RTX 4060 Ti", "bf16")
    assert (card.flop_per_second, card.memory) == (REACHED * 44.1e12, 8 << 30)
    assert device_by_name("NVIDIA GeForce RTX 4070 Ti SUPER", "bf16").memory == 16 << 30, "not that of a kin"
    assert device_by_name("NVIDIA H100 PCIe", "bf16").memory == 80 << 30
    assert device_by_name("20 TFLOP", "fp32").flop_per_second == 20e12
    for wrong in ("RTX 1", "T4"):
        with pytest.raises(UserError) as caught:
            device_by_name(wrong, "bf16")
        assert caught.value.exit_code is ExitCode.USAGE


def test_rates_and_times_are_read_as_they_are_written() -> None:
    """A unit is needed, and a number above 0."""
    assert bytes_a_second("20Mbit") == bytes_a_second("2.5 MB") == 2.5e6
    assert bytes_a_second("1gbit") == 125e6
    assert seconds("100ms") == seconds("0.1s") == 0.1
    for wrong in ("20", "Mbit", "0Mbit", "1.2.3Mbit", "20 Mbit/s"):
        with pytest.raises(UserError):
            bytes_a_second(wrong)


def test_fp32_on_a_device_that_is_made_for_bf16_is_told_of() -> None:
    """Nothing else says that the card works at half of its speed. A run in bf16 is told nothing."""
    for precision, told in (("fp32", True), ("bf16", False), ("bf16-mixed", False)):
        config = load_config(Path("tiny"), [f"run.inner.precision={precision}"])
        device = device_by_name("H100", config.run.inner.precision)
        needs = planned_memory(config, footprint_of(config.run))
        lines = expectation_lines(config, device, HOME, expect(config, HOME, device), needs)
        found = [line for line in lines if "run.inner.precision=bf16 has 2 times the peak" in line]
        assert bool(found) is told
