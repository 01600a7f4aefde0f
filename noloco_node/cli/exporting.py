"""`noloco-node export`, `eval` and `generate`: a model out of a run, what it is worth, and what it says."""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from noloco_node import ambient
from noloco_node.cli.node_options import CONFIG_ARGUMENT, OWN_TEXT, guest_arguments, own_text_argument, set_argument
from noloco_node.errors import ExitCode, UserError
from noloco_node.exporting.sources import (
    are_addresses,
    check_own_files,
    check_text_named,
    gathered_folders,
    gathered_live,
    named_run,
    with_text,
    with_tokenizer,
)
from noloco_node.process_memory import loading
from noloco_node.telemetry.words import plain_text, say, say_loading

if TYPE_CHECKING:
    from collections.abc import Generator

    from noloco_node.config.run_spec import RunSpec
    from noloco_node.exporting.evaluation import HeldOut, Score
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


def eval_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `eval`."""
    add = command.add_argument
    places = "what `export` wrote; or nodes of a run under way, or run folders, as `export` takes them"
    add("sources", metavar="DIR|ADDRESS", nargs="+", help=places)
    add("--config", metavar="CONFIG", type=Path, help=CONFIG_ARGUMENT)
    guest_arguments(command)
    set_argument(command, OWN_TEXT)
    own_text_argument(command)
    command.set_defaults(call=_eval)


def generate_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `generate`."""
    add = command.add_argument
    places = "what `export` wrote, or another model of transformers; or nodes of a run under way"
    add("sources", metavar="DIR|ADDRESS", nargs="+", help=places)
    add("--prompt", metavar="TEXT", required=True, help="how the text begins")
    add("--max-tokens", metavar="N", type=int, default=200, help="so many tokens at most (default: 200)")
    add("--temperature", metavar="T", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    add("--seed", metavar="N", type=int, default=0, help="another seed gives another text (default: 0)")
    guest_arguments(command)
    set_argument(command, "run.data.tokenizer=DIR where the run's tokenizer lies on this machine")
    command.set_defaults(call=_generate, config=None)


def _eval(options: argparse.Namespace) -> int:
    first = Path(options.sources[0])
    if len(options.sources) == 1 and (first / "config.json").is_file():
        return _eval_model(first, options)
    with contextlib.ExitStack() as stack:
        if are_addresses(options.sources):
            check_text_named(options)
            gathered = gathered_live(options, stack, None, lambda run: with_text(run, options))
        else:
            gathered = gathered_folders(options)
        _eval_replicas(gathered, options)
    return int(ExitCode.OK)


def _eval_replicas(gathered: Gathered, options: argparse.Namespace) -> None:
    with loading():
        from noloco_node.exporting.evaluation import HeldOut
        from noloco_node.exporting.write import mean_of

    held_out, kept = HeldOut(with_text(gathered.run, options)), gathered.kept()
    mean = {name: value for stage in sorted(kept) for name, value in mean_of(kept[stage]).items()}
    names = ["merged", *(_alone(replica) for replicas in kept.values() for replica in replicas)]
    at = f", at {gathered.clock:,.0f} of {gathered.run.inner.target_tokens:,} tokens"
    width = _print_head(gathered.run, held_out, names, at)

    def told(replica: SavedReplica | None, score: Score) -> None:
        _print_score("merged" if replica is None else _alone(replica), score, width)

    held_out.singles(kept, mean, told)


def _eval_model(folder: Path, options: argparse.Namespace) -> int:
    say_loading()
    with loading():
        from noloco_node.exporting.evaluation import HeldOut, open_model
        from noloco_node.exporting.folders import read_run, tokenizer_at
        from noloco_node.exporting.write import RUN_FILE
        from noloco_node.model.cut import build_config

    run = named_run(options) or with_text(tokenizer_at(read_run(folder / RUN_FILE), folder), options)
    model = open_model(folder)
    ids, known = build_config(run.model).vocab_size, cast("Any", model).get_input_embeddings().num_embeddings
    if known < ids:
        raise UserError(
            ExitCode.CONFIG,
            f"the model in '{folder}' knows {known:,} token ids, and run '{run.name}' has {ids:,}",
            "name the configuration of the run that it was trained in, or leave --config out",
        )
    held_out = HeldOut(run)
    width = _print_head(run, held_out, ["the model"])
    _print_score("the model", held_out.score(model), width)
    return int(ExitCode.OK)


def _generate(options: argparse.Namespace) -> int:
    if options.max_tokens < 1 or not 0.0 <= options.temperature <= 100.0:
        message = f"--max-tokens is {options.max_tokens} and --temperature {options.temperature:g}"
        raise UserError(ExitCode.USAGE, message, "name 1 token or more, and a temperature from 0 to 100")
    if not 0 <= options.seed < 1 << 63:
        raise UserError(ExitCode.USAGE, f"--seed is {options.seed}", "name a number from 0 to 9223372036854775807")
    if not options.prompt:
        raise UserError(ExitCode.USAGE, "--prompt is empty", "name the beginning of a text")
    live = are_addresses(options.sources)
    if len(options.sources) > 1 and not live:
        message = f"{len(options.sources)} folders are named"
        raise UserError(ExitCode.USAGE, message, "name one folder, which `noloco-node export` wrote")
    with contextlib.ExitStack() as stack:
        model = _fetched_model(options, stack) if live else Path(options.sources[0])
        say_loading()
        with loading():
            from noloco_node.exporting.evaluation import Wish, continued

        wish = Wish(options.prompt, options.max_tokens, options.temperature, options.seed)
        with _own_line():
            spoken = continued(model, wish, _write)
    say(f"{spoken.tokens} tokens in {spoken.seconds:,.1f} s")
    if spoken.full:
        say("the text ends where the model's positions do (max_position_embeddings of its config.json)")
    return int(ExitCode.OK)


def _fetched_model(options: argparse.Namespace, stack: contextlib.ExitStack) -> Path:
    """The model of the run at the addresses, as `export` makes it, in a folder that is gone when the stack is left."""
    from noloco_node.config.data_spec import NO_TOKENIZER
    from noloco_node.exporting.write import export

    def speakable(run: RunSpec) -> RunSpec:
        if run.data.tokenizer == NO_TOKENIZER:
            raise UserError(
                ExitCode.DATA,
                f"run '{run.name}' has no tokenizer: it knows token ids only",
                "take the model home with noloco-node export, and copy the tokenizer that made its ids beside it",
            )
        return with_tokenizer(run, options)

    gathered = gathered_live(options, stack, None, speakable)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="noloco-generate-"))
    return export(replace(gathered, run=speakable(gathered.run)), Path(folder) / "model", say).folder


@contextlib.contextmanager
def _own_line() -> Generator[None]:
    """What is written in it piece by piece ends with its line, whatever ends it."""
    try:
        yield
    finally:
        print(flush=True)


def _write(text: str) -> None:
    print(plain_text(text), end="", flush=True)


def _print_head(run: RunSpec, held_out: HeldOut, names: Sequence[str], at: str = "") -> int:
    """What is scored, and the head of a table; the width of its first column, where these names stand."""
    width = max(map(len, [*names, *(f"  on {source}" for source in run.data.names)]))
    print(f"run {run.name} ({run.run_id}){at}: {held_out.windows} held-out windows, {held_out.tokens:,} tokens")
    if held_out.bytes is None:
        print("bits a byte are not known: the run trains on token ids, without a tokenizer (run.data.tokenizer: none)")
    print(f"{'':<{width}} {'loss':>8} {'perplexity':>12} {'bits/byte':>10}", flush=True)
    return width


def _alone(replica: SavedReplica) -> str:
    folder = "" if replica.source == replica.peer else replica.source.rpartition("/")[2]
    words = [word for word in (folder, f"…{replica.peer[-6:]}" if replica.peer else "") if word]
    return f"stage {replica.stage} of {' '.join(words)} alone"


def _print_score(name: str, score: Score, width: int) -> None:
    perplexity = f"{score.perplexity:,.3f}" if math.isfinite(score.perplexity) else "infinite"
    bits = "unknown" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
    print(f"{name:<{width}} {score.loss:>8.4f} {perplexity:>12} {bits:>10}", flush=True)
    for source, each in score.sources:
        _print_score(f"  on {source}", each, width)
