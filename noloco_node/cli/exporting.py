"""`noloco-node export`: a model out of a run."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node import ambient
from noloco_node.cli.node_options import CONFIG_ARGUMENT, OWN_TEXT, guest_arguments, own_text_argument, set_argument
from noloco_node.errors import ExitCode
from noloco_node.exporting.sources import (
    are_addresses,
    check_own_files,
    gathered_folders,
    gathered_live,
    say,
    with_text,
    with_tokenizer,
)
from noloco_node.process_memory import loading
from noloco_node.telemetry.words import say_loading

if TYPE_CHECKING:
    from noloco_node.exporting.gathered import Gathered, SavedReplica
    from noloco_node.exporting.write import Exported


def export_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `export`."""
    add = command.add_argument
    add("sources", metavar="ADDRESS|RUN_FOLDER", nargs="+", help="of a run under way; or folders that nodes have left")
    add("--out", metavar="DIR", type=Path, required=True, help="where the model goes, a folder that does not exist")
    add("--config", metavar="CONFIG", type=Path, help=CONFIG_ARGUMENT)
    add("--eval", action="store_true", help="say in its card what the model loses on the run's held-out text")
    guest_arguments(command)
    set_argument(command, OWN_TEXT)
    own_text_argument(command)
    command.set_defaults(call=_export)


def _export(options: argparse.Namespace) -> int:
    began = ambient.monotonic()
    say_loading()
    with loading():
        from noloco_node.exporting.evaluation import HeldOut
        from noloco_node.exporting.write import check_out, export

    check_out(options.out)
    with contextlib.ExitStack() as stack:
        if are_addresses(options.sources):
            gathered = gathered_live(
                options, stack, options.out, lambda run: check_own_files(run, options, reads_text=options.eval)
            )
        else:
            gathered = gathered_folders(options)
        gathered = replace(gathered, run=with_tokenizer(gathered.run, options))
        held_out = HeldOut(with_text(gathered.run, options)) if options.eval else None
        exported = export(gathered, options.out, say, held_out)
    _print_exported(gathered, exported, ambient.monotonic() - began)
    return int(ExitCode.OK)


def _print_exported(gathered: Gathered, exported: Exported, seconds: float) -> None:
    from noloco_node.telemetry.words import as_trained

    run, used = gathered.run, exported.used
    averaged = ", ".join(f"{len(used[stage])} of stage {stage}{_span(used[stage])}" for stage in sorted(used))
    out = f"; {exported.left_out} too far behind" if exported.left_out else ""
    print(f"run {run.name} ({run.run_id}), {as_trained(gathered.clock, run.inner.target_tokens)}")
    print(f"{'replicas':<30} {averaged}{out}")
    if gathered.reported is not None:
        at = f"at {gathered.reported.clock:,.0f} tokens, as the swarm reported it"
        print(f"{'validation loss':<30} {gathered.reported.loss:.4f} nats per token {at}")
    if exported.score is not None:
        print(f"{'validation loss of the model':<30} {exported.score.loss:.4f} nats per token")
    made = f"{exported.folder}, {exported.parameters:,} parameters, in {seconds:,.0f} s"
    print(f"{'model (Hugging Face folder)':<30} {made}")
    text = "" if run.data.path else " --data-path YOUR_TEXT"
    print(f"{'what it is worth':<30} noloco-node eval {exported.folder}{text}")
    print(f"{'to the Hugging Face hub':<30} hf upload --private --delete '*.safetensors' OWNER/NAME {exported.folder}")


def _span(replicas: Sequence[SavedReplica]) -> str:
    """From which clock to which they were trained, where they differ: the less trained ones are part of the mean."""
    first, last = (f"{clock([one.clock for one in replicas]):,.0f}" for clock in (min, max))
    return "" if first == last else f" (trained to {first} … {last} tokens)"
