"""What to expect of a run on given devices and links, and which settings would raise it. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from noloco_node.config.load import Config
from noloco_node.config.model_spec import ModelSpec
from noloco_node.config.node_settings import AUTO_AIM
from noloco_node.config.run_spec import INT8_BLOCK, ActivationCodec, token_bytes
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.cut import build_config
from noloco_node.outer import CodecName
from noloco_node.outer.codec import CODECS
from noloco_node.sizing.devices import Device
from noloco_node.sizing.footprint import Footprint, footprint_of
from noloco_node.sizing.memory import StageMemory, planned_in_flight, planned_memory
from noloco_node.sizing.traffic import traffic_of
from noloco_node.sizing.utilisation import Limit, Link, StageLoad, UtilisationOutlook, outlook_of

RECOMPUTED = 4.0 / 3.0
"""The work of a stage that makes its graph anew, in usual ones: forward twice, backward once (which is two
forwards)."""
HOST_LAYER_SECONDS = {"keep": (3e-3, 3e-3), "recompute": (3e-3, 3e-3), "checkpoint": (4.6e-3, 3.2e-3)}
"""Seconds of the host's Python for each layer and microbatch, there and back, by `inner.backward`; without and with
`node.compile`, whose gain was measured with `checkpoint` alone: 0.69 of the time, the median of four turns. One core of
a slow machine, otherwise medians of three of `python -m benchmarks.host_time --layers 12 --compiled` (2026-11-30)."""
FIXED_PART = 0.3
"""The size of an embedding's fixed part that is advised: in small models 0.1 and 1.0 did a little worse, 0.02 far."""
OF_THE_WIDTH = 8
"""A subspace is advised that has this part of the hidden size."""

CODEC_SECONDS: Mapping[CodecName, float] = {
    "fp32": 17e-9,
    "fp16": 20e-9,
    "int8": 35e-9,
    "int4": 32e-9,
    "dct": 34e-9,
    "sign": 40e-9,
}
"""Seconds that one thread of the host works for each weight of an outer step, whose arithmetic is on one thread.
Measured with 8 million weights on one core of a shared machine, 2026-11-27 to 29."""
CARD_SECONDS: Mapping[CodecName, float] = {"int8": 6.6e-9, "int4": 6.3e-9, "sign": 7.6e-9}
"""Seconds that a card works for each weight of an outer step. They were not measured, as no card was at hand. For each
weight 37, 34.5 or 45 bytes cross, at 8 GB/s, and 2 ns of the host's thread remain."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change of settings, and the share of the device's time that it would give."""

    settings: tuple[str, ...]
    share: float
    more_memory: int
    """Bytes that a device needs more for it, at the stage that needs most (less than nothing: fewer)."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the configuration gives, and which settings would raise it."""

    outlook: UtilisationOutlook
    under_way: int
    """Microbatches that a first-stage replica keeps under way."""
    compute_seconds: float
    """That a microbatch takes of all stages' devices together."""
    suggestions: tuple[Suggestion, ...]
    """Best first."""
    in_vain: tuple[str, ...]
    """Settings that would change nothing worth saying."""


def arithmetic_seconds(codec: CodecName, *, on_card: bool) -> float:
    """Seconds for each weight of an outer step; `on_card` where a card with room for a chunk does what it can of it."""
    return CARD_SECONDS.get(codec, CODEC_SECONDS[codec]) if on_card else CODEC_SECONDS[codec]


def does_arithmetic(device: Device, needs: Sequence[StageMemory]) -> bool:
    """Whether a device does the arithmetic of outer steps: all that a stage takes has room, with a chunk of it."""
    return device.memory is not None and max(need.on_device for need in needs) <= device.memory


def expect(config: Config, link: Link, device: Device) -> Expectation:
    """On such devices and links. Loads transformers; UserError as `footprint_of`."""
    known: dict[tuple[int, int | None], Footprint] = {}

    def footprint(of: Config) -> Footprint:
        """The footprint; of all that changes here, it depends on stages and subspace alone."""
        key = of.run.stages, of.run.model.subspace_rank
        if key not in known:
            known[key] = footprint_of(of.run)
        return known[key]

    def planned(of: Config) -> tuple[list[StageLoad], int]:
        """The loads of the stages, and the bytes of a device at the stage that needs most."""
        needs = planned_memory(of, footprint(of))
        return planned_loads(of, footprint(of), device, needs), max(need.on_device for need in needs)

    loads, before = planned(config)
    now, kept = outlook_with(config, loads, link), under_way(config, loads, link)
    found: list[Suggestion] = []
    in_vain: list[str] = []
    for change in _changes(config, kept, now.limit):
        other = _changed(config, change)
        others, device_bytes = planned(other)
        share = outlook_with(other, others, link).share
        if float(f"{share:.2g}") <= float(f"{now.share:.2g}"):  # it would show the same figure
            in_vain.append(_words(change)[0])
        else:
            found.append(Suggestion(_words(change), share, device_bytes - before))
    found.sort(key=lambda suggestion: -suggestion.share)
    return Expectation(
        outlook=now,
        under_way=kept,
        compute_seconds=sum(load.compute_seconds for load in loads),
        suggestions=tuple(found[:6]),
        in_vain=tuple(in_vain),
    )


def planned_loads(
    config: Config, footprint: Footprint, device: Device, needs: Sequence[StageMemory]
) -> list[StageLoad]:
    """What a microbatch asks of each stage on such devices; `needs` is the planned memory."""
    on_card = does_arithmetic(device, needs)
    return loads_of(config, footprint, device.flop_per_second, step_microbatches(config), on_card=on_card)


def outlook_with(config: Config, loads: Sequence[StageLoad], link: Link) -> UtilisationOutlook:
    """What the configuration gives if a microbatch asks this of each stage."""
    return outlook_of(
        loads,
        link,
        in_flight=under_way(config, loads, link),
        h=config.run.outer.inner_steps,
        step_microbatches=step_microbatches(config),
    )


def check_outer_steps(config: Config, footprint: Footprint, link: Link, device: Device) -> None:
    """Raise UserError (CONFIG) where an outer step behind the node's bound, which `link` has, lasts longer than the H
    inner steps to the next one."""
    bound, steps = config.node.uplink_mbit, config.run.outer.inner_steps
    loads = planned_loads(config, footprint, device, planned_memory(config, footprint))

    def outlook(count: int) -> UtilisationOutlook:
        return outlook_with(_changed(config, {"run.outer.inner_steps": count}), loads, link)

    found = outlook(steps)
    if bound is None or found.outer_by_arithmetic or found.inner_steps <= steps:
        return
    least = math.ceil(found.inner_steps)
    while outlook(least).inner_steps > least:  # fewer outer steps let inner steps be quicker
        least += 1
    raise UserError(
        ExitCode.CONFIG,
        f"run.outer.inner_steps is {steps}, too few for node.uplink_mbit {bound:g}: an outer step takes "
        f"{found.outer_seconds:,.0f} s of that line beside the training, as long as "
        f"{found.inner_steps:.0f} inner steps",
        f"set run.outer.inner_steps to {least} or more, or raise node.uplink_mbit",
    )


def step_microbatches(config: Config) -> int:
    """Microbatches of a replica behind one inner step, where as many share the batch as the file says."""
    return config.run.microbatches_a_step(config.local_swarm.replicas)


def under_way(config: Config, loads: Sequence[StageLoad], link: Link) -> int:
    """Microbatches that a first-stage replica keeps under way: what is set, or what `auto` comes to there."""
    if config.node.in_flight != "auto":
        return config.node.in_flight
    h, share = config.run.outer.inner_steps, step_microbatches(config)

    def rate(count: int) -> float:
        return outlook_of(loads, link, in_flight=count, h=h, step_microbatches=share).microbatches_a_second

    most = planned_in_flight(config)
    return next(count for count in range(1, most + 1) if rate(count) >= AUTO_AIM * rate(most))


def loads_of(
    config: Config, footprint: Footprint, flop_per_second: float, step_microbatches: int, *, on_card: bool = False
) -> list[StageLoad]:
    """What one microbatch asks of each stage, its share of an inner step of so many microbatches included."""
    run, backward = config.run, config.run.inner.backward
    traffic = traffic_of(run, footprint)

    def again(stage: int) -> bool:
        return backward == "checkpoint" or (backward == "recompute" and stage < run.stages - 1)

    return [
        StageLoad(
            compute_seconds=(
                run.microbatch_tokens * footprint.flop_per_token[stage] * (RECOMPUTED if again(stage) else 1.0)
                + footprint.step_flop[stage] / step_microbatches
            )
            / flop_per_second,
            sends=(traffic[stage].forward, traffic[stage].backward),
            outer_bytes=float(traffic[stage].outer_step),
            outer_arithmetic=arithmetic_seconds(run.outer.codec, on_card=on_card) * footprint.parameters[stage],
            host_seconds=HOST_LAYER_SECONDS[backward][config.node.compile] * footprint.layers[stage],
        )
        for stage in range(run.stages)
    ]


_Change = dict[str, Any]


def _changes(config: Config, now_under_way: int, limit: Limit) -> Iterator[_Change]:
    """What an owner could turn, one thing at a time."""
    run = config.run
    if limit not in ("device", "host") and run.stages > 1 and (rank := fitting_rank(run.model)) is not None:
        beside = {} if run.model.embedding_std is not None else {"run.model.embedding_std": FIXED_PART}
        yield {"run.model.subspace_rank": rank, "run.model.subspace_last_stage_free": True, **beside}
    for more in (2 * now_under_way, 4 * now_under_way):
        if more <= 16:
            yield {"node.in_flight": more}
    now = token_bytes(INT8_BLOCK, run.pipeline.activations[-1])
    narrower: tuple[ActivationCodec, ...] = ("bf16", "int8", "int4")
    for codec in narrower:
        if token_bytes(INT8_BLOCK, codec) < now:
            yield {"run.pipeline.activations": (codec,)}
    if run.stages > 1 and run.model.layers_per_stage is None:
        yield {"run.model.stages": math.ceil(run.stages / 2)}
    if run.stages > 1 and 2 * run.microbatch_tokens <= run.inner.global_batch_tokens:
        yield {"run.inner.microbatch_windows": 2 * run.inner.microbatch_windows}
    coded = CODECS[run.outer.codec].wire_bytes(1 << 20)
    if coded > CODECS["int4"].wire_bytes(1 << 20):
        yield {"run.outer.codec": "int4"}
    if limit == "host" and not config.node.compile and not run.model.config.get("output_router_logits"):
        yield {"node.compile": True}
    yield {"run.outer.inner_steps": 2 * run.outer.inner_steps}


def fitting_rank(model: ModelSpec) -> int | None:
    """An eighth of the hidden size, where the model can be in a subspace, is in none yet, and starts from a seed."""
    if model.subspace_rank is not None or model.fingerprint is not None:
        return None
    rank = int(build_config(model).hidden_size) // OF_THE_WIDTH // 8 * 8
    try:
        build_config(model.model_copy(update={"subspace_rank": rank}))
    except UserError:
        return None
    return rank or None


def _changed(config: Config, change: _Change) -> Config:
    """A copy with other values; groups on the way are copied, not validated anew."""
    copied: Any = config
    for name, value in change.items():
        copied = _with(copied, name.split("."), value)
    return copied


def _with(group: Any, path: list[str], value: object) -> Any:
    head, *rest = path
    inner = value if not rest else _with(getattr(group, head), rest, value)
    return group.model_copy(update={head: inner})


def _words(change: _Change) -> tuple[str, ...]:
    return tuple(f"{name}={_as_written(value)}" for name, value in change.items())


def _as_written(value: object) -> str:
    """The value as a file has it; of several codecs there is only one here."""
    written = "".join(map(str, value)) if isinstance(value, tuple) else str(value)  # pyright: ignore[reportUnknownArgumentType]
    return written.lower() if isinstance(value, bool) else written
