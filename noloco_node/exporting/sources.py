"""What `export`, `eval` and `generate` are told of: nodes of a run under way, by address, or folders."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node.errors import ExitCode, UserError
from noloco_node.process_memory import loading
from noloco_node.telemetry.words import say_asking, say_loading

if TYPE_CHECKING:
    from noloco_node.config.run_spec import RunSpec
    from noloco_node.exporting.gathered import Gathered


def are_addresses(sources: Sequence[str]) -> bool:
    """Whether they are a run's nodes. UserError (USAGE) for folders among them."""
    addresses = [source for source in sources if "/p2p/" in source and not Path(source).exists()]
    if addresses and len(addresses) < len(sources):
        message = "addresses of nodes and run folders are mixed"
        raise UserError(ExitCode.USAGE, message, "name either the nodes of a run under way, or folders")
    return bool(addresses)


def gathered_live(
    options: argparse.Namespace,
    stack: contextlib.ExitStack,
    beside: Path | None,
    agreed: Callable[[RunSpec], object] = lambda _: None,
) -> Gathered:
    """The weights fetched from the nodes at `options.sources` into a folder that is gone when the stack is left. The
    folder is beside the path that is named, else one for temporary files. UserError as `gather_live`."""
    from noloco_node.config.node_settings import NodeSettings
    from noloco_node.node.early_checks import check_peers

    peers = tuple(options.sources)
    settings = NodeSettings(initial_peers=peers, invitation=options.invitation, identity=options.identity)
    check_peers(settings)
    say_asking(settings.initial_peers)
    with loading():
        import uvloop
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        from noloco_node.exporting.live import gather_live

    near = None if beside is None else beside.absolute()
    place = (tempfile.gettempdir(), "noloco-eval-") if near is None else (near.parent, f".{near.name}.fetched-")
    spool = stack.enter_context(tempfile.TemporaryDirectory(dir=place[0], prefix=place[1]))
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("connecting", total=None)

        def told(came: int, wanted: int) -> None:
            progress.update(bar, description="fetching", completed=came, total=wanted)

        return uvloop.run(gather_live(settings, Path(spool), told, agreed))


def gathered_folders(options: argparse.Namespace) -> Gathered:
    """What the run folders at `options.sources` hold. UserError as `gather_folders`."""
    say_loading()
    with loading():
        from noloco_node.exporting.folders import gather_folders

    return gather_folders([Path(source) for source in options.sources], named_run(options))


def named_run(options: argparse.Namespace) -> RunSpec | None:
    """The run of `--config`, where that is given. UserError as loading it does."""
    from noloco_node.config.load import load_config

    return load_config(options.config, options.set).run if options.config is not None else None


def check_own_files(run: RunSpec, options: argparse.Namespace, *, reads_text: bool) -> None:
    """Raise UserError (CONFIG) if a stranger's run names files of this machine without the exporting user's word. The
    files are its tokenizer, which goes with the model, and its text if that is read."""
    if reads_text:
        with_text(run, options)
    else:
        with_tokenizer(run, options)


def with_tokenizer(run: RunSpec, options: argparse.Namespace) -> RunSpec:
    """The run with the place of the tokenizer, as `--config` or the options for joining say it. Raises UserError as
    `with_own_tokenizer`, and WRONG_RUN if the configuration is another run's."""
    from noloco_node.bootstrap.spec_fetch import with_own_tokenizer
    from noloco_node.config.load import load_join

    return _named(run, options) or with_own_tokenizer(run, load_join(options.set).run.data.tokenizer)


def with_text(run: RunSpec, options: argparse.Namespace) -> RunSpec:
    """The run with the place of the text, as `--config` or the options for joining say it. Raises UserError: CONFIG if
    it must be named, WRONG_RUN if the configuration is another run's."""
    from noloco_node.bootstrap.spec_fetch import with_own_data
    from noloco_node.config.load import load_join

    return _named(run, options) or with_own_data(run, load_join(options.set).run.data, reads_text=True)


def _named(run: RunSpec, options: argparse.Namespace) -> RunSpec | None:
    named = named_run(options)
    if named is not None and named.run_id != run.run_id:
        raise UserError(
            ExitCode.WRONG_RUN,
            f"{options.config} is run '{named.name}' ({named.run_id}), and the weights are of '{run.name}' "
            f"({run.run_id})",
            "leave out --config: the run says by itself what it is",
        )
    return named


def check_text_named(options: argparse.Namespace) -> None:
    """Raise UserError (DATA) where a text or tokenizer of this machine is named that is not there; CONFIG for settings
    that are none. For before anybody is asked for a run."""
    from noloco_node.config.load import load_join
    from noloco_node.node.early_checks import check_own_data

    if named_run(options) is None:
        check_own_data(load_join(options.set).run.data)
