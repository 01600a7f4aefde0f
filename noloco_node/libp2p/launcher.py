"""Becomes p2pd, after asking the system to kill it when the node dies. Run by path, in isolated mode: stdlib only.

Usage: python -I -S launcher.py PARENT_PID P2PD ARGUMENT...
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Let the kernel send SIGKILL to this process when the thread that started it ends (Linux only).

    The parent may have died before the kernel was told: then this process ends by itself.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
