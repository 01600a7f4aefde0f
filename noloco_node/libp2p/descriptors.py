"""The share of its allowed descriptors that p2pd has open. Without any left it takes no new peer, and says nothing."""

from __future__ import annotations

import logging
import resource

import psutil

logger = logging.getLogger(__name__)

SHORT = 0.9
"""Newcomers may find no place from this share in use on."""
RELAXED = 0.7
"""Below this share the shortage is over; it is reported anew when it comes again."""


class DescriptorWatch:
    """Says once that p2pd has hardly a descriptor left, until that is over."""

    def __init__(self) -> None:
        self.short = False

    def look(self, used: int, limit: int) -> None:
        """`used` of `limit` are open now."""
        if self.short and used < RELAXED * limit:
            self.short = False
            logger.warning("p2pd has descriptors to spare again: %d of %d are open", used, limit)
        elif not self.short and used >= SHORT * limit:
            self.short = True
            logger.warning(
                "p2pd has %d of %d descriptors open, so hardly anybody can connect any more: somebody may be opening "
                "connections without end. Raise the limit before the start (ulimit -n 65536, LimitNOFILE, --ulimit "
                "nofile), and have the firewall limit new connections for each address (docs/operations.md)",
                used,
                limit,
            )


def descriptors_of(pid: int) -> tuple[int, int] | None:
    """How many a process has open, and how many it may have; None where that cannot be told."""
    if not hasattr(resource, "prlimit"):  # macOS
        return None
    try:
        soft, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = psutil.Process(pid).num_fds()
    except (OSError, psutil.Error):
        return None
    return None if soft == resource.RLIM_INFINITY else (used, soft)
