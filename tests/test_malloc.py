"""The C library is told where to take memory from: looked at in processes of their own, by its own account."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from noloco_node.malloc import CHOSEN, share_one_arena

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is nothing to tell another allocator")

THREADS_ALLOCATE = """
import ctypes, sys, tempfile, threading
from noloco_node.malloc import share_one_arena
if sys.argv[1] == "shared":
    assert share_one_arena()
libc, there, kept = ctypes.CDLL(None), threading.Barrier(5), []
def work():
    kept.append(bytearray(50_000))
    there.wait()
for _ in range(4):
    threading.Thread(target=work).start()
there.wait()
libc.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(file.read().count(b"<heap nr="))
"""


def arenas(how: str) -> int:
    """Places that four threads take memory from, in a process of its own whose environment chooses nothing."""
    environment = {name: text for name, text in os.environ.items() if name not in CHOSEN}
    command = [sys.executable, "-c", THREADS_ALLOCATE, how]
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def test_threads_take_memory_from_one_place() -> None:
    """Where nothing is told, each has its own."""
    assert arenas("shared") == 1
    assert arenas("own") > 1


@pytest.mark.parametrize("name", CHOSEN)
def test_who_starts_the_process_may_choose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "")
    assert not share_one_arena()
