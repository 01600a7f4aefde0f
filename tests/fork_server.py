"""Processes of tests that run a module of this project are forked from one that has imported what a daemon imports.

The imports take some three seconds of CPU a process, and the suite starts hundreds. What a test starts with
`subprocess` or asyncio as `python -m noloco_node ...` is the real command in a process of its own. It is a child of the
process that started it: signals, exit code, session, files, environment and folder are as they would be. Only its
modules are in memory when it begins.

Anything else is spawned as ever. That is other programs, `python -c`, what asks for an environment that libraries read
when they are imported, and tests marked `spawned`. It is also everything where NOLOCO_TESTS_SPAWN is set or the system
is not Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from noloco_node.config import environment
from noloco_node.process_memory import loading

MODULES = (
    *("noloco_node", "tests.chaos.paced_node", "tests.chaos.hostile_node", "tests.daemons.patient_node"),
    *("tests.daemons.hung_node", "tests.daemons.paced_peer", "tests.says_itself", "tests.training.fake_device"),
)
"""What is forked: these, run as `python -m`."""
LAUNCHES = ("swarm", "--devices")
"""Words of commands that start daemons of their own: those are forked, too."""
FREE = (
    *("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "PYTEST_CURRENT_TEST", "PYTEST_VERSION"),
    *("PWD", "OLDPWD", "_", "TZ", environment.HUB_VARIABLE),
)
"""Variables of which no library takes note when it is imported, or which a command sets by itself; those of this
project neither."""
SPAWN = "NOLOCO_TESTS_SPAWN"
NETWORK = "--net="
CLONE_NEWNET = 0x40000000
"""The flag of setns(2) for a network namespace."""
SET_PARENT_DEATH_SIGNAL = 1
"""The option of prctl(2) by which a process gets a signal when its parent ends."""
SET_CHILD_SUBREAPER = 36
"""The option of prctl(2) by which orphans below this process become its children."""
LENGTH = 8
"""Bytes before a request, its length."""


class Request(NamedTuple):
    """What one process is to be."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    new_session: bool
    network: str
    """The network namespace, a file; the own one where this is empty."""


def known(words: Sequence[str]) -> tuple[list[str], str] | None:
    """Module and arguments of a command line that the server knows, and the network namespace that `nsenter` shall
    enter before; None for any other."""
    network = ""
    if len(words) >= 2 and words[0] == "nsenter" and words[1].startswith(NETWORK):
        network, words = words[1].removeprefix(NETWORK), words[2:]
    if len(words) < 3 or list(words[:2]) != [sys.executable, "-m"] or words[2] not in MODULES:
        return None
    return list(words[2:]), network


def environment_of_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """What libraries may have looked at when they were imported."""
    return {name: text for name, text in environment.items() if not name.startswith("NOLOCO_") and name not in FREE}


class Client:
    """Asks a server for processes. It is started by the first request, or given."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self.on = True
        self._connection = connection
        self._server: subprocess.Popen[Any] | None = None
        self._environment = environment_of_imports(os.environ)
        self._lock = threading.Lock()

    def takes(self, environment: Mapping[str, str]) -> bool:
        """True if a process with this environment can be forked."""
        return self.on and environment_of_imports(environment) == self._environment

    def fork(self, request: Request, files: Sequence[int]) -> int:
        """Start a process with these three standard files; its id. It is a child of this process."""
        with self._lock:
            connection = self._connection = self._connection or self._start()
            text = json.dumps(request).encode()
            _adopt_orphans(True)
            try:
                socket.send_fds(connection, [len(text).to_bytes(LENGTH, "big")], files)
                connection.sendall(text)
                answer = connection.recv(LENGTH)
            finally:
                _adopt_orphans(False)
        if len(answer) < LENGTH:
            raise RuntimeError("the process that tests fork from has ended: what it says is above")
        return int.from_bytes(answer, "big")

    def _start(self) -> socket.socket:
        """The connection to a new server, which ends with this process."""
        ours, theirs = socket.socketpair()
        with theirs, Path(os.devnull).open("r+b") as nothing:
            command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())]
            self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=nothing, stdout=nothing)
        return ours


class Popen(subprocess.Popen[Any]):
    """Forks what the server knows, and spawns the rest."""

    client: Client | None = None

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        startupinfo: Any,
        creationflags: Any,
        shell: Any,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: Any,
        gid: Any,
        gids: Any,
        uid: Any,
        umask: Any,
        start_new_session: Any,
        process_group: Any,
    ) -> None:
        words = list(map(os.fsdecode, args)) if isinstance(args, list | tuple) else []
        given = os.environ if env is None else env
        environment = {os.fsdecode(name): os.fsdecode(text) for name, text in given.items()}
        odd = preexec_fn or pass_fds or shell or gid or gids or uid or umask != -1 or process_group != -1
        usual = not odd and close_fds and restore_signals and executable is None
        pipes = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        wanted = known(words) if usual and self.client and self.client.takes(environment) else None
        if self.client is None or wanted is None:
            more = (gid, gids, uid, umask, start_new_session, process_group)
            asked = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
            super()._execute_child(*asked, *pipes, restore_signals, *more)  # type: ignore[misc]
            return
        request = Request(wanted[0], environment, os.fspath(cwd or Path.cwd()), bool(start_new_session), wanted[1])
        own = [file if file != -1 else number for number, file in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = self.client.fork(request, own)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def possible() -> bool:
    """False where every process is spawned."""
    return sys.platform == "linux" and not os.environ.get(SPAWN)


def install(client: Client) -> None:
    """From now on this process's children are asked for there, where that can be. Where it cannot, nothing changes."""
    if possible():
        Popen.client = client
        subprocess.Popen = Popen  # type: ignore[misc]


@contextlib.contextmanager
def spawning() -> Iterator[None]:
    """Nothing is forked in the block."""
    client = Popen.client
    if client is None:
        yield
        return
    before, client.on = client.on, False
    try:
        yield
    finally:
        client.on = before


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Workers that this process starts in the block (`noloco_node/workers.py`) are forked from it, where that can
    be: what they import is in memory already."""
    forking = multiprocessing.get_context("fork")
    before = multiprocessing.get_context
    if possible():
        multiprocessing.get_context = lambda _=None: forking  # type: ignore[assignment]
    try:
        yield
    finally:
        multiprocessing.get_context = before


def end_with_its_parent() -> None:
    """This process ends as soon as its parent does, whatever ended that."""
    _system("prctl", SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


def _adopt_orphans(wanted: bool) -> None:
    """Whether processes below this one whose parent ends become its children."""
    _system("prctl", SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def _system(name: str, *arguments: int) -> None:
    """A call of the system. OSError where it is refused."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), name)


def _received(connection: socket.socket) -> tuple[Request, list[int]] | None:
    """The next request and its files; None once the asking process has ended."""
    head, files, _, _ = socket.recv_fds(connection, LENGTH, 3)
    if not head:
        return None
    length, text = int.from_bytes(head, "big"), b""
    while len(text) < length:
        text += connection.recv(length - len(text))
    return Request(*json.loads(text)), files


def serve(connection: socket.socket) -> Request | None:
    """Fork what is asked for, until the asking process has ended (None). In a forked process it returns what that is to
    be."""
    while True:
        received = _received(connection)
        if received is None:
            return None
        request, files = received
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            # This process ends at once, and the one that it forks becomes a child of the asking process.
            middle = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            while os.getppid() == middle:
                time.sleep(0.0005)
            connection.close()
            os.close(told)
            _become(request, files)
            os.write(tell, os.getpid().to_bytes(LENGTH, "big"))
            os.close(tell)
            return request
        for file in (tell, *files):
            os.close(file)
        os.waitpid(between, 0)
        connection.sendall(os.read(told, LENGTH))
        os.close(told)


def _become(request: Request, files: Sequence[int]) -> None:
    """Be as a process that was spawned with this would be."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request.new_session:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    terminal = os.isatty(1)  # the stream that is there has learnt of another file whether it can be sought in
    sys.stdout = open(1, "w", encoding=sys.stdout.encoding, buffering=1 if terminal else -1, closefd=False)  # noqa: SIM115
    if request.network:
        with Path(request.network).open("rb") as namespace:
            _system("setns", namespace.fileno(), CLONE_NEWNET)
    os.environ.clear()
    os.environ.update(request.environment)
    time.tzset()
    tempfile.tempdir = None
    os.chdir(request.folder)
    sys.path[0] = request.folder


def fork_a_server() -> tuple[socket.socket, int]:
    """A process that forks from this one as it is now, without threads or loop: its connection and its id. It ends
    once the connection is closed."""
    ours, theirs = socket.socketpair()
    server = os.fork()
    if server == 0:
        ours.close()
        _live_as_a_server(theirs)
    theirs.close()
    return ours, server


def _live_as_a_server(connection: socket.socket) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        # What whoever started this process left open goes to no child of it: `subprocess` closes it, too.
        with contextlib.suppress(OSError):
            if number > 2 and os.get_inheritable(number):
                os.close(number)
    os.close(nothing)
    request = serve(connection)
    if request is None:
        os._exit(0)
    _run(request.arguments)


def _with_its_own_server() -> None:
    """What this process starts is forked from it as it is now."""
    ours, server = fork_a_server()
    install(Client(ours))
    exit_at_once = os._exit

    def exit_after_the_server(code: int) -> NoReturn:
        # A test that looks for processes that are left after this one would see it.
        ours.close()
        os.waitpid(server, 0)
        exit_at_once(code)

    os._exit = exit_after_the_server


def _run(arguments: Sequence[str]) -> NoReturn:
    """What `python -m` does with these words."""
    module, *words = arguments
    if any(word in words for word in LAUNCHES):
        _with_its_own_server()
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    else:
        code = None
    # As `noloco_node.cli.main.entry` does, and for its reason: the modules are not taken down one by one.
    if isinstance(code, str):
        print(code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def load() -> None:
    """What daemons and most other commands import."""
    import uvloop  # noqa: F401
    from hivemind.utils.multiaddr import Multiaddr
    from transformers.models.llama import modeling_llama  # noqa: F401

    from noloco_node.diagnostics.doctor import examine  # noqa: F401
    from noloco_node.exporting.write import export  # noqa: F401
    from noloco_node.launch.device_group import run_devices  # noqa: F401
    from noloco_node.launch.local_swarm import LocalSwarm  # noqa: F401
    from noloco_node.node import early_checks  # noqa: F401
    from noloco_node.node.daemon import run_node  # noqa: F401
    from noloco_node.node.seed import run_seed  # noqa: F401

    Multiaddr("/ip4/127.0.0.1/tcp/1").to_bytes()  # with the first address it imports what reads addresses


def main() -> None:
    """The server, and each process that is forked from it."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with loading():
        load()
    request = serve(connection)
    if request is not None:
        _run(request.arguments)


if __name__ == "__main__":
    main()
