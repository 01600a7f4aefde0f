"""What Git LFS and git-annex leave in place of a large file, as long as nobody has fetched it."""

from __future__ import annotations

_BEGINNINGS = (
    b"version https://git-lfs.github.com/spec/",
    b"version https://hawser.github.com/spec/",
    b"/annex/objects/",
)
_MOST_BYTES = 1024
"""The most bytes of a pointer, as Git LFS itself bounds it."""
POINTER = "it is a pointer of Git LFS (or of git-annex) and not the file itself"
FETCH = "fetch the file with `git lfs pull` (or `git annex get`) in its repository, or download it"


def is_pointer(content: bytes) -> bool:
    """Whether the first bytes of a file, all where it is that small, are such a pointer."""
    return len(content) <= _MOST_BYTES and content.startswith(_BEGINNINGS)
