"""What a person reads of a plan: memory by part, and how much a device would work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from noloco_node.config.load import Config
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import MOST_SECONDS, PrecisionName, RunSpec
from noloco_node.errors import SHOWN
from noloco_node.outer import CodecName
from noloco_node.sizing.advice import CARD_SECONDS, Expectation, does_arithmetic, loads_of, step_microbatches
from noloco_node.sizing.devices import Device, device_by_name, peak_of
from noloco_node.sizing.footprint import Footprint, footprint_of
from noloco_node.sizing.memory import (
    COMPILER_BYTES,
    GIB,
    StageMemory,
    disk_wanted,
    planned_in_flight,
    planned_memory,
    program_bytes,
)
from noloco_node.sizing.traffic import rest_of_run
from noloco_node.sizing.utilisation import Link
from noloco_node.telemetry.words import as_bytes

KNOWN_DEVICE = "RTX 4090"
"""A node's work is told in shares of this device, if the user has named no other."""
PARTS = ("weights", "gradient", "moments", "versions", "held", "at_work", "arriving")
NAMES = ("weights", "gradient", "moments", "versions", "waiting", "at work", "ahead")
LIMITS = {
    "device": "the device",
    "host": "the host's Python, for which the device waits: larger microbatches, where they fit",
    "uplink": "the uplink: microbatches wait for bytes",
    "under way": "the way over the uplinks: too few microbatches are under way to keep them full",
    "latency": "the round trip: too few microbatches are under way",
    "outer step": "the outer step: it takes the uplink from the microbatches",
}


def _under_way(config: Config) -> str:
    most = planned_in_flight(config)
    return f"at most {most}" if config.node.in_flight == "auto" else str(most)


def memory_lines(config: Config, footprint: Footprint) -> list[str]:
    """A replica of each stage, in GiB, or in MiB where all stages are small. The first row of numbers is the device's,
    the last ones the host's."""
    run, node = config.run, config.node
    needs = planned_memory(config, footprint)
    unit = "GiB" if max(max(need.on_device, need.on_host) for need in needs) >= GIB else "MiB"
    shown = _gib if unit == "GiB" else _mib
    head = f"  memory in {unit}     {'':9}{''.join(f'{name:>10}' for name in NAMES)}{'= device':>10}{'host':>8}"
    rows = [_row(f"stage {stage}", need, shown) for stage, need in _shown(needs)]
    most = max(needs, key=lambda need: need.on_host)
    pieces = most.checkpoint + most.given + most.copies
    return [
        f"  precision         {run.inner.precision}, backward {run.inner.backward}, microbatches of "
        f"{run.microbatch_tokens:,} tokens, {_under_way(config)} under way of each first-stage replica",
        *_muon_line(config, footprint),
        head,
        *rows,
        f"                    host: outer step {shown(most.outer)}, codes of an exchange {shown(most.exchange)},",
        f"                    pieces of checkpoints and of copies for others {shown(pieces)}; "
        f"and {shown(program_bytes(node))} for the program",
        *_compiler_line(node, shown),
        "                    without a GPU both are the machine's memory",
        f"  disk              up to {_most_on_disk(config, needs)} in each node's run folder",
    ]


def cost_lines(config: Config, tokens_left: float, replicas: Sequence[int], speed: float) -> list[str]:
    """What the rest of a run takes of one more node at each stage that `config.node` may serve: line, device and disk.
    `speed` is the swarm's in tokens/s, 0 where that is not known."""
    run, node = config.run, config.node
    footprint = footprint_of(run)
    needs = planned_memory(config, footprint)
    loads = loads_of(config, footprint, 1.0, step_microbatches(config))
    lines: list[str] = []
    for stage in _stages(config):
        shared = [count + (each == stage) for each, count in enumerate(replicas)]
        use = rest_of_run(run, footprint, tokens_left, shared)[stage]
        words = f"{as_bytes(use.sent)} up and {as_bytes(use.received)} down to the run's end"
        if speed > 0.0 and tokens_left > 0.0:
            bits = 8e-6 * speed / tokens_left
            work = loads[stage].compute_seconds * speed / run.microbatch_tokens / max(1, shared[stage])
            day = 86400.0 * speed / tokens_left
            words += f", {bits * use.sent:,.3g} and {bits * use.received:,.3g} Mbit/s"
            words += f"; {as_bytes(day * use.sent)} up and {as_bytes(day * use.received)} down a day"
            words += f"; {_flop(work)} of work a second{_of_a_known_device(work, run.inner.precision)}"
            words += _of_own_bound(node.uplink_mbit, bits * use.sent)
        lines.append(f"  {'' if lines else 'costs a node':<17} stage {stage}: {words}")
    if len(lines) > SHOWN:
        lines = [lines[0], *(f"  {'':<17} {line.strip()}" for line in (lines[len(lines) // 2], lines[-1]))]
    return [
        *lines,
        f"  {'':<17} up to {_most_on_disk(config, needs)} of the disk; a line carries some percent more than that, and "
        f"a newcomer copies {as_bytes(max(need.saved for need in needs))} at most",
        *_least_uplink_line(run, node),
    ]


def _stages(config: Config) -> Sequence[int]:
    """The stages that `config.node` may serve."""
    return [config.node.stage] if isinstance(config.node.stage, int) else range(config.run.stages)


def _most_on_disk(config: Config, needs: Sequence[StageMemory]) -> str:
    return as_bytes(max(disk_wanted(needs, config.node, stage) for stage in _stages(config)))


def _of_own_bound(bound: float | None, sent: float) -> str:
    """What a bound on the uplink leaves of a node's part, both in Mbit/s."""
    if bound is None or bound >= sent:
        return ""
    return f"; node.uplink_mbit {bound:g} lets it do {_percent(bound / sent)} % of that"


def _least_uplink_line(run: RunSpec, node: NodeSettings) -> list[str]:
    """What a run asks of a line that nobody has named: no node measures its own before it has trained."""
    asked = run.limits.least_uplink_mbit
    if asked is None or node.uplink_mbit is not None:
        return []
    return [
        f"  uplink            this run asks its nodes for {asked:g} Mbit/s (run.limits.least_uplink_mbit), and nothing "
        "here says what this line has: set node.uplink_mbit to that"
    ]


def _precision_line(device: Device, precision: PrecisionName) -> list[str]:
    """What bf16 would reach on a device that computes in fp32 here."""
    now, then = peak_of(device.name, precision), peak_of(device.name, "bf16")
    if now is None or then is None or then <= now:
        return []
    return [f"  precision         {precision}; run.inner.precision=bf16 has {then / now:.0f} times the peak of it here"]


def _of_a_known_device(work: float, precision: PrecisionName) -> str:
    if peak_of(KNOWN_DEVICE, precision) is None:
        return ""
    share = work / device_by_name(KNOWN_DEVICE, precision).flop_per_second
    return f", {_percent(share)} % of an {KNOWN_DEVICE}"


def _flop(work: float) -> str:
    return f"{work * 1e-12:,.3g} TFLOP" if work >= 1e11 else f"{work * 1e-9:,.3g} GFLOP"


def _muon_line(config: Config, footprint: Footprint) -> list[str]:
    """What Muon's arithmetic costs beside the training of a step's tokens, at the stage where it costs most."""
    if config.run.inner.optimizer != "muon":
        return []
    tokens = step_microbatches(config) * config.run.microbatch_tokens
    stages = zip(footprint.step_flop, footprint.flop_per_token, strict=True)
    share = max(step / (tokens * flop) for step, flop in stages)
    return [
        f"  muon              adds {_percent(share)} % to the arithmetic of {tokens:,} tokens a step; a larger "
        "run.inner.global_batch_tokens or fewer replicas lower it"
    ]


def _compiler_line(node: NodeSettings, shown: Callable[[float], str]) -> list[str]:
    if not node.compile:
        return []
    return [f"                    node.compile: compilers beside it take {shown(COMPILER_BYTES)} while it starts"]


def expectation_lines(
    config: Config, device: Device, link: Link, found: Expectation, needs: Sequence[StageMemory]
) -> list[str]:
    """What to expect of such devices on such links, and which settings would raise it."""
    out, run = found.outlook, config.run
    few = len(out.device_share) <= SHOWN
    shares = ", ".join(map(_percent, out.device_share if few else (min(out.device_share), max(out.device_share))))
    which = "by stage" if few else "least and most"
    tokens = out.microbatches_a_second * run.microbatch_tokens
    by = f" by {_arithmetic(run.outer.codec, device, needs)}" if out.outer_by_arithmetic else ""
    if not by and out.outer_seconds > MOST_SECONDS:
        by = f", and is given up after {_seconds(MOST_SECONDS)}: NO replica would average"
    lines = [
        f"on {device.name}, {link.uplink * 8e-6:,.4g} Mbit/s up, {1e3 * link.round_trip:,.4g} ms there and back, "
        f"{config.local_swarm.replicas} replicas of each stage",
        f"  GPU utilisation   {_percent(out.share)} % ({which}: {shares}); taken to reach "
        f"{device.flop_per_second / 1e12:,.4g} TFLOP/s while it works",
        f"  limited by        {LIMITS[out.limit]}",
        f"  microbatch        {_seconds(out.cycle_seconds)} there and back, {_seconds(found.compute_seconds)} of it on "
        f"devices, {found.under_way} under way; {tokens:,.0f} tokens/s a replica",
        f"  uplink            {100 * max(out.uplink_share):.0f} % used at the stage that sends most",
        f"  outer step        takes {_seconds(out.outer_seconds)}{by}, one in {out.inner_steps:,.0f} inner steps"
        + ("" if out.inner_steps <= run.outer.inner_steps else f": H = {run.outer.inner_steps} is not kept"),
        f"  whole run         {_seconds(run.inner.target_tokens / (tokens * config.local_swarm.replicas))}",
    ]
    lines += [*_precision_line(device, run.inner.precision), *_fits(device, needs)]
    for suggestion in found.suggestions:
        more = suggestion.more_memory
        memory = "" if abs(more) < GIB / 100 else f", {abs(more) / GIB:.2f} GiB {'more' if more > 0 else 'less'}"
        if device.memory is not None and max(need.on_device for need in needs) + more > device.memory:
            memory += ", which does NOT fit"
        lines.append(f"  suggestion        {', '.join(suggestion.settings)}: {_percent(suggestion.share)} %{memory}")
    if found.in_vain:
        lines.append(f"  no gain from      {', '.join(found.in_vain)}")
    return lines


def _arithmetic(codec: CodecName, device: Device, needs: Sequence[StageMemory]) -> str:
    on_card = does_arithmetic(device, needs) and codec in CARD_SECONDS
    return "arithmetic on the device (an estimate, not measured)" if on_card else "one host thread's arithmetic"


def _fits(device: Device, needs: Sequence[StageMemory]) -> list[str]:
    if device.memory is None:
        return []
    largest = max(range(len(needs)), key=lambda stage: needs[stage].on_device)
    wanted, free = needs[largest].on_device, device.memory
    verdict = "fits" if wanted <= device.memory else "does NOT fit: more stages, or fewer microbatches under way"
    return [f"  memory            stage {largest} takes {_gib(wanted)} of {_gib(free)} GiB: {verdict}"]


def _shown(needs: Sequence[StageMemory]) -> list[tuple[int, StageMemory]]:
    """All of a few stages; of many the first two, the largest and the last."""
    if len(needs) <= SHOWN:
        return list(enumerate(needs))
    largest = max(range(len(needs)), key=lambda stage: needs[stage].on_device)
    return [(stage, needs[stage]) for stage in sorted({0, 1, largest, len(needs) - 1})]


def _row(name: str, need: StageMemory, shown: Callable[[float], str]) -> str:
    parts = "".join(f"{shown(getattr(need, part)):>10}" for part in PARTS)
    return f"                    {name:9}{parts}{shown(need.on_device):>10}{shown(need.on_host):>8}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.0995 else f"{100 * share:.1f}"


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def _mib(count: float) -> str:
    return f"{1024 * count / GIB:,.1f}"


def _seconds(value: float) -> str:
    if value < 1.0:
        return f"{1e3 * value:.0f} ms"
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= 2 * size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:.1f} s"
