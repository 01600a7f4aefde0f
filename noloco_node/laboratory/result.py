"""What one simulated training comes to: a record of results.json."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from noloco_node.config.lab_spec import Algorithm


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
