"""The installed command: parse, call, and what a person sees where that fails."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import NoReturn

from noloco_node.cli.commands import parser
from noloco_node.cli.small import completed
from noloco_node.errors import ExitCode, UserError
from noloco_node.process_memory import refused_memory

INVITATION = "noloco-invitation-"
"""The text of an invitation begins so (`identity.invitations`, which takes a while to load)."""
DISK_REFUSES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.ESTALE})
"""A system says this of a disk that is full, broken or not to be written; no defect of this program could cause it."""
PLACE_REFUSES = frozenset({errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP})
"""A system says this of a place that is another user's, or has a name that none can have."""
OTHERS_SETTINGS = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
"""Variables for servers of several processes. The metrics' library would write files there, and fail without the
folder; this node has one process that counts."""


def entry() -> NoReturn:
    """The installed command: `main`, and then an end at once. Everything that must be closed is closed by then. Taking
    torch and hivemind down module by module costs 0.8 s of CPU a process. Eight daemons that are told to stop together
    do not have that."""
    open_standard_streams()
    for name in OTHERS_SETTINGS:
        os.environ.pop(name, None)
    for number in (signal.SIGTERM, signal.SIGHUP):  # an end by these left half a model behind, or a whole one
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    code = main()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def open_standard_streams() -> None:
    """Open the null device for each standard stream that is closed, as some launchers leave them. Otherwise a socket
    gets that number, text is printed into it, and libuv aborts the process."""
    for number, mode in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, mode)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    sys.stdin = sys.stdin or open(0, closefd=False, encoding="utf-8")  # noqa: SIM115 - for the life of the process
    sys.stdout = sys.stdout or open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # a console that is not UTF-8 shows what it lacks as \\xb7
        sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportUnknownMemberType]


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
        _check_no_secret(given)
        code = int(options.call(options))
        sys.stdout.flush()  # a full disk refuses it now: an invitation that was lost looked like one that was written
        return code
    except UserError as error:
        _complain(str(error), options)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("noloco-node: interrupted", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except OSError as error:
        if not _is_refusal(error):
            _report_failure(error, debug=options.debug)
            return int(ExitCode.FAILURE)
        where = f" ('{error.filename}')" if error.filename else ""
        print(f"noloco-node: the system refuses to read or write{where}: {error.strerror}", file=sys.stderr)
        print("  remedy: make room there, do this as the user whose it is, or name another place", file=sys.stderr)
        return int(ExitCode.RUN_FOLDER)
    except Exception as error:  # noqa: BLE001 - the last resort: a person sees one screen, the report gets the rest
        refused = refused_memory(error)
        if refused is not None and not options.debug:
            print(f"noloco-node: {_no_memory(refused)}", file=sys.stderr)
            return int(ExitCode.CHECK_FAILED)
        _report_failure(error, debug=options.debug)
        return int(ExitCode.FAILURE)


def _is_refusal(error: OSError) -> bool:
    """Whether a disk or a place refuses: no defect of this program."""
    named = bool(error.filename) and error.errno in PLACE_REFUSES
    return named or error.errno in DISK_REFUSES or "temporary directory" in str(error)  # as `tempfile` says it


def _check_no_secret(arguments: Sequence[str]) -> None:
    """Raise UserError (USAGE) for an invitation among the arguments. Every user of the machine sees these, and a holder
    of an invitation to its bearer is invited."""
    if any(INVITATION in argument for argument in arguments):
        raise UserError(
            ExitCode.USAGE,
            "the invitation itself stands in the command line, where all users of this machine can read it",
            "put it into a file that only you can read and name that with --invitation FILE, or set "
            "NOLOCO_NODE_INVITATION; ask for a new one if others use this machine",
        )


def _complain(why: str, options: argparse.Namespace) -> None:
    """To stderr: for a person, or where the command's log goes there as JSON, as a line of that."""
    if getattr(options, "log_format", None) != "json":
        print(f"noloco-node: {why}", file=sys.stderr)
        return
    from noloco_node.cli.printing import start_json_log

    start_json_log("INFO")  # it may not have come to any log before, or the node's is closed
    logging.getLogger("noloco_node").error(why)


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
