"""What one simulated training comes to, a record of results.json, and what those of several seeds come to together."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from noloco_node.config.experiments import Algorithm
from noloco_node.config.run_spec import ActivationCodec, token_bytes


class Record(BaseModel):
    """Base of what is written: frozen; a number that is not finite is written as null."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="null")


class MeasuredSpread(Record):
    """How far the replicas are apart at one moment."""

    step: int
    tokens: int
    learning_rate: float
    spread: float | None
    """Variance of a fast weight across replicas (divided by N − 1), mean over all weights."""


class MeasuredLoss(Record):
    """Validation loss on the way, mean over replicas, in nats per token."""

    tokens: int
    validation_loss: float | None


class Measurement(Record):
    """The figures of one training. Losses are nats per token."""

    seed: int
    stages: int
    replicas: int
    parameters: int
    tokens: int
    validation_loss: float | None
    """Mean over replicas after the last outer step: what each of them would hand out. None where training diverged."""
    validation_loss_fast: float | None
    """Mean over replicas before the last outer step: what a daemon reports at the end of training."""
    validation_loss_merged: float | None
    """The loss of the mean over replicas of the weights after the last outer step: the exported model."""
    training_loss: float | None
    """Mean over the last tenth of the tokens."""
    diverged: bool
    curve: list[MeasuredLoss]
    spread: list[MeasuredSpread]
    inner_steps: int
    """Mean over replicas."""
    outer_rounds: float
    """Outer steps with a partner, mean over replicas."""
    alone_share: float
    """Share of the outer steps taken without a partner."""
    clipped_share: float
    """Share of the exchanges in which a partner's pull was clipped."""
    bytes_per_outer_step: float
    """Sent by one replica of each stage together, in one exchange."""
    bytes_per_inner_step: float
    """Bytes by inner step, over the whole training: what a fair comparison of traffic holds equal."""
    seconds: float


class Result(Measurement):
    """One training under the name of the variant that asked for it."""

    variant: str
    algorithm: Algorithm
    options: dict[str, Any]
    """The settings in which this run differs from the file's: the variant's `set` and its point of the sweep."""
    purpose: Literal["tune", "report"]


class Results(Record):
    """A whole experiment."""

    command: str
    """Repeats it."""
    versions: dict[str, str]
    text: str = ""
    """Fingerprint of the text; empty in a file of an older version."""
    run: dict[str, Any]
    lab: dict[str, Any]
    results: Annotated[list[Result], Field(default_factory=list)]

    def as_json(self) -> str:
        """The whole file: indented, but for the results, which take a line each."""
        plain = self.model_dump(mode="json")
        rows = ",\n".join(f"    {json.dumps(row, allow_nan=False)}" for row in plain.pop("results"))
        head = json.dumps(plain, indent=2, allow_nan=False).removesuffix("\n}")
        return f'{head},\n  "results": [\n{rows}\n  ]\n}}\n'


@dataclass(frozen=True, slots=True)
class Spot:
    """Mean of a figure over seeds, with its sample standard deviation (0 for one seed) and its extremes."""

    mean: float
    deviation: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spot:
        """ValueError where there is none."""
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        return cls(statistics.fmean(values), deviation, min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class FigureLine:
    """One point of one variant, on so many replicas: a row of the table, with a result by seed."""

    variant: str
    algorithm: Algorithm
    swept: dict[str, Any]
    """The values of the settings that the variant sweeps."""
    replicas: int
    results: tuple[Result, ...]

    @property
    def options(self) -> dict[str, Any]:
        """The settings in which the variant differs from the file's, the swept ones among them."""
        return self.results[0].options

    @property
    def diverged(self) -> int:
        """Seeds on which training diverged."""
        return sum(result.diverged or result.validation_loss is None for result in self.results)

    def figure(self, of: Callable[[Result], float | None]) -> Spot | None:
        """A figure over seeds; None where a seed has none."""
        values = [of(result) for result in self.results]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        return Spot.of(finite) if len(finite) == len(values) else None

    @property
    def loss(self) -> Spot | None:
        """Validation loss over seeds, in nats per token; None where a seed diverged."""
        return None if self.diverged else self.figure(lambda result: result.validation_loss)

    @property
    def root_of_final_spread(self) -> Spot | None:
        """√spread at the last moment recorded, over seeds; None where a seed diverged or has no spread."""
        return None if self.diverged else self.figure(lambda result: _root(result.spread[-1:]))


def _root(points: Sequence[MeasuredSpread]) -> float | None:
    spread = points[0].spread if points else None
    return math.sqrt(spread) if spread else None


def lines(record: Results, purpose: str = "report") -> list[FigureLine]:
    """The rows of an experiment, in the order of its results."""
    swept = swept_settings(record)
    grouped: dict[tuple[object, ...], list[Result]] = {}
    for result in record.results:
        if result.purpose == purpose:
            point = tuple((name, repr(value)) for name, value in result.options.items())
            grouped.setdefault((result.variant, point, result.replicas), []).append(result)
    return [_line(results, swept.get(results[0].variant, ())) for results in grouped.values()]


def _line(results: Sequence[Result], swept: Iterable[str]) -> FigureLine:
    first = results[0]
    options = {name: first.options[name] for name in swept if name in first.options}
    return FigureLine(first.variant, first.algorithm, options, first.replicas, tuple(results))


def activation_bytes(record: Results, result: Result) -> float | None:
    """Bytes of activations, labels and gradients that one replica of each stage together sends in an inner step. None
    if the model's configuration does not name its width."""
    model: dict[str, Any] = record.run["model"]
    hidden = result.options.get("model.config.hidden_size", model["config"].get("hidden_size"))
    width = result.options.get("model.subspace_rank", model.get("subspace_rank")) or hidden
    codecs = result.options.get("pipeline.activations", record.run["pipeline"]["activations"])
    if width is None:
        return None
    codec = cast(ActivationCodec, codecs if isinstance(codecs, str) else codecs[0])
    tokens = result.tokens / max(1, result.replicas * result.inner_steps)
    # A token's label, of four bytes, goes beside its activations.
    return tokens * (result.stages - 1) * (2 * token_bytes(width, codec) + 4)


def swept_settings(record: Results) -> dict[str, tuple[str, ...]]:
    """The settings that each variant sweeps, by the variant's name."""
    return {variant["name"]: tuple(variant["sweep"]) for variant in record.lab["variants"]}


def best(candidates: Iterable[FigureLine]) -> FigureLine | None:
    """The line of the least mean validation loss; None where all diverged."""
    alive = [(line.loss.mean, line) for line in candidates if line.loss is not None]
    return min(alive, key=lambda pair: pair[0])[1] if alive else None


def best_of(variant: str, all_lines: Iterable[FigureLine], replicas: int) -> FigureLine | None:
    """The best line of a variant on so many replicas; None where there is none."""
    return best(line for line in all_lines if (line.variant, line.replicas) == (variant, replicas))


def setting(record: Results, result: Result, name: str) -> Any:
    """A dotted setting of the run (`outer.alpha`) or the world (`world.nesterov`) as this result had it."""
    if name in result.options:
        return result.options[name]
    inside_world = name.removeprefix("world.")
    value: Any = record.lab["world"] if inside_world != name else record.run
    for part in inside_world.split("."):
        value = value[part]
    return value


def as_text(value: object) -> str:
    """A setting's value, as tables and plots name it."""
    return f"{value:g}" if isinstance(value, float) else str(value)
