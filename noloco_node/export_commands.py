"""`noloco-node export`, `eval` and `generate`: a model out of a run, what it is worth, and what it says."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node.collector import loading
from noloco_node.errors import ExitCode, UserError
from noloco_node.node_options import set_argument

if TYPE_CHECKING:
    from noloco_node.config.run_spec import RunSpec
    from noloco_node.exporting.evaluation import HeldOut, Score
    from noloco_node.exporting.gathered import Gathered
    from noloco_node.exporting.write import Exported
    from noloco_node.merge import SavedReplica

SHARD_BYTES = 5_000_000_000
OWN_TEXT = "run.data.path=FILE where the run's text is each volunteer's own"
CONFIG_HELP = "the run's configuration, where its folders do not say which run it is"
FIRST_COLUMN = 46


def export_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `export`."""
    add = command.add_argument
    add("sources", metavar="ADDRESS|RUN_FOLDER", nargs="+", help="of a run under way; or folders that nodes have left")
    add("--out", metavar="DIR", type=Path, required=True, help="where the model goes, a folder that does not exist")
    add("--replicas", metavar="mean|best|PEER", default="mean", help="which of each stage (default: mean)")
    add("--config", metavar="CONFIG", type=Path, help=CONFIG_HELP)
    add("--shard-bytes", metavar="N", type=int, default=SHARD_BYTES, help="largest file of weights (default: 5 GB)")
    add("--invitation", metavar="TEXT|FILE", help="for a run that admits only who is invited")
    add("--identity", metavar="FILE", help="the identity that the run admits, where it admits by name")
    set_argument(command, OWN_TEXT)
    command.set_defaults(call=_export)


def eval_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `eval`."""
    add = command.add_argument
    add("sources", metavar="DIR", nargs="+", help="what `export` wrote; or run folders, as `export` takes them")
    add("--config", metavar="CONFIG", type=Path, help=CONFIG_HELP)
    set_argument(command, OWN_TEXT)
    command.set_defaults(call=_eval)


def generate_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `generate`."""
    add = command.add_argument
    add("folder", metavar="DIR", type=Path, help="what `export` wrote, or another model of transformers")
    add("--prompt", metavar="TEXT", required=True, help="how the text begins")
    add("--max-tokens", metavar="N", type=int, default=200, help="so many tokens at most (default: 200)")
    add("--temperature", metavar="T", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    add("--seed", metavar="N", type=int, default=0, help="another seed gives another text (default: 0)")
    command.set_defaults(call=_generate)


def _export(options: argparse.Namespace) -> int:
    began = time.monotonic()
    if options.shard_bytes < 1:
        raise UserError(ExitCode.USAGE, f"--shard-bytes is {options.shard_bytes}", "name a size of 1 byte or more")
    with loading():
        from noloco_node.exporting.evaluation import Bench, HeldOut
        from noloco_node.exporting.write import BEST, check_out, export

    check_out(options.out)
    with contextlib.ExitStack() as stack:
        gathered = _gathered_live(options, stack) if _are_addresses(options.sources) else _gathered(options)
        bench = None
        if options.replicas == BEST:
            bench = Bench(gathered.run, HeldOut(_with_text(gathered.run, options)))
        exported = export(gathered, options.out, options.replicas, _say, options.shard_bytes, bench)
    _print_exported(gathered, exported, time.monotonic() - began)
    return int(ExitCode.OK)


def _eval(options: argparse.Namespace) -> int:
    first = Path(options.sources[0])
    if len(options.sources) == 1 and (first / "config.json").is_file():
        return _eval_model(first, options)
    with loading():
        from noloco_node.exporting.evaluation import Bench, HeldOut
        from noloco_node.merge import mean_of

    gathered = _gathered(options)
    held_out, kept = HeldOut(_with_text(gathered.run, options)), gathered.kept()
    mean = {name: value for stage in sorted(kept) for name, value in mean_of(kept[stage]).items()}
    _print_head(gathered.run, held_out)
    Bench(gathered.run, held_out).singles(kept, mean, _print_single)
    return int(ExitCode.OK)


def _eval_model(folder: Path, options: argparse.Namespace) -> int:
    with loading():
        from noloco_node.exporting.evaluation import HeldOut
        from noloco_node.exporting.folders import read_run
        from noloco_node.exporting.read import open_model
        from noloco_node.exporting.write import RUN_FILE

    run = _named_run(options) or _with_text(read_run(folder / RUN_FILE), options)
    model, held_out = open_model(folder), HeldOut(run)
    _print_head(run, held_out)
    _print_score("the model", held_out.score(model))
    return int(ExitCode.OK)


def _generate(options: argparse.Namespace) -> int:
    if options.max_tokens < 1 or not 0.0 <= options.temperature <= 100.0:
        message = f"--max-tokens is {options.max_tokens} and --temperature {options.temperature:g}"
        raise UserError(ExitCode.USAGE, message, "name 1 token or more, and a temperature from 0 to 100")
    with loading():
        from noloco_node.exporting.read import continued

    print(continued(options.folder, options.prompt, options.max_tokens, options.seed, options.temperature))
    return int(ExitCode.OK)


def _are_addresses(sources: Sequence[str]) -> bool:
    """Whether they are a run's nodes. UserError (USAGE) for folders among them."""
    addresses = [source for source in sources if "/p2p/" in source and not Path(source).exists()]
    if addresses and len(addresses) < len(sources):
        message = "addresses of nodes and run folders are mixed"
        raise UserError(ExitCode.USAGE, message, "name either the nodes of a run under way, or folders")
    return bool(addresses)


def _gathered_live(options: argparse.Namespace, stack: contextlib.ExitStack) -> Gathered:
    """Fetched into a folder beside `--out`, which is gone when the stack is left."""
    from noloco_node.config.node_settings import NodeSettings
    from noloco_node.early_checks import check_peers

    settings = NodeSettings(
        initial_peers=tuple(options.sources), invitation=options.invitation, identity=options.identity
    )
    check_peers(settings)
    with loading():
        import uvloop
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        from noloco_node.exporting.live import gather_live

    beside = options.out.absolute()
    spool = stack.enter_context(tempfile.TemporaryDirectory(dir=beside.parent, prefix=f".{beside.name}.fetched-"))
    columns = TextColumn("fetching"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("fetching")

        def told(came: int, wanted: int) -> None:
            progress.update(bar, completed=came, total=wanted)

        return uvloop.run(gather_live(settings, Path(spool), told))


def _gathered(options: argparse.Namespace) -> Gathered:
    with loading():
        from noloco_node.exporting.folders import gather_folders

    return gather_folders([Path(source) for source in options.sources], _named_run(options))


def _named_run(options: argparse.Namespace) -> RunSpec | None:
    from noloco_node.config.load import load_config

    return load_config(options.config, options.set).run if options.config is not None else None


def _with_text(run: RunSpec, options: argparse.Namespace) -> RunSpec:
    """With the place of the text, as who joins a run says it. UserError (CONFIG) where it must be named."""
    from noloco_node.config.load import load_join
    from noloco_node.swarm.spec_fetch import with_own_data

    return _named_run(options) or with_own_data(run, load_join(options.set).run.data, reads_text=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_exported(gathered: Gathered, exported: Exported, seconds: float) -> None:
    run, used = gathered.run, exported.used
    averaged = ", ".join(f"{len(used[stage])} of stage {stage}" for stage in sorted(used))
    out = f"; {exported.left_out} too far behind" if exported.left_out else ""
    print(f"run {run.name} ({run.run_id}), {gathered.clock:,.0f} of {run.inner.target_tokens:,} tokens")
    print(f"{'replicas':<30} {averaged}{out}")
    if gathered.reported is not None:
        at = f"at {gathered.reported.clock:,.0f} tokens, as the swarm reported it"
        print(f"{'validation loss':<30} {gathered.reported.loss:.4f} nats per token {at}")
    made = f"{exported.folder}, {exported.parameters:,} parameters, in {seconds:,.0f} s"
    print(f"{'model (Hugging Face folder)':<30} {made}")
    print(f"{'what it is worth':<30} noloco-node eval {exported.folder}")


def _print_head(run: RunSpec, held_out: HeldOut) -> None:
    print(f"run {run.name} ({run.run_id}): {held_out.windows} held-out windows, {held_out.tokens:,} tokens")
    print(f"{'':<{FIRST_COLUMN}} {'loss':>8} {'perplexity':>12} {'bits/byte':>10}", flush=True)


def _print_single(replica: SavedReplica | None, score: Score) -> None:
    _print_score("merged" if replica is None else _alone(replica), score)


def _alone(replica: SavedReplica) -> str:
    words: Sequence[str] = (replica.source.rpartition("/")[2], f"…{replica.peer[-6:]}" if replica.peer else "")
    return f"stage {replica.stage} of {' '.join(words).strip()} alone"[:FIRST_COLUMN]


def _print_score(name: str, score: Score) -> None:
    perplexity = f"{score.perplexity:,.3f}" if math.isfinite(score.perplexity) else "infinite"
    print(f"{name:<{FIRST_COLUMN}} {score.loss:>8.4f} {perplexity:>12} {score.bits_per_byte:>10.4f}", flush=True)
