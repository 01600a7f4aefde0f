"""The commands: parse, call, print. No logic."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from noloco_node import __version__
from noloco_node.errors import EXIT_MEANINGS, ExitCode, UserError

if TYPE_CHECKING:
    from noloco_node.config.load import Config
    from noloco_node.config.node_settings import NodeSettings
    from noloco_node.config.run_spec import RunSpec
    from noloco_node.local_swarm import SwarmResult
    from noloco_node.swarm.outlook import Outlook
    from noloco_node.telemetry.events import NodeStopped
    from noloco_node.virtual.experiment import Finished

DESCRIPTION = """\
Train one language model on GPUs that nobody owns together: each node serves one pipeline stage, and averages its
weights with a random node of the same stage now and then. There is no coordinator; any node may leave at any time."""

SWARM_HELP = """\
Train on a whole swarm of nodes on this machine: stages x replicas daemons, each a process of its own. Shows the
training while it runs. At the end the run folder holds the model (a Hugging Face directory), a sample of generated
text, a plot of loss and spread, summary.json, and each node's events and log.

example:
  noloco-node swarm configs/tiny.yaml
  noloco-node swarm configs/own-text.yaml --set run.data.path=my-book.txt --run-folder runs/my-book"""

RUN_HELP = """\
Run one node. Without --initial-peers it starts a new swarm and prints the addresses under which others join it; with
them it joins; all nodes of a run need the same `run:` part of CONFIG. `noloco-node join ADDRESS` needs no CONFIG.
Ctrl-C leaves in order.

example:
  noloco-node run configs/tiny.yaml --stage 0 --port 31337
  noloco-node run configs/tiny.yaml --initial-peers /ip4/10.0.0.5/tcp/31337/p2p/Qm..."""

JOIN_HELP = """\
Join a run with nothing but the address of one of its nodes. The run's settings come from that node and are shown; then
this node takes a stage, copies a fellow's weights if the run is under way, and trains as with `run`. Several addresses
are tried together. Ctrl-C leaves in order.

example:
  noloco-node join /ip4/10.0.0.5/tcp/31337/p2p/Qm...
  noloco-node join /ip4/10.0.0.5/tcp/31337/p2p/Qm... --host 0.0.0.0 --port 31337 --devices all"""

LAB_HELP = """\
Compare algorithms on many replicas simulated in this process: NoLoCo, DiLoCo, data parallel, plain gossip, none. The
`lab:` part of CONFIG says which variants, on how many replicas, for how long, with which seeds; without it the five are
compared as they are. DIR gets results.json, table.md and plots. Every finished training is kept in DIR/runs.jsonl: the
same command goes on where it was cut off.

example:
  noloco-node lab configs/tiny.yaml --out results/tiny
  noloco-node lab configs/tiny.yaml --out results/tiny --set lab.seeds=[1,2,3] --set run.inner.learning_rate=1e-3"""

SHOW_HELP = """\
Print every setting with its value and meaning, defaults included, as YAML that can be used as a configuration file.

example:
  noloco-node config show configs/tiny.yaml --set run.outer.inner_steps=20"""

VALIDATE_HELP = """\
Check a configuration file: names, values, and whether model, stages and batch sizes fit each other. Prints what it
comes to: run id, parameters, inner steps, outer rounds, bytes of an outer step.

example:
  noloco-node config validate configs/tiny.yaml"""

IDENTITY_HELP = """\
Look at a node's identity, back it up, bring it back. An identity is the private key file behind a node's peer id; one
running node at a time may use it. Where no file is named it is runs/node/identity.key: the one that `noloco-node run`
uses when given neither --run-folder nor --identity.

example:
  noloco-node identity show runs/node/identity.key
  noloco-node identity export runs/node/identity.key --to node.pem
  noloco-node identity import node.pem --to runs/other/identity.key"""

IDENTITY_SHOW_HELP = """\
Print an identity's peer id, where its file is, who may read it, and whether a node on this machine uses it now.
FILE is runs/node/identity.key where not given: the one that `noloco-node run` uses when given neither --run-folder nor
--identity.

example:
  noloco-node identity show"""

EXPORT_HELP = """\
Write an encrypted copy of an identity file: PKCS#8 in PEM form, which other tools read too. The passphrase (12
characters or more) is asked for twice; for scripts it is the first line of a file. Keep the copy and the passphrase in
different places.

example:
  noloco-node identity export runs/node/identity.key --to node.pem"""

IMPORT_HELP = """\
Bring an exported identity back as a new identity file. The passphrase is that of the export. Let only one node run
under an identity: stop the one that it came from first.

example:
  noloco-node identity import node.pem --to runs/node/identity.key"""

ORPHAN_SECONDS = 8.0
"""Time that a daemon of a local swarm has to end in order after its launcher has vanished."""


def entry() -> NoReturn:
    """The installed command: `main`, and then an end at once.

    Everything that must be closed is closed by then. Taking torch and hivemind down module by module costs 0.8 s of
    CPU a process, which eight daemons that are told to stop together do not have.
    """
    code = main()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Never lets a traceback out, but for `--debug`."""
    options = parser().parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return int(options.call(options))
    except UserError as error:
        print(f"noloco-node: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("noloco-node: interrupted", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except Exception as error:  # noqa: BLE001 - the last resort: a person sees one screen, the report gets the rest
        _report_failure(error, debug=options.debug)
        return int(ExitCode.FAILURE)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        "noloco-node",
        description=DESCRIPTION,
        epilog=_exit_codes(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"noloco-node {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    swarm = _command(commands, "swarm", "train on a swarm of nodes on this machine", SWARM_HELP)
    _config_arguments(swarm)
    swarm.add_argument("--run-folder", metavar="DIR", type=Path, help="where results go (default: runs/NAME-TIME)")
    swarm.set_defaults(call=_swarm)
    run = _command(commands, "run", "run one node: start a swarm, or join one", RUN_HELP)
    _config_arguments(run)
    run.add_argument("--initial-peers", metavar="ADDR", nargs="+", help="nodes to join (default: start a new swarm)")
    _node_arguments(run)
    run.set_defaults(call=_run)
    join = _command(commands, "join", "join a run with the address of one of its nodes", JOIN_HELP)
    join.add_argument("initial_peers", metavar="ADDRESS", nargs="+", help="address that a node of the run printed")
    _set_argument(join, "node.device=cuda")
    _node_arguments(join)
    join.set_defaults(call=_join)
    lab = _command(commands, "lab", "compare algorithms on simulated replicas", LAB_HELP)
    _config_arguments(lab)
    lab.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the results go")
    lab.set_defaults(call=_lab)
    _identity_commands(_command(commands, "identity", "look at, back up or bring back an identity", IDENTITY_HELP))
    config = _command(commands, "config", "look at a configuration file", "Look at a configuration file.")
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = _command(actions, "show", "print every setting with its value and meaning", SHOW_HELP)
    _config_arguments(show)
    show.set_defaults(call=_show)
    validate = _command(actions, "validate", "check a configuration and print what it comes to", VALIDATE_HELP)
    _config_arguments(validate)
    validate.set_defaults(call=_validate)
    return top


def _identity_commands(identity: argparse.ArgumentParser) -> None:
    actions = identity.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = _command(actions, "show", "print peer id, permissions, and who uses it", IDENTITY_SHOW_HELP)
    show.add_argument("file", metavar="FILE", type=Path, nargs="?", help="identity file")
    show.set_defaults(call=_identity_show)
    export = _command(actions, "export", "write an encrypted copy", EXPORT_HELP)
    export.add_argument("file", metavar="FILE", type=Path, help="identity file")
    export.add_argument("--to", metavar="BACKUP", type=Path, required=True, help="the copy, a file that does not exist")
    export.set_defaults(call=_identity_export)
    bring = _command(actions, "import", "bring an encrypted copy back", IMPORT_HELP)
    bring.add_argument("file", metavar="BACKUP", type=Path, help="what `identity export` wrote")
    bring.add_argument("--to", metavar="FILE", type=Path, help="identity file (default: runs/node/identity.key)")
    bring.set_defaults(call=_identity_import)
    for command in (export, bring):
        command.add_argument("--passphrase-file", metavar="F", type=Path, help="its first line is the passphrase")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],  # pyright: ignore[reportPrivateUsage]
    name: str,
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=_exit_codes(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--debug", action="store_true", help="on an unexpected failure show the whole traceback")
    return command


def _config_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, for example configs/tiny.yaml")
    _set_argument(command, "run.inner.learning_rate=3e-3")


def _set_argument(command: argparse.ArgumentParser, example: str) -> None:
    help_text = f"override a setting, for example {example} (may be repeated)"
    command.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help=help_text)


def _node_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--stage", metavar="N|auto", help="stage to serve; auto: the one that needs this node most and fits its memory")
    add("--devices", metavar="all|LIST", help="one node on each GPU, or on cuda:0,cuda:1; one that dies stays dead")
    add("--run-folder", metavar="DIR", help="where events, identity and final weights go")
    add("--host", metavar="ADDR", help="address to listen on; 0.0.0.0 to be reachable from other machines")
    add("--port", metavar="N", help="TCP port to listen on; 0: any free one")
    add("--announce", metavar="ADDR", nargs="+", help="addresses under which others reach this node, behind a NAT")
    add("--metrics-port", metavar="N", help="serve Prometheus metrics on this port; 0: any free one")
    add("--identity", metavar="FILE", help="private key of this node, made when missing")
    add("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)


NODE_OPTIONS = ("initial_peers", "stage", "run_folder", "host", "port", "announce", "metrics_port", "identity")
"""Options of `run` and `join` that stand for the setting of the same name in `node:`."""


def node_overrides(options: argparse.Namespace) -> list[str]:
    """The options of `run` and `join` as overrides, before those of --set."""
    given = {name: getattr(options, name) for name in NODE_OPTIONS if getattr(options, name) is not None}
    plain = {"stage", "port", "metrics_port"}
    quoted = {name: value if name in plain else json.dumps(value, default=str) for name, value in given.items()}
    return [f"node.{name}={value}" for name, value in quoted.items()] + list(options.set)


def _swarm(options: argparse.Namespace) -> int:
    from noloco_node.config.load import load_config

    config = load_config(options.config, options.set)
    _print_plan(config)
    from rich.console import Console

    from noloco_node.local_swarm import run_local_swarm

    folder: Path = options.run_folder or Path("runs") / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    result = run_local_swarm(config, folder, Console())
    _print_result(result)
    return int(result.exit_code)


def _run(options: argparse.Namespace) -> int:
    _tie_to_launcher(options)
    from noloco_node.config.load import load_config

    config = load_config(options.config, node_overrides(options))
    if options.devices:
        return _on_devices(options, config.node)
    import uvloop

    from noloco_node.node import run_node

    return _exit_code(uvloop.run(run_node(config.run, config.node)))


def _join(options: argparse.Namespace) -> int:
    _tie_to_launcher(options)
    from noloco_node.config.load import load_join

    config = load_join(node_overrides(options))
    if options.devices:
        return _on_devices(options, config.node)
    import uvloop

    from noloco_node.node import join_node

    return _exit_code(uvloop.run(join_node(config.run.data, config.node, _print_run)))


def _on_devices(options: argparse.Namespace, settings: NodeSettings) -> int:
    from noloco_node.device_group import run_devices

    return run_devices(options.arguments, options.devices, settings, lambda line: print(line, flush=True))


def _exit_code(stopped: NodeStopped) -> int:
    endings = {"target_reached": ExitCode.OK, "interrupted": ExitCode.INTERRUPTED, "failed": ExitCode.FAILURE}
    return int(endings[stopped.reason])


def _lab(options: argparse.Namespace) -> int:
    from noloco_node.config.load import load_config
    from noloco_node.virtual.laboratory import command_line, run_lab

    config = load_config(options.config, options.set)
    _print_lab_plan(config)
    command = command_line(options.config, options.out, options.set)
    files = run_lab(config, options.out, command, _print_finished)
    for name, path in files.items():
        print(f"{name:<30} {path}")
    return int(ExitCode.OK)


def _identity_show(options: argparse.Namespace) -> int:
    from noloco_node.identity_commands import default_identity, show_identity

    print("\n".join(show_identity(options.file or default_identity())))
    return int(ExitCode.OK)


def _identity_export(options: argparse.Namespace) -> int:
    from noloco_node.identity_commands import export_identity

    peer_id = export_identity(options.file, options.to, options.passphrase_file)
    print(f"{options.to} holds the identity of {peer_id}, encrypted")
    return int(ExitCode.OK)


def _identity_import(options: argparse.Namespace) -> int:
    from noloco_node.identity_commands import default_identity, import_identity

    target: Path = options.to or default_identity()
    peer_id = import_identity(options.file, target, options.passphrase_file)
    print(f"{target} holds the identity of {peer_id}\nlet only one node run under it at a time")
    return int(ExitCode.OK)


def _show(options: argparse.Namespace) -> int:
    from noloco_node.config.load import load_config, render

    config = load_config(options.config, options.set)
    print(f"# run id: {config.run.run_id}\n{render(config)}", end="")
    return int(ExitCode.OK)


def _validate(options: argparse.Namespace) -> int:
    from noloco_node.config.load import load_config

    config = load_config(options.config, options.set)
    _print_plan(config)
    if "lab" in config.model_fields_set:
        _print_lab_plan(config)
    print(f"{options.config} is valid")
    return int(ExitCode.OK)


def _print_plan(config: Config) -> None:
    from noloco_node.preflight import plan, plan_lines

    numbers = plan(config)
    print("\n".join(plan_lines(config.run, numbers)))
    for warning in numbers.warnings:
        print(f"  note: {warning}")
    sys.stdout.flush()


def _print_run(run: RunSpec, outlook: Outlook) -> None:
    """What a joiner is about to take part in."""
    from noloco_node.preflight import plan_lines, plan_run

    data = run.data
    source = data.source if data.path is None else f"{data.source}, {json.dumps(data.path, ensure_ascii=False)}"
    windows = f"windows of {data.sequence_length} tokens, tokenizer {json.dumps(data.tokenizer, ensure_ascii=False)}"
    nodes = " + ".join(map(str, outlook.replicas))
    share = 100.0 * min(1.0, outlook.clock / outlook.target_tokens)
    left = outlook.seconds_left
    empty = [str(stage) for stage, count in enumerate(outlook.replicas) if not count]
    waits = f"not known: stage {', '.join(empty)} has no node" if empty else "not known yet: nobody says how fast it is"
    print("\n".join(plan_lines(run, plan_run(run))))
    print(f"  model             {run.model.config['model_type']}")
    print(f"  data              {source}, {windows}")
    print(f"  swarm             {nodes} nodes, {outlook.tokens_per_second:,.0f} tokens/s")
    print(f"  progress          {outlook.clock:,.0f} of {outlook.target_tokens:,} tokens ({share:.0f} %)")
    print(f"  to go             {waits if left is None else f'about {left / 3600:,.1f} h at this speed'}")
    sys.stdout.flush()


def _print_lab_plan(config: Config) -> None:
    from noloco_node.virtual.laboratory import plan_lab

    numbers, lab = plan_lab(config), config.lab
    print(
        f"laboratory: {len(lab.variants)} variants, {numbers.trainings:,} trainings, {numbers.tokens:,} tokens in all"
    )
    sys.stdout.flush()


def _print_finished(finished: Finished) -> None:
    result = finished.result
    loss = "diverged" if result.validation_loss is None else f"loss {result.validation_loss:.4f}"
    options = "".join(f" {name}={value}" for name, value in result.options.items())
    print(
        f"{finished.done} of {finished.total}: {result.variant}{options}, {result.replicas} replicas, "
        f"{result.tokens:,} tokens, seed {result.seed} ({result.purpose}): {loss}, {result.seconds:,.0f} s; "
        f"about {finished.seconds_left / 60:,.1f} min left",
        flush=True,
    )


def _print_result(result: SwarmResult) -> None:
    summary = result.summary
    losses = {
        "training loss": summary.training_loss,
        "validation loss": summary.validation_loss,
        "validation loss, merged": summary.validation_loss_merged,
    }
    print(f"\n{summary.tokens:,} tokens in {summary.seconds:,.0f} s, {summary.tokens_per_second:,.0f} tokens/s")
    for name, loss in losses.items():
        if loss is not None:
            print(f"{name:<30} {loss:.4f} nats per token")
    for name in summary.died:
        print(f"{name:<30} ended without a last word, see its log")
    for name, path in result.files.items():
        print(f"{name:<30} {path}")


def _tie_to_launcher(options: argparse.Namespace) -> None:
    if options.end_with_stdin:
        threading.Thread(target=_end_with_stdin, name="end with stdin", daemon=True).start()


def _end_with_stdin() -> None:
    """A daemon of a local swarm ends when its launcher does: the launcher holds the only writing end of stdin."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def _report_failure(error: Exception, *, debug: bool) -> None:
    """One screen for a person; the traceback to the log where stderr is one, else to a file."""
    text = "".join(traceback.format_exception(error))
    print(f"noloco-node: an unexpected failure: {type(error).__name__}: {str(error)[:500]}", file=sys.stderr)
    if debug or not sys.stderr.isatty():
        print(text, file=sys.stderr)
        return
    handle, path = tempfile.mkstemp(prefix="noloco-node-failure-", suffix=".log")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    print(f"  this is a defect of noloco-node: please report it, with {path}", file=sys.stderr)


def _exit_codes() -> str:
    rows = [f"  {code.value:>3}  {meaning}" for code, meaning in EXIT_MEANINGS.items()]
    return "\n".join(["exit codes:", *rows])
