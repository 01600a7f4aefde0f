"""`noloco-node tokenizer`: a tokenizer of one's own."""

from __future__ import annotations

import argparse
from pathlib import Path

from noloco_node import ambient
from noloco_node.collector import loading
from noloco_node.errors import ExitCode, UserError
from noloco_node.telemetry.waiting import say_loading

TEXT_BYTES = 1_000_000_000
NOT_YET = ("run.data.tokenizer=bytes", "run.data.tokenizer_fingerprint=null")
"""These settings stand instead of the run's tokenizer, which may be the one that is to be learnt."""


def train_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `tokenizer train`, except the configuration."""
    add = command.add_argument
    add(
        "--vocab-size",
        metavar="N",
        type=int,
        required=True,
        help="tokens, those of single bytes included",
    )
    add("--out", metavar="DIR", type=Path, required=True, help="where it goes, a folder that does not exist")
    add("--documents", metavar="N", type=int, help="read so many documents at most (default: any number)")
    add("--text-bytes", metavar="N", type=int, default=TEXT_BYTES, help="read so much text at most (default: 1 GB)")
    command.set_defaults(call=_train)


def _train(options: argparse.Namespace) -> int:
    from noloco_node.config.load import load_config

    began = ambient.monotonic()
    for name, value in (("--documents", options.documents), ("--text-bytes", options.text_bytes)):
        if value is not None and value < 1:
            raise UserError(ExitCode.USAGE, f"{name} is {value}", "name 1 or more")
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
        learnt = train_tokenizer(
            run.data,
            options.out,
            options.vocab_size,
            documents=options.documents,
            most_bytes=options.text_bytes,
            told=told,
        )
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
