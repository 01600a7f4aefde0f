"""Which codec and H bring a run soonest to a loss on given devices and links. Pure arithmetic.

What the laboratory measured of tokens to a loss, by what the link lets a replica train of them in a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from noloco_node.config.load import Config
from noloco_node.config.run_spec import RunSpec
from noloco_node.sizing.loss_table import Family, Measured, loss_table
from noloco_node.sizing.utilisation import UtilisationOutlook

KEPT = 1.01
"""An H counts as kept where outer steps lie at most so many times as far apart."""
LEVEL = 1.03
"""Of settings whose times to the loss differ by less, the one that sends least is taken: seeds differ by as much."""
PLAIN = {"outer.codec", "outer.inner_steps", "outer.fragments"}
"""What an owner may turn without another learning rate."""


@dataclass(frozen=True, slots=True)
class Quickest:
    """The settings that are soonest at the loss, and what they come to beside the present ones."""

    settings: tuple[str, ...]
    """What to set; empty where the present settings are as good as any."""
    time: float | None
    """To the loss, as a multiple of the present settings'; None where those were not measured."""
    loss: float | None
    """Nats a token more than now (less than nothing: fewer), for as many tokens; None likewise."""
    sent: float
    """Bytes of outer steps that a replica sends in an inner step, at the stage that sends most."""
    sent_now: float


@dataclass(frozen=True, slots=True)
class _Candidate:
    point: Measured
    values: dict[str, Any]
    seconds: float
    sent: float

    @property
    def plain(self) -> bool:
        return self.values.keys() <= PLAIN


@dataclass(frozen=True, slots=True)
class _Present:
    point: Measured | None
    seconds: float | None
    sent: float


def quickest(
    config: Config, outlook: Callable[[Config], UtilisationOutlook], outer_bytes: Callable[[Config], float]
) -> tuple[Quickest, ...]:
    """Of the measured settings, each with an H that the link keeps: the best that differs from the run in codec, H and
    fragments alone, and the best of all where that is sooner still. Empty where no measured one is kept."""
    now = outlook(config)
    own = loss_table().family_of(config.run)
    point = None if own is None else own.at(now.inner_steps)
    seconds = None if point is None or point.tokens is None else point.tokens / now.microbatches_a_second
    present = _Present(point, seconds, outer_bytes(config) / now.inner_steps)
    every = list(_candidates(config, own, outlook, outer_bytes))
    plain = [each for each in every if each.plain]
    chosen = [_best(some) for some in (plain, every) if some]
    if len(chosen) == 2 and chosen[1].seconds * LEVEL >= chosen[0].seconds:
        chosen.pop()
    return tuple(_beside(present, each) for each in chosen)


def _best(found: Sequence[_Candidate]) -> _Candidate:
    least = min(each.seconds for each in found)
    return min((each for each in found if each.seconds <= least * LEVEL), key=lambda each: (each.sent, each.seconds))


def _beside(present: _Present, best: _Candidate) -> Quickest:
    quicker = present.seconds is None or best.seconds * LEVEL < present.seconds
    if not quicker and best.sent * LEVEL >= present.sent:
        return Quickest((), 1.0, 0.0, present.sent, present.sent)
    return Quickest(
        settings=tuple(f"run.{name}={_as_written(value)}" for name, value in best.values.items()),
        time=None if present.seconds is None else best.seconds / present.seconds,
        loss=None if present.point is None else best.point.loss - present.point.loss,
        sent=best.sent,
        sent_now=present.sent,
    )


def _candidates(
    config: Config,
    own: Family | None,
    outlook: Callable[[Config], UtilisationOutlook],
    outer_bytes: Callable[[Config], float],
) -> Iterator[_Candidate]:
    for family in loss_table().families:
        for point in family.points:
            values = _changes(config.run, own, family, point)
            other = None if point.tokens is None else _with(config, values)
            if other is None or point.tokens is None:
                continue
            then = outlook(other)
            if then.inner_steps <= point.inner_steps * KEPT:
                seconds = point.tokens / then.microbatches_a_second
                yield _Candidate(point, values, seconds, outer_bytes(other) / point.inner_steps)


def _changes(run: RunSpec, own: Family | None, family: Family, point: Measured) -> dict[str, Any]:
    """In what the run would differ."""
    wanted: dict[str, Any] = {**family.differing(run), "outer.inner_steps": point.inner_steps}
    if run.outer.inner_steps == point.inner_steps:
        del wanted["outer.inner_steps"]
    factor = family.rate / (1.0 if own is None else own.rate)
    if factor != 1.0:
        wanted["inner.learning_rate"] = float(f"{run.inner.learning_rate * factor:.6g}")
    return wanted


def _with(config: Config, values: dict[str, Any]) -> Config | None:
    """The changed configuration, validated; None where it is refused, such as for a `min_inner_steps` above its H."""
    run = config.run.model_dump()
    for name, value in values.items():
        group, _, field = name.partition(".")
        run[group][field] = value
    try:
        return config.model_copy(update={"run": RunSpec.model_validate(run)})
    except ValidationError:
        return None


def _as_written(value: object) -> str:
    return "null" if value is None else str(value)
