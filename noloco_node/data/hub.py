"""Datasets of the hub: downloaded once and read from the disk, or streamed shard by shard."""

from __future__ import annotations

import http.client
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from noloco_node.config.data_spec import HUB_DATASET, REVISION, DataSpec
from noloco_node.config.environment import hub_remedy, hub_token
from noloco_node.data.documents import Document, data_error
from noloco_node.data.loaders import MASK, bounded, document_of, no_column, with_column
from noloco_node.errors import ExitCode, UserError

REMOTE = ("hf://", "https://", "http://")
KEPT = "datasets.packaged_modules.cache"
"""This module reads a dataset that the library kept here, if the hub gives none."""
ShardReader = Callable[[], Iterator[Document]]


def hub_documents(spec: DataSpec) -> Iterator[Document]:
    """The rows of a dataset of the hub: downloaded once and read from the disk row by row, or streamed."""
    if spec.streaming:
        for read in hub_shards(spec):
            yield from read()
        return
    name, field = spec.path or "", spec.text_field
    check_not_here(name)
    table = _loaded(spec)
    columns: list[str] = table.column_names
    if field not in columns:
        raise no_column(field, f"the dataset '{name}'", columns)
    wanted = [column for column in (field, MASK) if column in columns]
    try:
        for number, row in enumerate(table.select_columns(wanted)):
            yield from bounded(document_of(f"{number}", f"row {number} of '{name}'", row[field], row.get(MASK), field))
    except (UserError, MemoryError):
        raise
    except Exception as error:  # Arrow lets through what its own library says of bytes that are no UTF-8
        raise data_error(
            f"run.data.path: '{name}', as it lies in this machine's cache, cannot be read on: {_reason(error)}",
            "remove it from the cache of the datasets library, and start again: it is downloaded anew",
        ) from error


def hub_shards(spec: DataSpec) -> list[ShardReader]:
    """What reads each shard of a dataset of the hub as it comes over the network; nothing of it is kept."""
    check_not_here(spec.path or "")
    dataset = _loaded(spec)
    count: int = dataset.num_shards
    return [_shard_reader(spec, dataset, number, count) for number in range(count)]


def revision_of(spec: DataSpec) -> str:
    """`revision-` and the commit of the dataset that the hub has now. Raises UserError as `_asked`."""
    return REVISION + _asked(spec).sha


def check_not_here(name: str) -> None:
    """Raise UserError (DATA) if the name of a dataset is also the name of something on this machine. It is raised too
    if the library would take it for files of the folder that it is started in."""
    if not HUB_DATASET.fullmatch(name):
        raise data_error(f"'{name}' is no dataset of the hub", "name it as OWNER/NAME, such as allenai/c4")
    if Path(name).exists():
        raise data_error(
            f"run.data.source is 'huggingface', but '{name}' lies on this machine",
            "set run.data.source to text to read it; to read the hub's, start noloco-node in another folder",
        )


def check_files(name: str, files: Mapping[str, Iterable[str]]) -> None:
    """Raise UserError (DATA) if a dataset's own card names a file that is no hub's."""
    for file in chain.from_iterable(files.values()):
        if not file.startswith(REMOTE) or "::" in file:
            raise data_error(
                f"the dataset '{name}' takes its text from {file[:200]!r}, a place on this machine: its "
                "maker may not choose which files are read here",
                "do not use it; what lies on this machine is read with run.data.source text",
            )


def _shard_reader(spec: DataSpec, dataset: Any, number: int, count: int) -> ShardReader:
    name, field = f"shard {number} of '{spec.path}'", spec.text_field

    def read() -> Iterator[Document]:
        try:
            rows = enumerate(dataset.shard(num_shards=count, index=number))
            for place, row in with_column(rows, field, lambda _: name, name):
                where = f"row {place} of {name}"
                yield from bounded(document_of(f"{number}:{place}", where, row[field], row.get(MASK), field))
        except (UserError, MemoryError):
            raise
        except Exception as error:  # also what a library of compression says of bytes that were damaged on their way
            why = f"run.data.path: {name} cannot be read on: {_reason(error)}"
            raise UserError(ExitCode.PEERS_UNREACHABLE, why, "see that the hub can be reached") from error

    return read


def _loaded(spec: DataSpec) -> Any:
    datasets: Any = importlib.import_module("datasets")  # untyped, and slow to import where it is not needed
    pinned = spec.fingerprint or ""
    revision = pinned.removeprefix(REVISION) if pinned.startswith(REVISION) else None
    try:
        builder = datasets.load_dataset_builder(spec.path, spec.subset, revision=revision, token=hub_token())
        if type(builder).__module__.startswith(KEPT):
            _check_shown(spec)
        check_files(spec.path or "", builder.config.data_files or {})
        if spec.streaming:
            return builder.as_streaming_dataset(split=spec.split)
        builder.download_and_prepare()
        return builder.as_dataset(split=spec.split)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        _asked(spec)  # the library calls a hub that is away one that has no such dataset
        raise _refused(spec, error) from error


def _check_shown(spec: DataSpec) -> None:
    """Raise UserError (DATA) if the hub is there and shows no such dataset without a token. What the library kept here
    from before may be private, and the author of the run may not choose it."""
    try:
        _asked(spec)
    except UserError as error:
        if error.exit_code is ExitCode.DATA:
            raise
        # Nobody can be asked: a public dataset must be read again after a pause of the hub.


def _asked(spec: DataSpec) -> Any:
    """What the hub says of the dataset. Raises UserError: DATA where it shows none such, PEERS_UNREACHABLE where it is
    out of reach or out of order, or was asked too often. Another start may mend that, and a service manager tries it.
    """
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        return hub.HfApi(token=hub_token()).dataset_info(spec.path, timeout=20.0)
    except Exception as error:  # several libraries ask, each with errors of its own
        status: int = getattr(getattr(error, "response", None), "status_code", 0)
        if status != http.client.TOO_MANY_REQUESTS and status // 100 == 4:
            raise _refused(spec, error) from error
        raise UserError(
            ExitCode.PEERS_UNREACHABLE,
            f"{_wanted(spec)}, of which the hub gives nothing now: {_reason(error)}",
            "start this node again once the hub can be reached",
        ) from error


def _refused(spec: DataSpec, error: Exception) -> UserError:
    return data_error(
        f"{_wanted(spec)}, which the datasets library cannot load: {_reason(error)}",
        "name a dataset of the Hugging Face hub (owner/name), one of its subsets and splits; what lies on this "
        f"machine is read with run.data.source text{hub_remedy()}",
    )


def _wanted(spec: DataSpec) -> str:
    subset = spec.subset or "not set"
    return f"run.data.path is '{spec.path}' (run.data.subset {subset}, run.data.split '{spec.split}')"


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
