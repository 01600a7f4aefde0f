"""`noloco-node data`: work on a text that is done once, before a run."""

from __future__ import annotations

import argparse
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node.collector import loading
from noloco_node.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from noloco_node.data.prepared import Manifest
    from noloco_node.data.prepared_shards import Reached


def prepare_arguments(command: argparse.ArgumentParser) -> None:
    """Of `data prepare`, but for the configuration."""
    command.add_argument("--to", metavar="DIR", type=Path, required=True, help="folder for the tokens, made if missing")
    command.set_defaults(call=_prepare)


def _prepare(options: argparse.Namespace) -> int:
    from noloco_node.config.load import load_config

    config = load_config(options.config, options.set, os.environ)
    with loading():
        from noloco_node.data.encoding import fitting_tokenizer
        from noloco_node.data.prepared import prepare, prepare_streamed
        from noloco_node.model.cut import build_config
    tokenizer = fitting_tokenizer(config.run.data, build_config(config.run.model).vocab_size)
    with _bar() as told:
        if config.run.data.streaming:
            done = prepare_streamed(config.run.data, tokenizer, options.to, told)
        else:
            done = prepare(config.run.data, tokenizer, options.to, told)
    print(f"{_words(done)} in '{options.to}'\nfingerprint {done.fingerprint}")
    print(f"to train on it: --set run.data.prepared={options.to}")
    return int(ExitCode.OK)


@contextmanager
def _bar() -> Generator[Callable[[Reached], None]]:
    """A progress bar on the terminal, and what moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("reading the text", total=None)

        def told(reached: Reached) -> None:
            words = f"{reached.tokens:,} tokens"
            progress.update(bar, completed=reached.done_bytes, total=reached.all_bytes or None, description=words)

        yield told


def _words(manifest: Manifest) -> str:
    tokens = manifest.training + manifest.validation
    return f"{tokens:,} tokens of {manifest.documents:,} documents, {manifest.validation:,} of them held out"
