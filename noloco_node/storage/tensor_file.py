"""A safetensors file that is written piece by piece, in order, with the hash of what was written.

The library's own writer wants every tensor whole in memory, and the hash of its file is a second reading of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from noloco_node.training.frozen_state import Sizes

_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def write_tensors(path: Path, sizes: Sizes, pieces: Iterable[tuple[str, int, Tensor]]) -> tuple[str, int]:
    """Write the tensors of these `sizes`, in their order, wide dtypes first. `pieces` are their numbers on the host in
    that order: name, beginning and what comes there. Returns the file's SHA-256 as hex and the bytes of its tensors.

    Raises OSError as the file system does, and whatever `pieces` raises; the file is no good then.
    """
    header, size = _header(sizes)
    digest = hashlib.sha256(header)
    written = 0
    with path.open("wb") as file:
        file.write(header)
        for _, _, piece in pieces:
            data = piece.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            file.write(data)
            digest.update(data)
            written += len(data)
    assert written == size, f"{written} bytes were given where {size} were announced"
    return digest.hexdigest(), size


def whole(tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, int, Tensor]]:
    """Tensors in memory as pieces: each is one."""
    return ((name, 0, tensor) for name, tensor in tensors.items())


def _header(sizes: Sizes) -> tuple[bytes, int]:
    entries: dict[str, object] = {}
    offset = 0
    for name, (dtype, shape) in sizes.items():
        assert offset % dtype.itemsize == 0, "wide dtypes come first, so that each number is aligned"
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offset
