"""The commands: parse, call, print. No logic."""

from __future__ import annotations

import argparse
import contextlib
import errno
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
from noloco_node.address_space import refused_memory
from noloco_node.cli.data import prepare_arguments
from noloco_node.cli.evaluating import eval_arguments, generate_arguments
from noloco_node.cli.exporting import export_arguments
from noloco_node.cli.folders import report_arguments, status_arguments
from noloco_node.cli.help_texts import (
    COMPLETION_HELP,
    CONFIG_HELP,
    DATA_HELP,
    DESCRIPTION,
    DOCTOR_HELP,
    ENVIRONMENT_HELP,
    EVAL_HELP,
    EXPORT_HELP,
    EXPORT_IDENTITY_HELP,
    GENERATE_HELP,
    HEALTH_HELP,
    IDENTITY_HELP,
    IDENTITY_SHOW_HELP,
    IMPORT_HELP,
    INIT_HELP,
    INVITE_HELP,
    JOIN_HELP,
    LAB_HELP,
    LIST_HELP,
    PREPARE_HELP,
    REPORT_HELP,
    RUN_HELP,
    SEED_HELP,
    SHOW_HELP,
    STATUS_HELP,
    SWARM_HELP,
    TOKENIZER_HELP,
    TOP_HELP,
    TRAIN_TOKENIZER_HELP,
    VALIDATE_HELP,
    WATCH_HELP,
)
from noloco_node.cli.node_options import (
    doctor_arguments,
    doctor_settings,
    node_arguments,
    node_overrides,
    own_text_argument,
    seed_arguments,
    seed_settings,
    set_argument,
    sizing_arguments,
)
from noloco_node.cli.printing import (
    print_fingerprint,
    print_finished,
    print_lab_plan,
    print_plan,
    print_result,
    print_run,
    print_seed,
    print_sized_plan,
)
from noloco_node.cli.simulating import SIMULATE_HELP, simulate_arguments
from noloco_node.cli.small import (
    completed,
    completion_arguments,
    health_arguments,
    init_arguments,
    list_arguments,
)
from noloco_node.cli.tokenizers import train_arguments
from noloco_node.cli.views import top_arguments, watch_arguments
from noloco_node.collector import loading
from noloco_node.errors import EXIT_MEANINGS, ExitCode, UserError

if TYPE_CHECKING:
    from noloco_node.config.node_settings import NodeSettings
    from noloco_node.telemetry.events import NodeStopped

DISK_REFUSES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
"""What a system says of a disk that is full or must not be written: nothing that a defect of this program could be."""
READS_ENVIRONMENT = frozenset({"swarm", "run", "join", "seed", "doctor", "show", "validate"})
"""Commands that take settings of `node:` from variables."""
ORPHAN_SECONDS = 30.0
"""Time that a daemon of a local swarm has to end in order after its launcher has vanished: nobody waits for it, and one
that is killed on a busy machine leaves its sockets behind."""


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
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = completed(parser())  # a shell that asks how the line goes on gives no arguments
    if not given:
        commands.print_help(sys.stderr)
        return int(ExitCode.USAGE)
    options = commands.parse_args(given)
    options.arguments = given
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
    except OSError as error:
        if error.errno not in DISK_REFUSES:
            _report_failure(error, debug=options.debug)
            return int(ExitCode.FAILURE)
        where = f" ('{error.filename}')" if error.filename else ""
        print(f"noloco-node: the disk refuses what is to be written{where}: {error.strerror}", file=sys.stderr)
        print("  remedy: make room there, or choose a folder on another disk", file=sys.stderr)
        return int(ExitCode.RUN_FOLDER)
    except Exception as error:  # noqa: BLE001 - the last resort: a person sees one screen, the report gets the rest
        refused = refused_memory(error)
        if refused is not None and not options.debug:
            print(f"noloco-node: {_no_memory(refused)}", file=sys.stderr)
            return int(ExitCode.CHECK_FAILED)
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
    node_arguments(run)
    run.set_defaults(call=_run)
    join = _command(commands, "join", "join a run with the address of one of its nodes", JOIN_HELP)
    join.add_argument("initial_peers", metavar="ADDRESS", nargs="*", default=None, help="address that a node printed")
    set_argument(join, "node.device=cuda")
    own_text_argument(join)
    node_arguments(join)
    join.set_defaults(call=_join)
    status_arguments(_command(commands, "status", "show what a node does and what it has contributed", STATUS_HELP))
    report_arguments(_command(commands, "report", "make a page and pictures out of a run folder", REPORT_HELP))
    export_arguments(_command(commands, "export", "make one model out of what nodes have saved", EXPORT_HELP))
    eval_arguments(_command(commands, "eval", "say what a model is worth on the run's held-out text", EVAL_HELP))
    generate_arguments(
        _command(commands, "generate", "let a model continue a text: exported, or while it trains", GENERATE_HELP)
    )
    _text_commands(commands)
    health_arguments(_command(commands, "health", "ask this machine's node whether it is alive", HEALTH_HELP))
    top_arguments(_command(commands, "top", "watch one node in this terminal", TOP_HELP))
    watching = "watch a whole swarm in this terminal, without joining it"
    watch_arguments(_command(commands, "watch", watching, WATCH_HELP))
    seed = _command(commands, "seed", "hold a run's directory together, without a stage", SEED_HELP)
    seed_arguments(seed)
    seed.set_defaults(call=_seed)
    doctor = _command(commands, "doctor", "check this machine and its network", DOCTOR_HELP)
    doctor_arguments(doctor)
    doctor.set_defaults(call=_doctor)
    lab = _command(commands, "lab", "compare algorithms on simulated replicas", LAB_HELP)
    _config_arguments(lab)
    lab.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the results go")
    lab.set_defaults(call=_lab)
    simulate_arguments(_command(commands, "simulate", "run a swarm in virtual time", SIMULATE_HELP))
    _identity_commands(_command(commands, "identity", "look at, back up or bring back an identity", IDENTITY_HELP))
    invite = _command(commands, "invite", "invite somebody to a run that you own", INVITE_HELP)
    _config_arguments(invite)
    invite.add_argument("--key", metavar="FILE", type=Path, required=True, help="the owner's private key")
    invite.add_argument("--peer", metavar="ID", help="the only node that may use it (default: whoever holds it)")
    invite.add_argument("--hours", metavar="N", type=float, default=168.0, help="how long it holds (default: a week)")
    invite.set_defaults(call=_invite)
    _config_commands(_command(commands, "config", "look at a configuration file, or write one", CONFIG_HELP))
    completion_arguments(_command(commands, "completion", "complete commands in your shell", COMPLETION_HELP))
    return top


def _text_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    data = _command(commands, "data", "work on a text that is done once, before a run", DATA_HELP)
    actions = data.add_subparsers(title="actions", metavar="ACTION", required=True)
    prepare = _command(actions, "prepare", "tokenise a text once, for runs to read", PREPARE_HELP)
    _config_arguments(prepare)
    prepare_arguments(prepare)
    tokenizer = _command(commands, "tokenizer", "make a tokenizer for a run", TOKENIZER_HELP)
    actions = tokenizer.add_subparsers(title="actions", metavar="ACTION", required=True)
    train = _command(actions, "train", "learn a tokenizer from a run's text", TRAIN_TOKENIZER_HELP)
    _config_arguments(train)
    train_arguments(train)


def _config_commands(config: argparse.ArgumentParser) -> None:
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = _command(actions, "show", "print every setting with its value and meaning", SHOW_HELP)
    _config_arguments(show)
    show.set_defaults(call=_show)
    validate = _command(actions, "validate", "check a configuration and print what it comes to", VALIDATE_HELP)
    _config_arguments(validate)
    sizing_arguments(validate)
    validate.set_defaults(call=_validate)
    init_arguments(_command(actions, "init", "write an example with comments", INIT_HELP))
    list_arguments(_command(actions, "list", "name the configurations that come with noloco-node", LIST_HELP))


def _identity_commands(identity: argparse.ArgumentParser) -> None:
    actions = identity.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = _command(actions, "show", "print peer id, permissions, and who uses it", IDENTITY_SHOW_HELP)
    show.add_argument("file", metavar="FILE", type=Path, nargs="?", help="identity file")
    show.set_defaults(call=_identity_show)
    export = _command(actions, "export", "write an encrypted copy", EXPORT_IDENTITY_HELP)
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
        epilog=f"{ENVIRONMENT_HELP}\n\n{_exit_codes()}" if name in READS_ENVIRONMENT else _exit_codes(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--debug", action="store_true", help="on an unexpected failure show the whole traceback")
    return command


def _config_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, or a name from `config list`")
    set_argument(command, "run.inner.learning_rate=3e-3")
    own_text_argument(command)


def _swarm(options: argparse.Namespace) -> int:
    from noloco_node.config.load import load_config

    config = load_config(options.config, options.set, os.environ)
    print_plan(config)
    from rich.console import Console

    from noloco_node.launch.local_run import run_local_swarm

    folder: Path = options.run_folder or Path("runs") / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    result = run_local_swarm(config, folder, Console())
    print_result(result)
    if result.exit_code is ExitCode.INTERRUPTED:
        print(f"the same command with --run-folder {folder} goes on from here")
    return int(result.exit_code)


def _run(options: argparse.Namespace) -> int:
    _tie_to_launcher(options)
    from noloco_node.config.load import load_config
    from noloco_node.node.early_checks import check_peers, check_trainable
    from noloco_node.node.way_out import bounded_way_out
    from noloco_node.storage.private_folder import leave_shared_folder
    from noloco_node.telemetry.early_pages import early_pages

    config = load_config(options.config, node_overrides(options), os.environ)
    check_peers(config.node)
    looked = bool(options.end_with_stdin)  # whoever started it has looked already
    if options.devices:
        if not looked:
            check_trainable(config)
        return _on_devices(options, config.node)
    with bounded_way_out() as way_out, early_pages(config.node) as web:
        if not looked:
            check_trainable(config)
        with loading():
            from noloco_node.node.daemon import run_node

        try:
            return _exit_code(way_out.run(run_node(config.run, config.node, web, way_out)))
        finally:
            if options.end_with_stdin:
                leave_shared_folder()


def _join(options: argparse.Namespace) -> int:
    _tie_to_launcher(options)
    from noloco_node.config.load import load_join
    from noloco_node.node.early_checks import check_own_data, check_peers
    from noloco_node.node.way_out import bounded_way_out
    from noloco_node.telemetry.early_pages import early_pages

    config = load_join(node_overrides(options), os.environ)
    check_own_data(config.run.data)
    check_peers(config.node, joins=not options.devices)
    if options.devices:
        return _on_devices(options, config.node)
    with bounded_way_out() as way_out, early_pages(config.node) as web:
        with loading():
            from noloco_node.node.daemon import join_node

        return _exit_code(way_out.run(join_node(config.run, config.node, print_run, web, way_out)))


def _on_devices(options: argparse.Namespace, settings: NodeSettings) -> int:
    from noloco_node.launch.device_group import run_devices

    return run_devices(options.arguments, options.devices, settings, lambda line: print(line, flush=True))


def _seed(options: argparse.Namespace) -> int:
    from noloco_node.node.early_checks import check_peers
    from noloco_node.node.way_out import bounded_way_out

    run, settings = seed_settings(options)
    check_peers(settings)
    with bounded_way_out() as way_out:
        with loading():
            from noloco_node.node.seed import run_seed

        way_out.run(run_seed(run, settings, print_seed, way_out))
    return int(ExitCode.INTERRUPTED)


def _doctor(options: argparse.Namespace) -> int:
    settings = doctor_settings(options)
    with loading():
        import uvloop

        from noloco_node.diagnostics.doctor import as_json, examine, lines
        from noloco_node.node.checks import CheckOutcome

    checks = uvloop.run(examine(settings))
    print(json.dumps(as_json(checks), indent=2) if options.json else "\n".join(lines(checks)))
    return int(ExitCode.CHECK_FAILED if any(c.outcome is CheckOutcome.FAIL for c in checks) else ExitCode.OK)


def _exit_code(stopped: NodeStopped) -> int:
    endings = {"target_reached": ExitCode.OK, "interrupted": ExitCode.INTERRUPTED, "failed": ExitCode.FAILURE}
    return int(endings[stopped.reason])


def _lab(options: argparse.Namespace) -> int:
    from noloco_node.config.load import load_config
    from noloco_node.laboratory.course import command_line, run_lab

    config = load_config(options.config, options.set)
    print_lab_plan(config)
    command = command_line(options.config, options.out, options.set)
    files = run_lab(config, options.out, command, print_finished)
    for name, path in files.items():
        print(f"{name:<30} {path}")
    return int(ExitCode.OK)


def _invite(options: argparse.Namespace) -> int:
    from noloco_node.cli.invitations import make_invitation
    from noloco_node.config.load import load_config

    run = load_config(options.config, options.set).run
    invited = make_invitation(run, options.key, peer=options.peer, hours=options.hours)
    print("\n".join(invited.lines), file=sys.stderr)
    print(invited.text)
    return int(ExitCode.OK)


def _identity_show(options: argparse.Namespace) -> int:
    from noloco_node.cli.identity import default_identity, show_identity

    print("\n".join(show_identity(options.file or default_identity(os.environ))))
    return int(ExitCode.OK)


def _identity_export(options: argparse.Namespace) -> int:
    from noloco_node.cli.identity import export_identity

    peer_id = export_identity(options.file, options.to, options.passphrase_file)
    print(f"{options.to} holds the identity of {peer_id}, encrypted")
    return int(ExitCode.OK)


def _identity_import(options: argparse.Namespace) -> int:
    from noloco_node.cli.identity import default_identity, import_identity

    target: Path = options.to or default_identity(os.environ)
    peer_id = import_identity(options.file, target, options.passphrase_file)
    print(f"{target} holds the identity of {peer_id}\nlet only one node run under it at a time")
    return int(ExitCode.OK)


def _show(options: argparse.Namespace) -> int:
    from noloco_node.config.load import load_config, render

    config = load_config(options.config, options.set, os.environ)
    print(f"# run id: {config.run.run_id}\n{render(config)}", end="")
    return int(ExitCode.OK)


def _validate(options: argparse.Namespace) -> int:
    from noloco_node.config.load import load_config

    config = load_config(options.config, options.set, os.environ)
    print_sized_plan(config, options.device, options.uplink, options.round_trip)
    print_fingerprint(config.run)
    if "lab" in config.model_fields_set:
        print_lab_plan(config)
    print(f"{options.config} is valid")
    return int(ExitCode.OK)


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


def _no_memory(error: BaseException) -> UserError:
    return UserError(
        ExitCode.CHECK_FAILED,
        f"memory: this process asked for more than it may have ({str(error)[:200] or type(error).__name__})",
        "raise its limit (ulimit -v says it), close other programs, or serve a smaller stage with --stage",
    )


def _report_failure(error: Exception, *, debug: bool) -> None:
    """One screen for a person; the traceback to the log where stderr is one, else to a file."""
    text = "".join(traceback.format_exception(error))
    print(f"noloco-node: an unexpected failure: {type(error).__name__}: {str(error)[:500]}", file=sys.stderr)
    if debug or not sys.stderr.isatty():
        print(text, file=sys.stderr)
        return
    try:
        handle, path = tempfile.mkstemp(prefix="noloco-node-failure-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:  # the disk is full, perhaps: then the screen must hold it
        print(text, file=sys.stderr)
        return
    print(f"  this is a defect of noloco-node: please report it, with {path}", file=sys.stderr)


def _exit_codes() -> str:
    rows = [f"  {code.value:>3}  {meaning}" for code, meaning in EXIT_MEANINGS.items()]
    return "\n".join(["exit codes:", *rows])
