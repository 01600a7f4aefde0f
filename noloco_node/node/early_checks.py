"""What a command looks at before anything that takes seconds to load is loaded, or anything is started."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from noloco_node.config.load import Config, OwnData
from noloco_node.config.node_settings import NodeSettings
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.addresses import check_addresses, no_address
from noloco_node.libp2p.arguments import check_port_free, listen_address
from noloco_node.process_memory import loading
from noloco_node.storage.run_folder import RunFolder

TEXT_ENDINGS = frozenset({".txt", ".text", ".md", ".csv", ".tsv", ".json", ".jsonl", ".parquet", ".gz", ".zst"})


def check_peers(settings: NodeSettings, *, joins: bool = False) -> None:
    """Raise UserError: CONFIG if no initial peer is an address, or the host is none of this machine's. It raises
    PEERS_UNREACHABLE if a node that `joins` has no initial peer and knows none from before."""
    check_addresses(settings.initial_peers)
    listen_address(settings.host, settings.port)
    check_port_free(settings.host, 0)  # of the port itself the node speaks, once it has its run folder
    if joins and not settings.initial_peers and not RunFolder(settings.run_folder).peers.exists():
        raise no_address()


def check_own_data(own: OwnData) -> None:
    """Raise UserError (DATA) where a joiner names a file or a folder of this machine that is not there. What may be a
    name of the Hugging Face hub is for the run to judge."""
    text, folder = "an existing file or folder, or a glob of files", "an existing folder"
    named = [("path", own.path, text), ("tokenizer", own.tokenizer, folder)]
    named += [(f"paths.{key}", path, text) for key, path in own.paths.items()]
    for name, value, what in named:
        if value is not None and _is_of_this_machine(value) and not _is_there(value):
            message = f"run.data.{name} is '{value}', which does not exist"
            raise UserError(ExitCode.DATA, message, f"name {what}; nobody was asked for a run yet")


def _is_there(value: str) -> bool:
    place = os.path.expanduser(value)
    return Path(place).exists() or (glob.has_magic(place) and any(glob.iglob(place, recursive=True)))


def _is_of_this_machine(value: str) -> bool:
    """A name of the hub is `name` or `owner/name`, without the ending of a text file."""
    return value.startswith(("/", ".", "~")) or value.count("/") > 1 or Path(value).suffix.lower() in TEXT_ENDINGS


def check_trainable(config: Config) -> None:
    """Raise UserError (CONFIG or DATA) if model and text do not fit each other, or a node lacks the text it may read.
    Loads transformers."""
    with loading():
        from noloco_node.sizing.preflight import check_text, plan_run

    plan_run(config.run)
    if config.node.stage in ("auto", 0):
        check_text(config.run)
