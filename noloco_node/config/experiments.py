"""What `noloco-node lab` compares, and what `noloco-node simulate` runs: on what devices and links, for how long."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from noloco_node.config.settings import Positive, PositiveFloat, Settings

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


class SimSpec(Settings):
    """A swarm in virtual time: the node's own code on modelled devices, links and directory. Each stage is a noisy
    quadratic of 64 dimensions, with bytes and times of `run.model`."""

    kind: Literal["swarm"] = "swarm"
    """What is simulated; `hunt` has settings of its own, below."""
    nodes: Annotated[int, Field(gt=0, le=4096)] = 16
    """Nodes in all, dealt out to the stages in turn."""
    hours: Annotated[float, Field(gt=0.0, le=10_000.0)] = 1.0
    """Virtual hours; less where the run's end comes first."""
    seed: int = 0
    """Seed of all random choices: one seed, one course."""
    operation_seconds: PositiveFloat = 1.0
    """What a usual device takes for a microbatch's forward at its stage; its backward takes twice that."""
    device_spread: Annotated[float, Field(ge=0.0, le=3.0)] = 0.0
    """Devices: standard deviation of the logarithm of their speeds. With 0.7 the quickest of 16 are ten times as fast
    as the slowest."""
    exchange_seconds: Annotated[float, Field(ge=0.0)] = 0.03
    """Seconds of a node's processor that an exchange takes on its side for a million weights: coding, checks, the step.
    `benchmarks.outer` measures 0.026 to 0.035."""
    round_trips_ms: Annotated[tuple[tuple[PositiveFloat, ...], ...], Field(min_length=1, max_length=64)] = ((20.0,),)
    """Milliseconds there and back, from each region to each; nodes are dealt out to the regions in turn."""
    up_mbit: PositiveFloat = 50.0
    """Megabits a second that a usual node can send; all of its streams share them."""
    down_mbit: PositiveFloat = 200.0
    """Megabits a second that a usual node can receive; all of its streams share them."""
    link_spread: Annotated[float, Field(ge=0.0, le=3.0)] = 0.0
    """Up- and downlinks: standard deviation of their logarithm."""
    life_hours: PositiveFloat | None = None
    """How long a node lives on average before it is gone from one moment to the next. Another comes in its place and
    takes over a stage peer's state; a quadratic's is one chunk. null: nobody dies."""
    sample_seconds: Annotated[float, Field(ge=1.0)] = 60.0
    """Virtual seconds between two samples of the replica divergence and the losses."""

    @model_validator(mode="after")
    def _round_trips_are_square(self) -> SimSpec:
        trips = self.round_trips_ms
        if any(len(row) != len(trips) for row in trips):
            raise ValueError(
                f"sim.round_trips_ms has {len(trips)} rows, and not as many numbers in each: name the round trip from "
                "each region to each"
            )
        if any(trips[one][other] != trips[other][one] for one in range(len(trips)) for other in range(one)):
            raise ValueError(
                "sim.round_trips_ms is not the same there and back: a round trip is both ways, so make row i, column j "
                "equal to row j, column i"
            )
        return self


class HuntSpec(Settings):
    """Many small swarms, each under a schedule of faults that is drawn from its seed; invariants judge what comes of
    it. Each is a run of its own that ends with its target."""

    kind: Literal["hunt"]
    """What is simulated."""
    seeds: Positive = 100
    """How many schedules."""
    first: Annotated[int, Field(ge=0)] = 0
    """Seed of the first one."""
    fewest: Annotated[int, Field(ge=2)] = 4
    """Nodes of the smallest swarm."""
    most: Annotated[int, Field(ge=2, le=64)] = 8
    """Nodes of the largest one."""
    faults: tuple[str, ...] = ()
    """Kinds of faults that are drawn, by name; none named: all."""
    schedule: dict[str, Any] | None = None
    """This schedule alone, as it was printed."""
    workers: Positive | None = None
    """Processes that carry out one schedule at a time; not set: one for each core. No course depends on it."""

    @model_validator(mode="after")
    def _fewest_below_most(self) -> HuntSpec:
        if self.fewest > self.most:
            raise ValueError(
                f"sim.fewest ({self.fewest}) exceeds sim.most ({self.most}): raise the one or lower the other"
            )
        return self
