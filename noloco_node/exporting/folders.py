"""The weights that nodes left in their run folders, brought together from whatever machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from noloco_node.bootstrap.spec_fetch import read_agreed
from noloco_node.config.files import is_plain, read_small
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.diagnostics.status import Events
from noloco_node.errors import ExitCode, UserError, near_words, suggestion
from noloco_node.exporting.gathered import Gathered, Reported, SavedReplica, Shapes, final_weights
from noloco_node.storage.checkpoint import STATE, CheckpointFolder, KeptStanding, Unusable, open_slow, read_standing
from noloco_node.storage.run_folder import RunFolder
from noloco_node.storage.weights import MANIFEST, read_manifest
from noloco_node.telemetry.events import Evaluation, NodeStarted
from noloco_node.telemetry.words import printable

DEPTH = 4
"""Nodes' folders are searched for up to so many folders below the one that is named."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """The newest weights of one node."""

    place: Path
    """The folder of the final weights, or of a checkpoint."""
    run_id: str
    replica: SavedReplica


def gather_folders(paths: Sequence[Path], given: RunSpec | None) -> Gathered:
    """The weights that lie in run folders: nodes', local swarms', folders of several, and folders of weights alone.

    The newest of each node counts, be it its final weights or a checkpoint. `given` is the run, if no folder says it.
    Raises UserError (RUN_FOLDER) for a folder without weights, for damaged ones, for several runs, and if the run is
    not known.
    """
    places = list(dict.fromkeys(place.resolve() for path in paths for place in _places(path)))
    run = given or _with_tokenizer(_run_of(places), places)
    shapes = Shapes(run)
    newest: dict[tuple[int, str], _Saved] = {}
    for place in places:
        saved = _newest(place, shapes)
        _check_run(saved, run)
        key = saved.replica.stage, saved.replica.peer or str(place)
        if key not in newest or newest[key].replica.clock < saved.replica.clock:
            newest[key] = saved
    replicas: dict[int, list[SavedReplica]] = {}
    for saved in newest.values():
        replicas.setdefault(saved.replica.stage, []).append(shapes.checked(saved.replica))
    reported, version = _told(places)
    return Gathered(run, replicas, reported, version)


def _places(path: Path) -> Iterator[Path]:
    """Folders of weights and run folders of nodes in a folder, itself included."""
    found = list(_below(path, DEPTH, _holds_weights))
    begun = _below(path, DEPTH, lambda each: RunFolder(each).events.is_file())  # a node writes there, or wrote
    if not found and (began := next(begun, None)) is not None:
        usual = NodeSettings()
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"'{path}' holds no weights yet: a node has begun in '{began}', and has saved nothing",
            f"wait for its first checkpoint, after node.checkpoint_outer_steps ({usual.checkpoint_outer_steps} "
            f"where it is not set) outer steps and at least node.checkpoint_seconds ({usual.checkpoint_seconds:g}) "
            "after its start, or until it has ended; or export the run by the address of a node that is up",
        )
    if not found:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"'{path}' holds neither final weights nor checkpoints" if path.exists() else f"there is no '{path}'",
            f"{_near(path)}name the run folder of a node, one that holds several, the folder final in it, or the "
            "address of a node that is up; `eval` takes a folder that `export` wrote as well",
        )
    yield from found


def _near(path: Path) -> str:
    """What lies beside a path that does not exist and has nearly its name, for the beginning of a remedy."""
    try:
        beside = [] if path.exists() else [each.name for each in path.parent.iterdir() if each.is_dir()]
    except OSError:
        return ""
    meant = suggestion([f"'{path.parent / name}'" for name in near_words(path.name, beside)])
    return f"{meant} " if meant else ""


def _below(path: Path, depth: int, wanted: Callable[[Path], bool]) -> Iterator[Path]:
    if wanted(path):
        yield path
    elif depth:
        for inner in _inner(path):
            yield from _below(inner, depth - 1, wanted)


def _inner(path: Path) -> Iterator[Path]:
    if path.is_dir():
        found = sorted(path.iterdir())
        yield from (each for each in found if each.is_dir() and not each.is_symlink() and each.name[0] != ".")


def _holds_weights(path: Path) -> bool:
    manifests = path / MANIFEST, RunFolder(path).final / MANIFEST
    return any(each.is_file() for each in manifests) or any(RunFolder(path).checkpoints.glob(f"*/{MANIFEST}"))


def _newest(place: Path, shapes: Shapes) -> _Saved:
    if (place / STATE).is_file():
        return _checkpoint(place, shapes)
    if (place / MANIFEST).is_file():
        return _final(place)
    folder = RunFolder(place)
    final = _final(folder.final) if (folder.final / MANIFEST).is_file() else None
    newest = CheckpointFolder(folder.checkpoints, 1).newest_whole()
    if newest is not None and (final is None or newest[1].progress.clock > final.replica.clock):
        return _checkpoint(newest[0], shapes, newest[1])
    if final is None:
        raise _damaged(folder.checkpoints, "none of the checkpoints is whole")
    return final


def _final(place: Path) -> _Saved:
    replica = final_weights(place)
    return _Saved(place, read_manifest(place).run_id, _of(place, replica.stage, replica.clock, replica.load))


def _checkpoint(place: Path, shapes: Shapes, standing: KeptStanding | None = None) -> _Saved:
    try:
        standing = standing or read_standing(place)
        load = partial(_loaded, place, standing.stage, shapes, open_slow(place))
    except Unusable as reason:
        raise _damaged(place, str(reason)) from None
    return _Saved(place, standing.run_id, _of(place, standing.stage, standing.progress.clock, load))


def _loaded(place: Path, stage: int, shapes: Shapes, read: Callable[[], Tensor]) -> dict[str, Tensor]:
    try:
        return shapes.unflattened(stage, read(), str(place))
    except Unusable as reason:
        raise _damaged(place, str(reason)) from None


def _of(place: Path, stage: int, clock: float, load: Callable[[], Mapping[str, Tensor]]) -> SavedReplica:
    for folder in _around(place):
        started, _ = _last_events(folder)
        if started is not None:
            return SavedReplica(stage, clock, printable(str(folder)), load, printable(started.peer_id)[:64])
    folders = {each: {RunFolder(each).final, RunFolder(each).checkpoints} for each in _around(place)}
    mine = (each for each, parts in folders.items() if parts & {place, place.parent})
    return SavedReplica(stage, clock, printable(str(next(mine, place))), load)


def _around(place: Path) -> Iterator[Path]:
    """The run folder of a folder of weights, if it lies in one: the folder itself, or one of two above."""
    yield from (place, place.parent, place.parent.parent)


def _last_events(folder: Path) -> tuple[NodeStarted | None, Evaluation | None]:
    path = RunFolder(folder).events
    if not is_plain(path):
        return None, None
    events = Events(path)
    return events.last(NodeStarted), events.last(Evaluation)


def _told(places: Sequence[Path]) -> tuple[Reported | None, str]:
    """The newest loss that a node has written down, and the version of one."""
    reported, version = None, ""
    for folder in dict.fromkeys(folder for place in places for folder in _around(place)):
        started, evaluation = _last_events(folder)
        version = version or (printable(started.version)[:40] if started is not None else "")
        if evaluation is not None and (reported is None or reported.clock < evaluation.clock):
            reported = Reported(evaluation.loss, evaluation.clock)
    return reported, version


def _run_of(places: Sequence[Path]) -> RunSpec:
    for place in places:
        for folder in _around(place):
            path = RunFolder(folder).run_spec
            if path.is_file():
                return read_run(path)
    raise UserError(
        ExitCode.RUN_FOLDER,
        f"none of the folders says which run it is of: there is no {RunFolder(Path()).run_spec.name}",
        "name the run's configuration with --config FILE, or copy that file too, from any node of the run",
    )


def _with_tokenizer(run: RunSpec, places: Sequence[Path]) -> RunSpec:
    """With the folder of the tokenizer, where a node on this machine has read it."""
    for place in places if run.data.own_tokenizer else ():
        for folder in _around(place):
            named = RunFolder(folder).tokenizer_place
            if named is not None and named.is_dir():
                return tokenizer_at(run, named)
    return run


def tokenizer_at(run: RunSpec, folder: Path) -> RunSpec:
    """The run with its tokenizer in that folder, where it is a folder. Its run id stays."""
    if not run.data.own_tokenizer:
        return run
    return run.model_copy(update={"data": run.data.model_copy(update={"tokenizer": str(folder)})})


def read_run(path: Path) -> RunSpec:
    """The run of a file that `RunFolder.keep_spec` wrote. Raises UserError (RUN_FOLDER) for anything else."""
    try:
        return read_agreed(read_small(path))
    except (OSError, ValueError) as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"'{path}', which says what run this is, cannot be read: {str(error).splitlines()[0][:200]}",
            "copy it again from a node of the run, or name the run's configuration with --config FILE",
        ) from None


def _check_run(saved: _Saved, run: RunSpec) -> None:
    if saved.run_id != run.run_id:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"'{saved.place}' holds weights of run {printable(saved.run_id)}, not of run '{run.name}' ({run.run_id})",
            "leave that folder out: one model is made of one run",
        )


def _damaged(place: Path, reason: str) -> UserError:
    return UserError(
        ExitCode.RUN_FOLDER,
        f"'{place}' is damaged or incomplete: {reason}",
        "copy it again from where it was written, or leave that replica out",
    )
