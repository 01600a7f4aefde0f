"""What the commands do that have no file of their own: call and print."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node.cli.node_options import doctor_settings, node_overrides, seed_settings
from noloco_node.cli.printing import (
    print_ended,
    print_finished,
    print_lab_plan,
    print_plan,
    print_result,
    print_run,
    print_seed,
    print_sized_plan,
    print_text,
    start_json_log,
    teller,
)
from noloco_node.errors import ExitCode
from noloco_node.process_memory import loading
from noloco_node.telemetry.words import say_asking, say_loading

if TYPE_CHECKING:
    from noloco_node.config.node_settings import NodeSettings
    from noloco_node.telemetry.events import NodeStopped


def swarm(options: argparse.Namespace) -> int:
    """Train on a swarm of nodes on this machine."""
    from noloco_node.config.load import load_config

    config = load_config(options.config, options.set, os.environ)
    say_loading()
    print_plan(config)
    from rich.console import Console

    from noloco_node.launch.local_run import run_local_swarm

    folder: Path = options.run_folder or Path("runs") / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    result = run_local_swarm(config, folder, Console())
    print_result(result)
    if result.exit_code is ExitCode.INTERRUPTED:
        print(f"the same command with --run-folder {folder} goes on from here")
    return int(result.exit_code)


def run(options: argparse.Namespace) -> int:
    """Run one node of a configuration, or one for each device."""
    _tie_to_launcher(options)
    from noloco_node.config.load import load_config
    from noloco_node.node.early_checks import check_peers, check_trainable
    from noloco_node.node.way_out import bounded_way_out
    from noloco_node.storage.held import leave_shared_folder
    from noloco_node.telemetry.node_pages import early_pages

    config = load_config(options.config, node_overrides(options), os.environ)
    options.log_format = config.node.log_format  # as main says what goes wrong from here on
    check_peers(config.node)
    say_asking(config.node.initial_peers, config.node.log_format)
    looked = bool(options.end_with_stdin)  # the launcher has looked already
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
            return _ended(way_out.run(run_node(config.run, config.node, web, way_out)), config.node)
        finally:
            if options.end_with_stdin:
                leave_shared_folder()


def join(options: argparse.Namespace) -> int:
    """Run one node, or one for each device, of a run that others have begun."""
    _tie_to_launcher(options)
    from noloco_node.config.load import load_join
    from noloco_node.node.early_checks import check_own_data, check_peers
    from noloco_node.node.way_out import bounded_way_out
    from noloco_node.telemetry.node_pages import early_pages

    config = load_join(node_overrides(options), os.environ)
    options.log_format = config.node.log_format
    check_own_data(config.run.data)
    check_peers(config.node, joins=not options.devices)
    say_asking(config.node.initial_peers, config.node.log_format)
    if options.devices:
        return _on_devices(options, config.node)
    with bounded_way_out() as way_out, early_pages(config.node) as web:
        with loading():
            from noloco_node.node.daemon import join_node

        show = partial(print_run, say=teller(config.node.log_format), settings=config.node)
        return _ended(way_out.run(join_node(config.run, config.node, show, web, way_out)), config.node)


def _on_devices(options: argparse.Namespace, settings: NodeSettings) -> int:
    from noloco_node.launch.device_group import run_devices

    if settings.log_format == "json":
        start_json_log(settings.log_level)
    return run_devices(options.arguments, options.devices, settings, teller(settings.log_format))


def seed(options: argparse.Namespace) -> int:
    """Hold a run's directory together."""
    from noloco_node.node.early_checks import check_peers
    from noloco_node.node.way_out import bounded_way_out

    run, settings = seed_settings(options)
    options.log_format = settings.log_format
    check_peers(settings)
    say_asking(settings.initial_peers, settings.log_format)
    with bounded_way_out() as way_out:
        collects = None
        with loading():
            from noloco_node.node.seed import run_seed

            if run is not None and options.model:
                from noloco_node.exporting.collecting import collect_weights as collects

        tell = partial(print_seed, model=settings.run_folder / "model", say=teller(settings.log_format))
        way_out.run(run_seed(run, settings, tell, way_out, collects))
    return int(ExitCode.INTERRUPTED)


def doctor(options: argparse.Namespace) -> int:
    """Check this machine and its network."""
    settings = doctor_settings(options)
    say_loading()
    with loading():
        import uvloop

        from noloco_node.diagnostics.doctor import as_json, examine, lines
        from noloco_node.node.checks import CheckOutcome

    checks = uvloop.run(examine(settings))
    print(json.dumps(as_json(checks), indent=2) if options.json else "\n".join(lines(checks)))
    return int(ExitCode.CHECK_FAILED if any(c.outcome is CheckOutcome.FAIL for c in checks) else ExitCode.OK)


def _ended(stopped: NodeStopped, settings: NodeSettings) -> int:
    if stopped.reason == "target_reached" and stopped.final_weights:
        print_ended(settings.run_folder, teller(settings.log_format))
    endings = {"target_reached": ExitCode.OK, "interrupted": ExitCode.INTERRUPTED, "failed": ExitCode.FAILURE}
    return int(endings[stopped.reason])


def lab(options: argparse.Namespace) -> int:
    """Compare algorithms."""
    from noloco_node.config.load import load_config

    config = load_config(options.config, options.set)
    say_loading()
    from noloco_node.laboratory.course import command_line, run_lab

    print_lab_plan(config)
    command = command_line(options.config, options.out, options.set)
    files = run_lab(config, options.out, command, print_finished)
    for name, path in files.items():
        print(f"{name:<30} {path}")
    return int(ExitCode.OK)


def invite(options: argparse.Namespace) -> int:
    """Sign an invitation."""
    from noloco_node.cli.identity import make_invitation
    from noloco_node.config.load import load_config

    run = load_config(options.config, options.set).run
    text, lines = make_invitation(run, options.key, peer=options.peer, hours=options.hours)
    print("\n".join(lines), file=sys.stderr)
    print(text)
    return int(ExitCode.OK)


def identity_show(options: argparse.Namespace) -> int:
    """Show an identity."""
    from noloco_node.cli.identity import default_identity, show_identity

    print("\n".join(show_identity(options.file or default_identity(os.environ))))
    return int(ExitCode.OK)


def identity_create(options: argparse.Namespace) -> int:
    """Make an identity, and show it."""
    from noloco_node.cli.identity import create_identity, default_identity

    print("\n".join(create_identity(options.file or default_identity(os.environ))))
    return int(ExitCode.OK)


def identity_export(options: argparse.Namespace) -> int:
    """Back an identity up."""
    from noloco_node.cli.identity import export_identity

    peer_id = export_identity(options.file, options.to, options.passphrase_file)
    print(f"{options.to} holds the identity of {peer_id}, encrypted")
    return int(ExitCode.OK)


def identity_import(options: argparse.Namespace) -> int:
    """Bring an identity back."""
    from noloco_node.cli.identity import default_identity, import_identity

    target: Path = options.to or default_identity(os.environ)
    peer_id = import_identity(options.file, target, options.passphrase_file)
    print(f"{target} holds the identity of {peer_id}\nlet only one node run under it at a time")
    return int(ExitCode.OK)


def show(options: argparse.Namespace) -> int:
    """Print every setting."""
    from noloco_node.config.load import load_config, render

    config = load_config(options.config, options.set, os.environ)
    print(f"# run id: {config.run.run_id}\n{render(config)}", end="")
    return int(ExitCode.OK)


def validate(options: argparse.Namespace) -> int:
    """Check a configuration."""
    from noloco_node.config.load import load_config

    config = load_config(options.config, options.set, os.environ)
    say_loading()
    print_sized_plan(config, options.device, options.uplink, options.round_trip)
    print_text(config, may_lack=options.device is not None)  # an owner who plans for a card may have no text yet
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
    # Nobody waits for it, and one that is killed on a busy machine leaves its sockets behind.
    time.sleep(30.0)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
