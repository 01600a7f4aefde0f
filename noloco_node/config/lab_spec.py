"""What the laboratory runs: which algorithms, with which options, on how many replicas, with which seeds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from noloco_node.config.settings import Positive, Settings

Algorithm = Literal["noloco", "diloco", "data_parallel", "local"]

Plot = Literal["convergence", "gamma"]


class WorldSpec(Settings):
    """What only a laboratory may choose."""

    tensors_sent: Literal[1, 2] = 1
    """Tensors of the stage's size that an exchange sends: 2 for the form in the NoLoCo paper. It changes the bytes
    only."""
    allow_inadmissible: bool = False
    """Whether γ may lie where replicas diverge. A daemon never may."""
    nesterov: bool = False
    """`diloco` only: its outer momentum looks ahead (Nesterov's, as DiLoCo was published), with `outer.alpha` and
    `outer.beta` as momentum and learning rate."""


class VariantSpec(Settings):
    """One line of the comparison: an algorithm and the settings in which it differs from the file's."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """Name of the line, in the table and the plots."""
    algorithm: Algorithm
    """`local` exchanges nothing."""
    set: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Dotted settings of the run (`outer.beta`) or of the world (`world.nesterov`)."""
    sweep: dict[str, list[JsonValue]] = Field(default_factory=dict[str, list[JsonValue]])
    """Dotted settings and the values to try: every combination is one point."""


ALL_ALGORITHMS: tuple[VariantSpec, ...] = (
    VariantSpec(name="noloco", algorithm="noloco"),
    VariantSpec(name="diloco", algorithm="diloco"),
    VariantSpec(name="data parallel", algorithm="data_parallel"),
    VariantSpec(name="no exchange", algorithm="local"),
)


class LabSpec(Settings):
    """An experiment: variants × replicas × seeds, each to `run.inner.target_tokens`."""

    variants: Annotated[tuple[VariantSpec, ...], Field(min_length=1)] = ALL_ALGORITHMS
    """The lines of the comparison."""
    replicas: Annotated[tuple[Positive, ...], Field(min_length=1)] = (4,)
    """Replicas of each stage."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (1,)
    """Each seeds first weights, data order, routes and pairings. Results are reported on these."""
    tune_seeds: tuple[int, ...] = ()
    """Where given, a variant's sweep is decided on these seeds by the least mean validation loss. Only the chosen point
    is run on `seeds`. Otherwise every point is."""
    world: WorldSpec = WorldSpec()
    evaluations: Positive = 12
    """Points of the validation curve of each run."""
    divergence_points: Positive = 60
    """Points at which the replica divergence is recorded."""
    plots: tuple[Plot, ...] = ("convergence",)
    """Plots to draw from the results."""
    reference: str = "data parallel"
    """The variant that gaps are measured against in the table."""
    workers: Positive = 2
    """Processes; each runs one training at a time on one thread."""

    @model_validator(mode="after")
    def _variants_are_named_once(self) -> LabSpec:
        names = [variant.name for variant in self.variants]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"lab.variants has two of the name '{name}': give each its own")
        if set(self.tune_seeds) & set(self.seeds):
            raise ValueError(f"lab.tune_seeds {list(self.tune_seeds)} and lab.seeds {list(self.seeds)} share a seed")
        return self
