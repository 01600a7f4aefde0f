"""What the commands print of runs, swarms and experiments."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node.errors import ExitCode, UserError
from noloco_node.process_memory import loading

if TYPE_CHECKING:
    from noloco_node.config.data_spec import DataSpec
    from noloco_node.config.load import Config
    from noloco_node.config.node_settings import NodeSettings
    from noloco_node.config.run_spec import RunSpec
    from noloco_node.directory.summary import SwarmSummary
    from noloco_node.laboratory.experiment import Finished
    from noloco_node.launch.device_group import Say
    from noloco_node.launch.local_run import SwarmResult
    from noloco_node.node.seed import SeedBegins


USUAL_UPLINK, USUAL_ROUND_TRIP = "20Mbit", "100ms"
"""What the plan takes a line for that nobody has named."""


def print_plan(config: Config) -> None:
    """What a configuration comes to. UserError as `plan` and `check_text` raise it."""
    _print_numbers(config)
    _check_text(config)


def print_sized_plan(config: Config, device: str | None, uplink: str | None, round_trip: str | None) -> None:
    """The plan with memory by part and, where a device is named, how much it would work. UserError as `plan` and
    `check_outer_steps` raise it, and (USAGE) as `device_by_name` and the quantities do."""
    from noloco_node.sizing.devices import bytes_a_second, device_by_name, seconds
    from noloco_node.sizing.utilisation import Link

    bound = config.node.uplink_mbit
    usual = USUAL_UPLINK if bound is None else f"{bound}Mbit"
    link = Link(bytes_a_second(uplink or usual), seconds(round_trip or USUAL_ROUND_TRIP))
    named = None if device is None else device_by_name(device, config.run.inner.precision)
    if named is None and (uplink or round_trip):
        raise UserError(
            ExitCode.USAGE,
            f"{'--uplink' if uplink else '--round-trip'} changes only how busy a device would be, and none is named",
            'name one, for example --device "RTX 4090"',
        )
    _print_numbers(config)
    with loading():
        from noloco_node.sizing.advice import check_outer_steps, expect
        from noloco_node.sizing.footprint import footprint_of
        from noloco_node.sizing.memory import planned_memory
        from noloco_node.sizing.screen import expectation_lines, memory_lines

    footprint = footprint_of(config.run)
    lines = memory_lines(config, footprint)
    if named is not None:
        found = expect(config, link, named)
        if uplink is None:
            check_outer_steps(config, footprint, link, named)
        lines += expectation_lines(config, named, link, found, planned_memory(config, footprint))
    print("\n".join(lines))
    sys.stdout.flush()


def print_text(config: Config, *, may_lack: bool) -> None:
    """What is to be said of the text and its tokenizer, with their fingerprints. UserError as `check_text` and
    `print_fingerprint` raise it. If it `may_lack` here, it is only said that it does."""
    from noloco_node.data.sources import lacking_text

    lacking = lacking_text(config.run.data) if may_lack else None
    if lacking is not None:
        print(f"  text              not looked at: {lacking}", flush=True)
        return
    _check_text(config)
    print_fingerprint(config.run)


def _print_numbers(config: Config) -> None:
    with loading():
        from noloco_node.sizing.preflight import plan, plan_lines

    numbers = plan(config)
    print("\n".join(plan_lines(config.run, numbers)))
    for warning in numbers.warnings:
        print(f"  note: {warning}")
    sys.stdout.flush()


def _check_text(config: Config) -> None:
    from noloco_node.sizing.preflight import check_text, most_tokens, note_on_blocks, note_on_passes

    check_text(config.run)
    for note in (note_on_blocks(config), note_on_passes(config.run, most_tokens(config.run.data))):
        if note is not None:
            print(f"  note: {note}")


def print_fingerprint(run: RunSpec) -> None:
    """Print the fingerprint of the tokenizer, and of the text on this machine, which is read for it. UserError as
    `fingerprint_of` raises it."""
    from noloco_node.data.tokenizers import tokenizer_words

    data = run.data
    if (words := tokenizer_words(data)) is not None:
        print(f"  tokenizer         {words}", flush=True)
    if any(part.source == "huggingface" for part in data.parts) and not data.streaming and data.prepared is None:
        return
    from noloco_node.data.prepared import fingerprints_of

    said = "set run.data.fingerprint to it, and every node is held to it"
    if data.fingerprint:
        said = "as the run has it"
    elif data.mixture and data.streaming and any(part.source == "huggingface" for part in data.parts):
        said = "set run.data.mixture[0].fingerprint to the first below, and so on, and every node is held to them"
    whole, parts = fingerprints_of(data)
    print(f"  text              {whole} ({said})")
    for name, each in zip(data.names, parts, strict=True):
        print(f"    {name:<15} {each}")
    sys.stdout.flush()


def print_now(text: str) -> None:
    """To stdout, also where that is a file that somebody follows."""
    print(text, flush=True)


def teller(log_format: str) -> Say:
    """The place where a node's command prints what is no line of its log: stdout. Beside a log of JSON it is that log,
    since a plain line would be one that nothing can read."""
    return print_now if log_format == "text" else logging.getLogger("noloco_node").info


def start_json_log(level: str) -> None:
    """For a command that starts no node in its own process, or none yet."""
    from noloco_node.telemetry.logging import NodeLog, configure_logging

    configure_logging(level, NodeLog(), style="json")


def print_run(run: RunSpec, outlook: SwarmSummary, say: Say = print_now, settings: NodeSettings | None = None) -> None:
    """Print what a joiner is about to take part in, and what that takes of its line, device and disk. It is for a node
    with these `settings`, else for one at any stage."""
    from noloco_node.sizing.preflight import plan_lines, plan_run
    from noloco_node.telemetry.words import as_long, as_nodes, as_stages, as_trained

    data = run.data
    source = "; ".join(_source(part) for part in data.parts)
    which = f" ({data.tokenizer_fingerprint})" if data.tokenizer_fingerprint else ""
    tokenizer = f"tokenizer {_named(data.tokenizer)}{which}"
    windows = f"windows of {data.sequence_length} tokens, {tokenizer}"
    nodes = as_nodes(outlook.replicas)
    share = 100.0 * min(1.0, outlook.clock / outlook.target_tokens)
    left, over = outlook.seconds_left, outlook.clock >= outlook.target_tokens
    empty = [stage for stage, count in enumerate(outlook.replicas) if not count]
    waits = "not known yet: nobody says how fast it is"
    if empty:
        waits = f"not known: {as_stages(empty)} {'has' if len(empty) == 1 else 'have'} no node"
    how_far = f"{as_trained(outlook.clock, outlook.target_tokens)} ({share:.0f} %)"
    if not any(outlook.replicas):  # also when the run has ended and its nodes have left: 0 % would be a claim
        how_far = "not known: no node of the run is there to say it"
    to_go = waits if left is None else f"about {as_long(left)} at this speed"
    lines = [
        *plan_lines(run, plan_run(run)),
        f"  model             {run.model.config['model_type']}",
        f"  data              {source}, {windows}",
        *_from_hub(data),
        f"  swarm             nodes {nodes}, {outlook.tokens_per_second:,.0f} tokens/s",
        f"  progress          {how_far}",
        f"  to go             {'nothing: this run is over, and its nodes are leaving' if over else to_go}",
    ]
    if not over and any(outlook.replicas):
        lines += _costs(run, outlook, settings)
    say("\n".join(lines))


def _costs(run: RunSpec, outlook: SwarmSummary, settings: NodeSettings | None) -> list[str]:
    from noloco_node.config.load import Config
    from noloco_node.sizing.screen import cost_lines

    config = Config(run=run) if settings is None else Config(run=run, node=settings)
    return cost_lines(config, outlook.target_tokens - outlook.clock, outlook.replicas, outlook.tokens_per_second)


def _from_hub(data: DataSpec) -> Iterator[str]:
    """What of a run comes from the hub, and whether the user's own token goes there."""
    from noloco_node.config.data_spec import BYTES, NO_TOKENIZER
    from noloco_node.config.environment import HUB_OPTION, hub_token

    what = ["its text"] if any(part.source == "huggingface" for part in data.parts) else []
    what += [] if data.own_tokenizer or data.tokenizer in (BYTES, NO_TOKENIZER) else ["its tokenizer"]
    how = (
        f"without your token; {HUB_OPTION} sends it" if hub_token() is False else f"with your own token ({HUB_OPTION})"
    )
    if what:
        yield f"  from the hub      {' and '.join(what)}, {how}"


def _source(data: DataSpec) -> str:
    return data.source if data.path is None else f"{data.source}, {_named(data.path)}"


def _named(place: str) -> str:
    """A path or a name in quotes; what stands where there is none is neither."""
    from noloco_node.config.data_spec import NOT_READ

    return place.strip("()") if place == NOT_READ else json.dumps(place, ensure_ascii=False)


def print_lab_plan(config: Config) -> None:
    """What an experiment comes to. UserError as `plan_lab` raises it."""
    from noloco_node.laboratory.course import plan_lab

    trainings, tokens = plan_lab(config)
    print(f"laboratory: {len(config.lab.variants)} variants, {trainings:,} trainings, {tokens:,} tokens in all")
    sys.stdout.flush()


def print_finished(finished: Finished) -> None:
    """One training of an experiment."""
    from noloco_node.telemetry.words import as_long

    result = finished.result
    loss = "diverged" if result.validation_loss is None else f"loss {result.validation_loss:.4f}"
    options = "".join(f" {name}={value}" for name, value in result.options.items())
    print(
        f"{finished.done} of {finished.total}: {result.variant}{options}, {result.replicas} replicas, "
        f"{result.tokens:,} tokens, seed {result.seed} ({result.purpose}): {loss}, {result.seconds:,.0f} s; "
        f"about {as_long(finished.seconds_left)} left",
        flush=True,
    )


def print_result(result: SwarmResult) -> None:
    """How a local swarm's run ended, and what it left where."""
    from noloco_node.launch.local_run import MODEL
    from noloco_node.telemetry.summary import TRAINING_LOSS_SHARE
    from noloco_node.telemetry.words import as_bytes, as_long

    summary = result.summary
    losses = {
        f"training loss, last {100 * TRAINING_LOSS_SHARE:.0f} %": summary.training_loss,
        "validation loss": summary.validation_loss,
        "validation loss, merged": summary.validation_loss_merged,
    }
    print(
        f"\n{summary.tokens:,} tokens; from the first inner step on {summary.tokens_per_second:,.0f} tokens/s, over "
        f"{as_long(summary.seconds)}"
    )
    of_sources = {f"  of {name}": loss for name, loss in summary.validation_losses_by_source.items()}
    for name, loss in (losses | of_sources).items():
        if loss is not None:
            print(f"{name:<30} {loss:.4f} nats per token")
    for name in summary.died:
        print(f"{name:<30} ended without a last word, see its log")
    for name, path in result.files.items():
        print(f"{name:<30} {path}")
    parts = ", ".join(f"{name} {as_bytes(size)}" for name, size in result.disk.items() if size)
    print(f"{'on the disk':<30} {as_bytes(sum(result.disk.values()))} ({parts})")
    if (model := result.files.get(MODEL)) is not None:
        print(f"{'let it continue a text':<30} noloco-node generate {model} --prompt TEXT")


def print_ended(run_folder: Path, say: Say = print_now) -> None:
    """What a node leaves that has come to the run's end, and how it becomes a model."""
    say(
        f"the weights of its stage are in {run_folder / 'final'}; with the run folders of the other stages beside it, "
        f"this makes the model: noloco-node export {run_folder} --out my-model"
    )


def print_seed(
    run: RunSpec | None, addresses: list[str], begins: SeedBegins, collects: bool, *, model: Path, say: Say = print_now
) -> None:
    """The addresses of a seed that is up, and how it begins; `model`: where the run's model will be, if it `collects`
    that."""
    up = "seed of any run is up" if run is None else f"seed of run {run.name} ({run.run_id}) is up"
    if run is None:
        lines = [up, *(f"  others name it with: --initial-peers {address}" for address in addresses)]
    else:
        from noloco_node.config.own_paths import join_line, join_note

        lines = [up, *(f"  others join with: {join_line(run, address)}" for address in addresses)]
        lines += [f"  {note}" for note in [join_note(run)] if note]
    if begins == "after_the_end":
        lines.append(
            "  THE RUN HAS COME TO ITS END, says this seed's folder; nodes that come home learn it here. To begin it "
            "anew name another folder with --run-folder"
        )
    if begins == "anew":
        lines.append(
            "  IT BEGINS A NEW SWARM, as the first seed of a run does. Nodes that are up already are in another one; "
            "to hold that together, stop this seed and start it again with --initial-peers and a node's address"
        )
    if collects:
        lines.append(f"  the run's model will be in {model}, made anew while nodes train it")
    say("\n".join(lines))
