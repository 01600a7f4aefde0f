"""From a lab file to the trainings it asks for: every point of every variant, validated before anything is trained."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import JsonValue, ValidationError

from noloco_node.config.experiments import Algorithm, LabSpec, VariantSpec, WorldSpec
from noloco_node.config.load import Config, Problem, problems_of
from noloco_node.config.model_spec import ModelSpec
from noloco_node.config.run_spec import RunSpec
from noloco_node.config.settings import canonical_json
from noloco_node.errors import ExitCode, UserError

LENGTH_SETTING = "inner.target_tokens"
GAMMA = "outer.gamma"


@dataclass(frozen=True, slots=True)
class Point:
    """A variant at one point of its sweep, on so many replicas."""

    variant: str
    algorithm: Algorithm
    options: dict[str, JsonValue]
    """What differs from the file: the variant's `set` and the values of its sweep."""
    swept: dict[str, JsonValue]
    """The part of `options` that is being varied."""
    replicas: int
    run: RunSpec
    world: WorldSpec

    @property
    def tokens(self) -> int:
        """Length of the training."""
        return self.run.inner.target_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """What is tuned together: the points of one variant on so many replicas."""

    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One training as a worker needs it."""

    run: RunSpec
    world: WorldSpec
    algorithm: Algorithm
    replicas: int
    seed: int
    evaluations: int
    divergence_points: int

    @property
    def key(self) -> str:
        """Equal for trainings that give the same numbers: 32 hex digits of a hash of all that they depend on. The name
        of the variant and the purpose do not count, so that several cells share a training."""
        content = {
            "run": self.run.model_dump(mode="json"),
            "world": self.world.model_dump(mode="json"),
            "algorithm": self.algorithm,
            "replicas": self.replicas,
            "seed": self.seed,
            "evaluations": self.evaluations,
            "divergence_points": self.divergence_points,
        }
        return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:32]

    @property
    def cost(self) -> float:
        """Expected duration, in units of its own."""
        return float(self.run.inner.target_tokens)


def job_of(point: Point, seed: int, lab: LabSpec) -> Job:
    """The training behind a point.

    Gradients averaged in every step make all replicas one: what counts is the global batch, not among how many it is
    divided. So `data_parallel` is trained once, at the least number of replicas, and recorded with each.
    """
    replicas = min(lab.replicas) if point.algorithm == "data_parallel" else point.replicas
    return Job(
        run=point.run,
        world=point.world,
        algorithm=point.algorithm,
        replicas=replicas,
        seed=seed,
        evaluations=lab.evaluations,
        divergence_points=lab.divergence_points,
    )


def expand(config: Config) -> tuple[Cell, ...]:
    """All cells of the experiment, by variant and replicas.

    Raises UserError (CONFIG) that names each wrong setting as `lab.variants[3].set outer.gamma`.
    """
    problems = [*_reference_problems(config.lab), *_plot_problems(config.lab)]
    cells = [cell for index in range(len(config.lab.variants)) for cell in _cells(config, index, problems)]
    if problems:
        shown = "\n".join(f"  {problem}" for problem in dict.fromkeys(problems))
        raise UserError(
            ExitCode.CONFIG,
            f"the experiment cannot be run as it is written\n{shown}",
            "correct the named settings in the `lab:` part of the file; nothing has been trained",
        )
    return tuple(cells)


def check_points(cells: tuple[Cell, ...]) -> None:
    """Raise UserError (CONFIG) if a point's model cannot be cut, as `check_cut` does, or trains routers. It is raised
    too if a point's global batch cannot be divided among its replicas. Loads torch and transformers."""
    from noloco_node.laboratory.training import microbatch_windows
    from noloco_node.model.cut import check_cut, check_parts_documents

    points = [point for cell in cells for point in cell.points]
    models = {canonical_json(point.run.model.model_dump(mode="json")): point.run.model for point in points}
    for model in models.values():
        check_cut(model)
        _check_routers(model)
    for point in points:
        if point.run.data.attention == "document":
            check_parts_documents(point.run.model, laboratory=True)
        try:
            microbatch_windows(point.run, point.replicas)
        except UserError as error:
            message = f"lab.variants: '{point.variant}' on {point.replicas} replicas: {error.message}"
            raise UserError(error.exit_code, message, error.remedy) from None


def _check_routers(model: ModelSpec) -> None:
    if model.config.get("output_router_logits"):
        raise UserError(
            ExitCode.CONFIG,
            "run.model.config.output_router_logits is true: the laboratory does not train the routers of a mixture of "
            "experts",
            "set it to false for the laboratory: routers learn from the tokens' loss alone then",
        )


def _reference_problems(lab: LabSpec) -> Iterator[str]:
    names = [variant.name for variant in lab.variants]
    if "reference" in lab.model_fields_set and lab.reference not in names:
        yield f"lab.reference: there is no variant '{lab.reference}' among {', '.join(names)}"


def _plot_problems(lab: LabSpec) -> Iterator[str]:
    """Plots that the experiment gives no points for."""
    if "gamma" in lab.plots and not any(GAMMA in variant.sweep for variant in lab.variants):
        yield f"lab.plots: 'gamma' has nothing to show: no variant sweeps {GAMMA}"


def sweep_points(variant: VariantSpec) -> list[dict[str, JsonValue]]:
    """Every combination of the swept values, the last setting varying fastest; one empty point without a sweep."""
    return [dict(zip(variant.sweep, values, strict=True)) for values in itertools.product(*variant.sweep.values())]


def _cells(config: Config, index: int, problems: list[str]) -> Iterator[Cell]:
    lab, variant = config.lab, config.lab.variants[index]
    found = list(_misused(lab, index))
    problems += found
    if found:
        return
    for replicas in lab.replicas:
        built = [_point(config, index, swept, replicas, problems) for swept in sweep_points(variant)]
        yield Cell(tuple(point for point in built if point is not None))


def _misused(lab: LabSpec, index: int) -> Iterator[str]:
    """Mistakes of a variant that show without building its runs."""
    variant, where = lab.variants[index], f"lab.variants[{index}]"
    for group, names in (("set", variant.set), ("sweep", variant.sweep)):
        if LENGTH_SETTING in names:
            yield f"{where}.{group} {LENGTH_SETTING}: all variants train equally long; set run.{LENGTH_SETTING}"
    for name in variant.sweep:
        if not variant.sweep[name]:
            yield f"{where}.sweep {name}: there is no value to try"
        if name in variant.set:
            yield f"{where}.sweep {name}: is in `set` of the same variant too; leave it in one of them"


def _point(config: Config, index: int, swept: dict[str, JsonValue], replicas: int, problems: list[str]) -> Point | None:
    variant = config.lab.variants[index]
    options = {**variant.set, **swept}
    run = config.run.model_dump(mode="json")
    world = config.lab.world.model_dump(mode="json")
    found: list[str] = []
    for name, value in options.items():
        inside_world = name.removeprefix("world.")
        if not _assign(world if inside_world != name else run, inside_world, value):
            found.append(f"{_place(index, variant, name)}: {name} is no setting of the run or the world")
    if not found:
        try:
            built_world = WorldSpec.model_validate(world)
            built_run = RunSpec.model_validate(run, context={"allow_inadmissible": built_world.allow_inadmissible})
        except ValidationError as error:
            raw, model, prefix = (world, WorldSpec, "world.") if error.title == "WorldSpec" else (run, RunSpec, "")
            found += [_named(index, variant, p, prefix, options) for p in problems_of(error, raw, model)]
        else:
            found += _unfit_algorithm(index, variant, built_world)
            point = Point(variant.name, variant.algorithm, options, swept, replicas, built_run, built_world)
            if not found:
                return point
    problems += found
    return None


def _assign(group: dict[str, Any], name: str, value: JsonValue) -> bool:
    """Set a dotted setting in plain data; False where it leads into something that is no group."""
    *parents, leaf = name.split(".")
    for parent in parents:
        inner: object = group.get(parent)
        if not isinstance(inner, dict):
            return False
        group = cast("dict[str, Any]", inner)
    group[leaf] = copy.deepcopy(value)
    return True


def _place(index: int, variant: VariantSpec, name: str) -> str:
    """The place in the file at which a setting of a variant is written."""
    return f"lab.variants[{index}].{'sweep' if name in variant.sweep else 'set'} {name}"


def _named(index: int, variant: VariantSpec, problem: Problem, prefix: str, options: Mapping[str, JsonValue]) -> str:
    """A problem with the place it comes from: one setting, or those of the variant that its text speaks of."""
    setting = prefix + problem.setting
    if problem.setting in options or setting in options:
        return f"{_place(index, variant, setting)}: {problem.text}"
    leaf_names = [name for name in options if name in problem.text or _within(setting, name)]
    if leaf_names:
        places = ", ".join(_place(index, variant, name) for name in leaf_names)
        return f"{places}: {problem.text}"
    return f"lab.variants[{index}] ({variant.name}): {problem}"


def _within(setting: str, name: str) -> bool:
    return bool(setting) and (setting.startswith((f"{name}.", f"{name}[")))


def _unfit_algorithm(index: int, variant: VariantSpec, world: WorldSpec) -> Iterator[str]:
    """Settings of the world that mean something for one algorithm only."""
    if world.nesterov and variant.algorithm != "diloco":
        yield (
            f"lab.variants[{index}] ({variant.name}): world.nesterov is for the algorithm diloco, and this variant's "
            f"is {variant.algorithm}; set it in the variants of that one"
        )
