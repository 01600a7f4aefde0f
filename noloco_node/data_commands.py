"""`noloco-node data`: work on a text that is done once, before a run."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node.collector import loading
from noloco_node.errors import ExitCode

if TYPE_CHECKING:
    from noloco_node.data.prepared import Manifest


def prepare_arguments(command: argparse.ArgumentParser) -> None:
    """Of `data prepare`, but for the configuration."""
    command.add_argument("--to", metavar="DIR", type=Path, required=True, help="folder for the tokens, made if missing")
    command.set_defaults(call=_prepare)


def _prepare(options: argparse.Namespace) -> int:
    from noloco_node.config.load import load_config

    config = load_config(options.config, options.set, os.environ)
    with loading():
        from noloco_node.data.encoding import fitting_tokenizer
        from noloco_node.data.prepared import prepare
        from noloco_node.model.cut import build_config
    from rich.console import Console

    tokenizer = fitting_tokenizer(config.run.data, build_config(config.run.model).vocab_size)
    console = Console(stderr=True)
    with console.status("reading the text") as status:
        done = prepare(config.run.data, tokenizer, options.to, lambda so_far: status.update(_words(so_far)))
    print(f"{_words(done)} in '{options.to}'\nfingerprint {done.fingerprint}")
    print(f"to train on it: --set run.data.prepared={options.to}")
    return int(ExitCode.OK)


def _words(manifest: Manifest) -> str:
    tokens = manifest.training + manifest.validation
    return f"{tokens:,} tokens of {manifest.documents:,} documents, {manifest.validation:,} of them held out"
