"""`noloco-node merge`: the weights that nodes on several machines left, put together to one model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node.collector import loading
from noloco_node.errors import ExitCode, UserError

if TYPE_CHECKING:
    from noloco_node.config.run_spec import RunSpec


def merge_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `merge` beside CONFIG."""
    command.add_argument("folders", metavar="RUN_FOLDER", type=Path, nargs="+", help="of a node, or of several nodes")
    command.add_argument("--to", metavar="DIR", type=Path, required=True, help="where the model and a sample go")
    command.set_defaults(call=_merge)


def saved_stages(run: RunSpec, folders: Sequence[Path]) -> dict[int, list[Path]]:
    """Where the final weights of each stage lie in these run folders; every stage has some.

    Raises UserError: RUN_FOLDER for a folder without any, for weights that are damaged, and where a stage has none;
    WRONG_RUN for weights of another run.
    """
    from pydantic import ValidationError

    from noloco_node.storage.weights import MANIFEST, Manifest

    saved: dict[int, list[Path]] = {stage: [] for stage in range(run.stages)}
    for folder in folders:
        found = dict.fromkeys(path.parent for path in _manifests(folder, MANIFEST))
        if not found:
            raise UserError(
                ExitCode.RUN_FOLDER,
                f"'{folder}' holds no final weights",
                "name the run folder of a node that came to the end of the run, or the folder final inside it",
            )
        for place in found:
            try:
                manifest = Manifest.model_validate_json((place / MANIFEST).read_bytes())
            except (OSError, ValidationError) as error:
                reason = str(error).splitlines()[0]
                raise UserError(
                    ExitCode.RUN_FOLDER,
                    f"'{place / MANIFEST}' cannot be read: {reason}",
                    "copy the folder again from where it was written, or leave it out",
                ) from None
            if manifest.run_id != run.run_id:
                raise UserError(
                    ExitCode.WRONG_RUN,
                    f"'{place}' holds weights of run {manifest.run_id}, and this configuration is run '{run.name}' "
                    f"({run.run_id})",
                    "use the configuration file of that run: every value under `run:` must be the same",
                )
            saved[manifest.stage].append(place)
    lost = [str(stage) for stage, places in saved.items() if not places]
    if lost:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"none of the folders holds weights of stage {', '.join(lost)} of {run.stages}, and every stage is needed",
            "name the run folder of a node that served it, too; who trained at your run can send you theirs",
        )
    return saved


def _manifests(folder: Path, name: str) -> Iterator[Path]:
    """In a folder of weights, a node's run folder, and one that holds those of several nodes."""
    for pattern in (name, f"final/{name}", f"*/final/{name}", f"nodes/*/final/{name}"):
        yield from sorted(folder.glob(pattern))


def _merge(options: argparse.Namespace) -> int:
    from noloco_node.config.load import load_config

    run, to = load_config(options.config, options.set).run, options.to
    saved = saved_stages(run, options.folders)
    if (to / "model").exists():
        raise UserError(ExitCode.RUN_FOLDER, f"'{to / 'model'}' exists already", "name another folder with --to")
    with loading():
        from noloco_node.merge import merge_run
        from noloco_node.preflight import check_text

    check_text(run)
    try:
        to.mkdir(parents=True, exist_ok=True)
        merged = merge_run(run, saved, to)
    except OSError as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"--to is '{to}', which cannot be written: {error.strerror or error}",
            "name a folder that does not exist yet or that you may write to, on a disk with space left",
        ) from None
    print(f"merged {', '.join(f'{len(places)} of stage {stage}' for stage, places in saved.items())}")
    print(f"{'validation loss':<30} {merged.loss:.4f} nats per token")
    print(f"{'model (Hugging Face folder)':<30} {merged.model}")
    print(f"{'sample of its text':<30} {merged.sample}")
    return int(ExitCode.OK)
