"""Work on a text that is done once, before a run: `noloco-node data` prepares it, `tokenizer` learns of it."""

from __future__ import annotations

import argparse
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node import ambient
from noloco_node.errors import ExitCode, UserError
from noloco_node.process_memory import loading
from noloco_node.telemetry.words import say_loading

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from noloco_node.data.prepared import PreparedSoFar, TextManifest


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


NOT_YET = ("run.data.tokenizer=bytes", "run.data.tokenizer_fingerprint=null")
"""These settings stand instead of the run's tokenizer, which may be the one that is to be learnt."""


def train_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `tokenizer train`, except the configuration."""
    add = command.add_argument
    add("--vocab-size", metavar="N", type=int, required=True, help="tokens, those of single bytes included")
    add("--out", metavar="DIR", type=Path, required=True, help="where it goes, a folder that does not exist")
    add("--text-bytes", metavar="N", type=int, default=1_000_000_000, help="read so much text at most (default: 1 GB)")
    command.set_defaults(call=_train)


def _train(options: argparse.Namespace) -> int:
    from noloco_node.config.load import load_config

    began = ambient.monotonic()
    if options.text_bytes < 1:
        raise UserError(ExitCode.USAGE, f"--text-bytes is {options.text_bytes}", "name 1 or more")
    run = load_config(options.config, [*options.set, *NOT_YET]).run
    say_loading()
    with loading():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

        from noloco_node.config.tokenizer_files import fingerprint_of_tokenizer
        from noloco_node.data.tokenizer_training import train_tokenizer
        from noloco_node.telemetry.words import as_bytes

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    progress = Progress(*columns, console=Console(stderr=True))
    bar = progress.add_task("reading the text", total=options.text_bytes)

    def told(documents: int, text_bytes: int, read: bool) -> None:
        progress.start()
        what = "choosing the tokens" if read else f"reading, {documents:,} documents"
        total = None if read else options.text_bytes
        progress.update(bar, completed=text_bytes, total=total, description=what)

    try:
        learnt = train_tokenizer(run.data, options.out, options.vocab_size, most_bytes=options.text_bytes, told=told)
        progress.update(bar, completed=learnt.text_bytes, total=learnt.text_bytes, description="done")
    finally:
        progress.stop()
    short = "" if learnt.tokens == options.vocab_size else f" of {options.vocab_size:,}: the text gives no more"
    seconds = ambient.monotonic() - began
    print(f"{'tokens':<30} {learnt.tokens:,}{short}")
    print(f"{'learnt from':<30} {learnt.documents:,} documents, {as_bytes(learnt.text_bytes)}, in {seconds:,.0f} s")
    if learnt.bytes_per_token is not None:
        print(f"{'on held-out text':<30} {learnt.bytes_per_token:.2f} bytes a token")
    print(f"{'tokenizer (AutoTokenizer)':<30} {options.out}")
    print(f"{'fingerprint':<30} {fingerprint_of_tokenizer(options.out)}")
    settings = f"run.data.tokenizer={options.out} --set run.model.config.vocab_size={learnt.tokens}"
    print(f"to train with it: --set {settings}")
    return int(ExitCode.OK)
