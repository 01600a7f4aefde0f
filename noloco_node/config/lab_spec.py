"""What the laboratory runs: which algorithms, with which options, on how many replicas, with which seeds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from noloco_node.config.settings import Fraction, Positive, PositiveFloat, Settings

Algorithm = Literal["noloco", "diloco", "data_parallel", "local", "gossip"]

Plot = Literal["convergence", "spread", "gamma", "sweep", "scaling", "frontier"]


class WorldSpec(Settings):
    """The simulated swarm: what the network and the machines do, and what only a laboratory may choose."""

    group_size: Annotated[int, Field(ge=2)] = 2
    """n: replicas that average together (`noloco` and `gossip`; `diloco` takes all)."""
    lag: Annotated[int, Field(ge=0)] = 0
    """Inner steps that go on between the snapshot of an exchange and its commit."""
    microbatches_a_step: Positive | None = 1
    """Microbatches behind a replica's inner step, its windows divided among them. If null, microbatches are those of
    `inner.microbatch_windows`, as in a daemon."""
    speeds: tuple[PositiveFloat, ...] = (1.0,)
    """Relative speeds of the machines, given to the replicas in turn."""
    absent_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the replicas that are away at any time; they come back with the state that they left with."""
    absence_steps: Positive = 100
    """How long an absence lasts, in inner steps."""
    token_weights: bool = True
    """Whether progress is weighted by the tokens behind it."""
    moments: Literal["local", "averaged"] = "local"
    """`averaged`: the optimizer's moments are averaged with the partners at an outer step (their bytes are counted)."""
    tensors_sent: Literal[1, 2] = 1
    """Tensors of the stage's size that an exchange sends: 2 for the form in the NoLoCo paper. It changes the bytes
    only."""
    initial_spread: Annotated[float, Field(ge=0.0)] = 0.0
    """Standard deviation of a disturbance of every replica's first weights, to watch it being averaged away."""
    allow_inadmissible: bool = False
    """Whether γ may lie where the spread grows. A daemon never may."""
    nesterov: bool = False
    """`diloco` only: its outer momentum looks ahead (Nesterov's, as DiLoCo was published), with `outer.alpha` and
    `outer.beta` as momentum and learning rate."""
    data_skew: Fraction = 0.0
    """Share of each replica's windows that come from a part of the text of its own, one stretch for each replica. The
    others are drawn from the whole text."""
    weight_noise: Annotated[float, Field(ge=0.0)] = 0.0
    """`data_parallel` only: standard deviation of the noise on the weights with which each replica computes its
    gradient, at the highest learning rate. It is drawn anew for each inner step and falls with the rate, as the spread
    across replicas does."""


class VariantSpec(Settings):
    """One line of the comparison: an algorithm and the settings in which it differs from the file's."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """Name of the line, in the table and the plots."""
    algorithm: Algorithm
    """`local` exchanges nothing; `gossip` averages pairs without an outer step."""
    set: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Dotted settings of the run (`outer.beta`) or of the world (`world.lag`)."""
    sweep: dict[str, list[JsonValue]] = Field(default_factory=dict[str, list[JsonValue]])
    """Dotted settings and the values to try: every combination is one point."""


ALL_ALGORITHMS: tuple[VariantSpec, ...] = (
    VariantSpec(name="noloco", algorithm="noloco"),
    VariantSpec(name="diloco", algorithm="diloco"),
    VariantSpec(name="data parallel", algorithm="data_parallel"),
    VariantSpec(name="gossip", algorithm="gossip"),
    VariantSpec(name="no exchange", algorithm="local"),
)


class LabSpec(Settings):
    """An experiment: variants × replicas × lengths × seeds."""

    variants: Annotated[tuple[VariantSpec, ...], Field(min_length=1)] = ALL_ALGORITHMS
    """The lines of the comparison."""
    replicas: Annotated[tuple[Positive, ...], Field(min_length=1)] = (4,)
    """Replicas of each stage."""
    lengths: tuple[Positive, ...] = ()
    """Lengths of training in tokens; `inner.target_tokens` where empty."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (1,)
    """Each seeds first weights, data order, routes and pairings. Results are reported on these."""
    tune_seeds: tuple[int, ...] = ()
    """Where given, a variant's sweep is decided on these seeds (the least mean validation loss), and only the chosen
    point is run on `seeds`. Otherwise every point is run on `seeds`."""
    tune_halving: bool = True
    """All points of a sweep are run on the first of `tune_seeds` only, the best two on the others."""
    world: WorldSpec = WorldSpec()
    evaluations: Positive = 12
    """Points of the validation curve of each run."""
    spread_points: Positive = 60
    """Points at which the spread across replicas is recorded."""
    plots: tuple[Plot, ...] = ("convergence",)
    """Plots to draw from the results."""
    reference: str = "data parallel"
    """The variant that gaps are measured against in the table."""
    target_loss: PositiveFloat | None = None
    """Where given, the table says after how many tokens each line's validation loss reached it."""
    baseline: str | None = None
    """The variant whose gap the others close; the table tells their share of it."""
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
