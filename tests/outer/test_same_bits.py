"""A difference has the same bits wherever it is computed, as far as a processor can show it.

It is made of operations of which IEEE 754 says every bit, and of those that only move numbers. No sum is over more than
two of them. Other sizes of pieces, more threads and other instructions of a processor change none.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from noloco_node.outer import CodecName, modulo_codes
from noloco_node.outer.codec import BLOCK, CODECS
from tests.outer.groups import vectors

THERE: list[CodecName] = [name for name, codec in CODECS.items() if codec.on_a_device]
SIZE = 37 * BLOCK + 77
EXACT = {"add", "sub", "sub_", "mul", "mul_", "div"}
"""Of two tensors, or of one and a power of two: rounded once."""
MOVED = {
    "empty",
    "empty_like",
    "view",
    "slice",
    "select",
    "transpose",
    "copy_",
    "_to_copy",
    "index",
    "index_put_",
    "masked_fill_",
    "unsqueeze",
    "detach",
}
"""Numbers, to another place."""


class Seen(TorchDispatchMode):
    """The operations that give numbers which are not whole."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves(made)):
            self.names.add(name := func.overloadpacket.__name__)
            if name in EXACT:
                assert float((kwargs or {}).get("alpha", 1)) == 1.0, "a product is added with one rounding or with two"
        return made


def wires(name: CodecName) -> tuple[Any, list[Tensor]]:
    """A coding, and a chunk of two that lie close together."""
    codec = CODECS[name]
    own, apart, pull = vectors(3, torch.float32, 5, SIZE)
    values = [own, own + 0.01 * apart]
    coding = codec.coding("e", SIZE, [codec.sketch("e", each) for each in values])
    return coding, [coding.encode(each, 0, pull) for each in values]


@pytest.mark.parametrize("name", THERE)
def test_a_difference_is_made_of_exact_operations(name: CodecName) -> None:
    """Of those alone: neither a product of matrices nor a sum over many."""
    coding, (own, other) = wires(name)
    with Seen() as seen:
        coding.difference(other, own, 0)
    assert seen.names <= EXACT | MOVED, seen.names - EXACT - MOVED
    assert {"add", "sub"} <= seen.names


@pytest.mark.parametrize("name", THERE)
def test_sizes_of_pieces_and_threads_change_nothing(name: CodecName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the codes that travel nor of the difference."""
    found: list[list[Tensor]] = []
    before = torch.get_num_threads()
    try:
        for blocks, threads in ((128, 1), (3, 1), (2048, 2)):
            monkeypatch.setattr(modulo_codes, "_BLOCKS_IN_CACHE", blocks)
            torch.set_num_threads(threads)
            coding, (own, other) = wires(name)
            found.append([own, other, coding.difference(other, own, 0)])
    finally:
        torch.set_num_threads(before)
    for each in found[1:]:
        assert all(torch.equal(one, first) for one, first in zip(each, found[0], strict=True))


def told(name: CodecName) -> str:
    """What is made of codes that are the same everywhere."""
    coding, (own, other) = wires(name)
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(0, 256, own.shape, generator=generator, dtype=torch.uint8) for _ in (own, other)]
    for each in made:
        if name == "sign":  # scales are numbers of a usual size
            motion = each[3 * BLOCK // 2 :].view(-1, BLOCK // 8 + 2)
            motion[:, -2:] = torch.full((len(motion), 1), 0.37, dtype=torch.bfloat16).view(torch.uint8)
    coding = CODECS[name].coding("e", SIZE, [torch.arange(8.0).repeat(64)[: len(s)] for s in _sketches(name)])
    return hashlib.sha256(coding.difference(made[0], made[1], 0).numpy().tobytes()).hexdigest()


def _sketches(name: CodecName) -> list[Tensor]:
    return [CODECS[name].sketch("e", torch.zeros(SIZE)), CODECS[name].sketch("e", torch.ones(SIZE))]


def test_other_instructions_of_the_processor_change_nothing() -> None:
    """Without vectors and without products that are added with one rounding: as another kind of machine computes."""
    here = [told(name) for name in THERE]
    asked = "from tests.outer.test_same_bits import THERE, told; print(*map(told, THERE))"
    plain = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    there = subprocess.run([sys.executable, "-c", asked], check=True, capture_output=True, text=True, env=plain)
    assert there.stdout.split() == here
