"""`noloco-node data`: work on a text that is done once, before a run."""

from __future__ import annotations

import argparse
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node.collector import loading
from noloco_node.errors import ExitCode
from noloco_node.telemetry.waiting import say_loading

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from noloco_node.data.prepared import TextManifest
    from noloco_node.data.prepared_shards import PreparedSoFar


def prepare_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `data prepare`, except the configuration."""
    command.add_argument("--to", metavar="DIR", type=Path, required=True, help="folder for the tokens, made if missing")
    command.set_defaults(call=_prepare)


def _prepare(options: argparse.Namespace) -> int:
    from noloco_node.config.load import load_config

    config = load_config(options.config, options.set, os.environ)
    say_loading()
    with loading():
        from noloco_node.data.encoding import fitting_tokenizer
        from noloco_node.data.mixture import mixed_fingerprint
        from noloco_node.data.prepared import prepare_run
        from noloco_node.data.tokenizers import tokenizer_words
        from noloco_node.model.cut import build_config
    data = config.run.data
    tokenizer = fitting_tokenizer(data, build_config(config.run.model).vocab_size)
    with _bar(data.names) as told:
        done = prepare_run(data, tokenizer, options.to, told)
    for name, manifest in zip(data.names, done, strict=bool(data.mixture)):
        print(f"{name}: {_words(manifest)}, {manifest.fingerprint}")
    whole = mixed_fingerprint([each.fingerprint for each in done]) if data.mixture else done[0].fingerprint
    print(f"{_words(*done)} in '{options.to}'\nfingerprint {whole}")
    if (words := tokenizer_words(data)) is not None:
        print(f"tokenizer {words}")
    print(f"to train on it: --set run.data.prepared={options.to}")
    return int(ExitCode.OK)


@contextmanager
def _bar(names: Sequence[str]) -> Generator[Callable[[int, PreparedSoFar], None]]:
    """A progress bar on the terminal for each source, and what moves them."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars: dict[int, TaskID] = {}

        def told(number: int, reached: PreparedSoFar) -> None:
            if number not in bars:
                bars[number] = progress.add_task("reading the text", total=None)
            words = f"{reached.tokens:,} tokens" + (f" of {names[number]}" if names else "")
            total = reached.all_bytes or None
            progress.update(bars[number], completed=reached.done_bytes, total=total, description=words)

        yield told


def _words(*manifests: TextManifest) -> str:
    documents, training, held_out = (
        sum(getattr(each, name) for each in manifests) for name in ("documents", "training", "validation")
    )
    return f"{training + held_out:,} tokens, {held_out:,} of them held out, of {documents:,} documents"
