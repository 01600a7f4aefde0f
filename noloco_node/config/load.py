"""From a YAML file to validated settings: every mistake in it named at once, with what is allowed instead."""

from __future__ import annotations

import copy
import json
import shlex
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from noloco_node.config import environment
from noloco_node.config.environment import node_environment, variable_of
from noloco_node.config.experiments import HuntSpec, LabSpec, SimSpec
from noloco_node.config.files import parse_yaml, read_config
from noloco_node.config.node_settings import ROUTERS_UNCOMPILED, UNCOMPILED, LocalSwarmSettings, NodeSettings
from noloco_node.config.own_paths import OWN_PATHS, with_own_paths
from noloco_node.config.pretrained import with_pretrained
from noloco_node.config.run_spec import RunSpec
from noloco_node.config.settings import GONE, Settings, new_name, with_new_names
from noloco_node.config.tokenizer_files import with_tokenizer
from noloco_node.config.wording import allowed_in_words, did_you_mean, value_in_words
from noloco_node.errors import SHOWN, ExitCode, UserError

NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})

S = TypeVar("S", bound=Settings)


class Config(Settings):
    """A whole configuration file."""

    run: RunSpec
    """What every peer of the run must agree on; the hash of this part is the run id."""
    node: NodeSettings = NodeSettings()
    """What this machine chooses for itself."""
    local_swarm: LocalSwarmSettings = LocalSwarmSettings()
    """Layout of `noloco-node swarm`."""
    lab: LabSpec = LabSpec()
    """What `noloco-node lab` compares; no daemon reads it."""
    sim: SimSpec = SimSpec()
    """What `noloco-node simulate` runs; no daemon reads it."""

    @model_validator(mode="after")
    def _stage_exists(self) -> Config:
        if isinstance(self.node.stage, int) and not 0 <= self.node.stage < self.run.stages:
            raise ValueError(
                f"node.stage ({self.node.stage}) does not exist: run.model.stages is {self.run.stages}, "
                f"so stages are 0 to {self.run.stages - 1}; choose one of them, or auto"
            )
        return self

    @model_validator(mode="after")
    def _compiles(self) -> Config:
        if self.node.compile and self.run.model.config.get("output_router_logits"):
            raise ValueError(f"{ROUTERS_UNCOMPILED}; {UNCOMPILED}")
        return self


class HuntConfig(Settings):
    """A file for `noloco-node simulate` alone: many small swarms under faults."""

    sim: HuntSpec
    """What is hunted."""


SWARM, HUNT = "swarm", "hunt"
"""The kinds of simulations. A run belongs to the first, which is meant if none is named; the other has none."""


class OwnData(Settings):
    """A volunteer's own words on the run's text: each of these is a setting of `run.data`."""

    path: str | None = None
    """Where this machine keeps the text of a `text` source; else the run's own value, as consent to read it here."""
    paths: dict[str, str] = Field(default_factory=dict[str, str])
    """The paths of a mixture: for each of its `text` sources the place on this machine. The key is the source's name,
    or its number if it has none."""
    prepared: str | None = None
    """Where this machine keeps what `noloco-node data prepare` made of it."""
    tokenizer: str | None = None
    """The place on this machine of the run's tokenizer if that is a folder. Otherwise the run's own value, as consent
    to read it if it lies on this machine."""


class OwnModel(Settings):
    """A volunteer's own words on the run's model."""

    from_pretrained: str | None = None
    """Where this machine keeps the weights that the run began with, for a stage that nobody serves."""


class OwnRun(Settings):
    """The part of `run:` that a joiner may have an opinion on."""

    model: OwnModel = OwnModel()
    data: OwnData = OwnData()


class JoinConfig(Settings):
    """The settings of a node that takes its RunSpec from a peer."""

    run: OwnRun = OwnRun()
    node: NodeSettings = NodeSettings()


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: the dotted name of the setting (empty for the whole file) and what is wrong with it."""

    setting: str
    text: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.text}" if self.setting else self.text


def load_config(path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] = NO_ENVIRONMENT) -> Config:
    """Read and validate a configuration file.

    `environ` holds the variables that stand for settings of `node:`; they win over the file. `overrides` are
    `dotted.name=value` pairs, the value parsed as YAML; they win over both, later ones over earlier ones.

    Raises `UserError` with all mistakes of a source at once. It is CONFIG for mistakes in the file or the environment,
    USAGE for an override that is no such pair.
    """
    raw = read_config(path)
    _apply_environment(raw, environ)
    for override in overrides:
        _apply(raw, override)
    kind = _simulated_kind(raw)
    if kind == HUNT:
        raise UserError(
            ExitCode.CONFIG,
            f"{path}: sim.kind is {kind}: it says what to simulate, and has no run that nodes could train",
            f"simulate it: noloco-node simulate {path} --out DIR",
        )
    return validate(raw, str(path))


def load_simulation(path: Path, overrides: Sequence[str] = ()) -> Config | HuntConfig:
    """Read and validate a file for `noloco-node simulate`, by its `sim.kind`. Raises `UserError` as `load_config`."""
    raw = read_config(path)
    for override in overrides:
        _apply(raw, override)
    kind = _simulated_kind(raw)
    if kind not in (None, SWARM, HUNT):  # else all that such a kind has would be named as wrong
        raise UserError(
            ExitCode.CONFIG,
            f"{path}: a setting is wrong\n  sim.kind: {value_in_words(kind)} is not allowed: must be one of "
            f"{SWARM}, {HUNT}",
            "correct it; docs/settings.md lists every setting of sim: by its kind",
        )
    if kind != HUNT:
        return validate(raw, str(path))
    remedy = "correct it; docs/settings.md lists every setting of sim: by its kind"
    return _validated(HuntConfig, raw, str(path), remedy)


def _simulated_kind(raw: Mapping[str, Any]) -> str | None:
    sim: object = raw.get("sim")
    kind = cast("Mapping[str, object]", sim).get("kind") if isinstance(sim, Mapping) else None
    return kind if isinstance(kind, str) else None


def load_join(overrides: Sequence[str], environ: Mapping[str, str] = NO_ENVIRONMENT) -> JoinConfig:
    """The settings of a joiner, from the environment and from `dotted.name=value` pairs, which win.

    Raises `UserError`: USAGE for what is no such pair, CONFIG for a value out of bounds and for a setting of the run.
    """
    raw: dict[str, Any] = {}
    _apply_environment(raw, environ)
    own = {f"run.{name}" for name in setting_names(OwnRun)}
    for override in overrides:
        name = override.partition("=")[0].strip()
        if name.startswith("run.") and name not in own and not name.startswith(f"run.data.{OWN_PATHS}."):
            raise UserError(
                ExitCode.CONFIG,
                f"--set {override}: a joiner takes the run's settings from a peer, and cannot change them",
                "leave it out; node.* is yours to set, and run.data.path and run.data.tokenizer where each volunteer "
                "keeps these itself",
            )
        _apply(raw, override)
    with_new_names(raw)
    environment.settle_hub_token(raw)
    remedy = "correct it; noloco-node config show CONFIG lists every setting of node: with its meaning"
    where = (
        "the command line and the environment"
        if raw.get("node") and node_environment(environ).values
        else "the command line"
    )
    return _validated(JoinConfig, raw, where, remedy)


def validate(raw: Mapping[str, Any], where: str) -> Config:
    """Validate a parsed configuration; `where` names it in messages. Raises `UserError` (CONFIG), and as
    `with_own_paths`, `with_pretrained` and `with_tokenizer` do."""
    raw = copy.deepcopy(dict(raw))
    with_new_names(raw)
    environment.settle_hub_token(raw)
    raw = with_tokenizer(with_pretrained(with_own_paths(raw)))
    remedy = f"correct it, then check with noloco-node config validate {shlex.quote(where)} and the same --set"
    return _validated(Config, raw, where, remedy)


def _validated(kind: type[S], raw: Mapping[str, Any], where: str, remedy: str) -> S:
    problems = list(_booleans(kind, raw, ""))
    known = {problem.setting for problem in problems}
    try:
        config = kind.model_validate(raw)
    except ValidationError as error:
        problems += [problem for problem in _problems(error, raw, kind) if problem.setting not in known]
        raise _as_user_error(problems, where, remedy) from None
    if problems:
        raise _as_user_error(problems, where, remedy)
    return config


def problems_of(error: ValidationError, raw: object, model: type[Settings]) -> list[Problem]:
    """What pydantic found wrong with `raw`, read as `model`: one problem a setting, names as within that group."""
    return list(_problems(error, raw, model))


def render(config: Settings) -> str:
    """A settings group as YAML, every setting present and explained; loading it gives an equal group."""
    return "\n".join(_render_lines(config, 0)) + "\n"


def setting_names(model: type[Settings] = Config, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings below `model`, groups left out."""
    for name, inner in _fields(model):
        if inner is None:
            yield prefix + name
        else:
            yield from setting_names(inner, f"{prefix}{name}.")


def _apply(raw: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    parts = new_name(name.strip()).split(".")
    if not separator or not all(parts):
        raise UserError(
            ExitCode.USAGE,
            f"--set {override}: not of the form name=value",
            "write the setting's dotted name and its value, for example --set run.inner.learning_rate=3e-3",
        )
    try:
        value: object = parse_yaml(text)
    except yaml.YAMLError:
        quoted = shlex.quote(f"{name.strip()}={json.dumps(text, ensure_ascii=False)}")
        raise UserError(
            ExitCode.USAGE, f"--set {override}: the value is not valid YAML", f"quote it: --set {quoted}"
        ) from None
    group = raw
    for part in parts[:-1]:
        inner = group.get(part)
        if inner is None:
            inner = group[part] = {}
        if not isinstance(inner, dict):
            raise UserError(
                ExitCode.CONFIG,
                f"--set {override}: {part} is a value, not a group of settings",
                _suggestion(name.strip(), (), Config) or "see all names with: noloco-node config show CONFIG",
            )
        group = cast("dict[str, Any]", inner)
    group[parts[-1]] = value


def _apply_environment(raw: dict[str, Any], environ: Mapping[str, str]) -> None:
    found = node_environment(environ)
    problems = [Problem(variable, text) for variable, text in found.mistakes.items()]
    wrong = list(_booleans(NodeSettings, found.values, ""))
    named = {problem.setting for problem in wrong}
    try:
        NodeSettings.model_validate(found.values)
    except ValidationError as error:
        wrong += [problem for problem in problems_of(error, found.values, NodeSettings) if problem.setting not in named]
    # What several settings come to together is judged when the command's options are among them.
    problems += [Problem(variable_of(each.setting), each.text) for each in wrong if each.setting]
    if problems:
        remedy = "correct it, or unset it; noloco-node config show CONFIG lists every setting of node: with its meaning"
        raise _as_user_error(problems, "the environment", remedy)
    group = raw.setdefault("node", {}) if found.values else None
    if isinstance(group, dict):
        cast("dict[str, Any]", group).update(found.values)


def _fields(model: type[Settings]) -> Iterator[tuple[str, type[Settings] | None]]:
    """Names of a group's settings, with the group's type where the setting is a group itself."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        yield name, kind if isinstance(kind, type) and issubclass(kind, Settings) else None


def _booleans(model: type[Settings], raw: object, prefix: str) -> Iterator[Problem]:
    """YAML's yes/no/on/off in settings that are no booleans: pydantic would take them as 1 and 0."""
    if not isinstance(raw, Mapping):
        return
    values = cast("Mapping[str, object]", raw)
    for name, inner in _fields(model):
        value = values.get(name)
        if inner is not None:
            yield from _booleans(inner, value, f"{prefix}{name}.")
        elif isinstance(value, bool) and model.model_fields[name].annotation is not bool:
            yield Problem(prefix + name, f"{str(value).lower()} is a boolean, which this setting does not take")


def _problems(error: ValidationError, raw: object, root: type[Settings]) -> Iterator[Problem]:
    """One problem a setting: pydantic reports each branch of a union by itself."""
    by_setting: dict[str, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_setting.setdefault(_setting(details["loc"], raw), []).append(details)
    for setting, group in by_setting.items():
        first = group[0]
        if first["type"] == "too_short" and any(other.startswith(f"{setting}[") for other in by_setting):
            continue  # it counts the sound ones only
        match first["type"]:
            case "extra_forbidden" if setting in GONE:
                yield Problem(setting, "this release has no such setting any more: delete it")
            case "extra_forbidden":
                siblings = _known_names(setting.rpartition(".")[0], root)
                yield Problem(setting, f"there is no such setting; {_suggestion(setting, siblings, root)}")
            case "missing":
                yield Problem(setting, f"is not set, and has no default{_meaning(setting, root)}")
            case "value_error":
                yield Problem("", first["msg"].removeprefix("Value error, "))
            case "model_type" | "model_attributes_type":
                names = ", ".join(_known_names(setting, root))
                yield Problem(setting, f"must be a group of settings ({names}), is {value_in_words(first['input'])}")
            case _:
                allowed = " or ".join(dict.fromkeys(allowed_in_words(details) for details in group))
                yield Problem(
                    setting, f"{value_in_words(first['input'])} is not allowed: {allowed}{_meaning(setting, root)}"
                )


def _setting(location: tuple[int | str, ...], raw: object) -> str:
    """The dotted name behind pydantic's location, which also names branches of unions; list items as `name[3]`."""
    name = ""
    for key in location:
        if isinstance(key, int):
            name += f"[{key}]"
            raw = cast("Sequence[object]", raw)[key] if isinstance(raw, Sequence) else None
            continue
        if not isinstance(raw, Mapping):
            break
        name += f".{key}" if name else key
        raw = cast("Mapping[str, object]", raw).get(key)
    return name


def _group(dotted: str, root: type[Settings]) -> type[Settings] | None:
    """The type of the group of that name; an item of a list of groups counts as one."""
    model: type[Settings] | None = root
    for part in dotted.split(".") if dotted else []:
        if model is None:
            return None
        name, item, _ = part.partition("[")
        field = model.model_fields.get(name)
        kinds = (field.annotation, *typing.get_args(field.annotation)[: bool(item)]) if field is not None else ()
        groups = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Settings)]
        model = groups[0] if groups else None
    return model


def _known_names(group: str, root: type[Settings]) -> tuple[str, ...]:
    model = _group(group, root)
    return tuple(model.model_fields) if model is not None else ()


def _suggestion(setting: str, siblings: Sequence[str], root: type[Settings]) -> str:
    return did_you_mean(setting, siblings, [*setting_names(root), *_group_names(root)])


def _group_names(model: type[Settings], prefix: str = "") -> Iterator[str]:
    for name, inner in _fields(model):
        if inner is not None:
            yield prefix + name
            yield from _group_names(inner, f"{prefix}{name}.")


def _meaning(setting: str, root: type[Settings]) -> str:
    group, _, leaf = setting.rpartition(".")
    model = _group(group, root)
    field = model.model_fields.get(leaf) if model is not None else None
    return f" ({' '.join(field.description.split())})" if field is not None and field.description else ""


def _as_user_error(problems: Sequence[Problem], where: str, remedy: str) -> UserError:
    shown = [f"  {problem}" for problem in problems[:SHOWN]]
    if len(problems) > SHOWN:
        shown.append(f"  and {len(problems) - SHOWN} more")
    count = "a setting is wrong" if len(problems) == 1 else f"{len(problems)} settings are wrong"
    if len(problems) > 1:
        remedy = remedy.replace("correct it", "correct them", 1)
    return UserError(ExitCode.CONFIG, f"{where}: {count}\n" + "\n".join(shown), remedy)


def _render_lines(group: Settings, depth: int) -> Iterator[str]:
    indent = "  " * depth
    values = group.model_dump(mode="json")
    for name, field in type(group).model_fields.items():
        if field.description:
            yield f"{indent}# {' '.join(field.description.split())}"
        inner = getattr(group, name)
        if isinstance(inner, Settings):
            yield f"{indent}{name}:"
            yield from _render_lines(inner, depth + 1)
        else:
            text = yaml.safe_dump({name: values[name]}, default_flow_style=False, sort_keys=False, width=1000)
            yield from (indent + line for line in text.rstrip("\n").split("\n"))
