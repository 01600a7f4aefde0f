"""What each codec of the outer step costs and loses: bytes, error and time for a weight; and what one of activations
takes for a number (`--activations`: these alone).

python -m benchmarks.codecs --out codecs.json

Two replicas whose φ and Δ differ by a thousandth of their weights' size exchange once through `OuterReplica`. The error
share is the mean square of what the codec adds to the difference over that of the difference, in three kinds of
differences: Gaussian; heavy tails (Student's t, ν = 4); uneven rows (the same, every 128 values times e^normal).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.command import command, parser_of, results_file, whole
from noloco_node.config.run_spec import ACTIVATION_CODECS, token_bytes
from noloco_node.outer.codec import CODECS, Codec
from noloco_node.outer.replica import OuterReplica
from noloco_node.outer.update import OuterRule
from noloco_node.outer.workplace import Accelerator
from noloco_node.pipeline.activations import decode, encode
from noloco_node.training.host_copies import HostCopies

RULE = OuterRule(0.5, 0.5, 0.5, "averaged")
KINDS = ("gaussian", "heavy tails", "uneven rows")
SPREAD = 1e-3
ROW = 128
CHUNK_BYTES = 1 << 20
EXCHANGES = 4
"""Over which the error is taken."""
TOKEN = 256
"""Numbers of a token, as in the subspace of `consumer-24gb`."""
REPEATS = 10
"""Exchanges of which the quickest counts."""


def noise(kind: str, size: int, generator: torch.Generator) -> Tensor:
    """A vector of independent differences of that kind."""
    values = torch.randn(size, generator=generator)
    if kind == "gaussian":
        return values
    values /= torch.randn(4, size, generator=generator).square().mean(0).sqrt()
    if kind == "uneven rows":
        values *= torch.randn(size // ROW, generator=generator).exp().repeat_interleave(ROW)
    return values


def pair(codec: Codec, kind: str, size: int, accelerator: Accelerator | None = None) -> list[OuterReplica]:
    """Two replicas, SPREAD apart in φ and with as much progress of their own, ready to exchange. The first one has the
    device."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(size, generator=generator)
    made: list[OuterReplica] = []
    for _ in range(2):
        slow = weights + SPREAD * noise(kind, size, generator)
        beside = None if made else accelerator
        replica = OuterReplica(RULE, slow, codec=codec, chunk_bytes=CHUNK_BYTES, accelerator=beside)
        torch.add(slow, noise(kind, size, generator), alpha=SPREAD, out=replica.snapshot)
        made.append(replica)
    return made


def exchange(
    replicas: list[OuterReplica], name: str, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """One exchange without its commit. Seconds of one side for what it sends, and for what it takes in."""
    own, other = replicas
    for replica in replicas:
        replica.open(members=2, weight=1.0, exchange=name)
    started = clock()
    own.sketch()
    sending = clock() - started
    own.agree([other.sketch()])
    other.agree([own.sketch()])
    taking = 0.0
    for index in range(own.chunks):
        wire = other.encoded_chunk(index)
        started = clock()
        own.encoded_chunk(index)
        between = clock()
        own.add_chunk(index, wire)
        taking += clock() - between
        sending += between - started
    return sending, taking


def error_share(codec: Codec, kind: str, size: int) -> float:
    """Mean square of (what was committed − the exact half difference) over that of the half difference."""
    total = 0.0
    for number in range(EXCHANGES):
        own, other = pair(codec, kind, size)
        exact = (contribution(other) - contribution(own)) / 2
        alone = own.slow.double() - own.snapshot.double() + contribution(own) - RULE.gamma * own.slow.double()
        exchange([own, other], str(number))
        found = own.commit().double() - alone
        total += float((found - exact).square().mean() / exact.square().mean()) / EXCHANGES
    return total


def contribution(replica: OuterReplica) -> Tensor:
    """s in fp64 (no momentum, equal work)."""
    slow = replica.slow.double()
    return RULE.beta * (replica.snapshot.double() - slow) + RULE.gamma * slow


def nanoseconds(codec: Codec, size: int, threads: int) -> dict[str, float]:
    """Least time for a weight over some exchanges: sent (sketch included) and taken in, on the host. With one thread
    its CPU time, so that other processes on the machine do not count; with more, the time that passes."""
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    replicas = pair(codec, "gaussian", size)
    times = [exchange(replicas, str(number), clock) for number in range(REPEATS)]
    send, take = (min(column) / size * 1e9 for column in zip(*times, strict=True))
    return {"send_ns": round(send, 2), "take_in_ns": round(take, 2)}


def on_device(codec: Codec, size: int, device: torch.device) -> dict[str, float | bool]:
    """Least time for a weight over some whole outer steps of a replica whose device does the arithmetic, where it can,
    of a vector's way there; and whether both find one difference, bit for bit."""
    accelerator = HostCopies(device).beside()
    replicas = pair(codec, "gaussian", size, accelerator)
    own, other = replicas
    times: list[float] = []
    same = True
    for number in range(EXCHANGES):
        spent = sum(exchange(replicas, str(number)))
        coding = codec.coding(str(number), size, [each.sketch() for each in replicas])
        wires = [each.encoded_chunk(0) for each in replicas]
        there = coding.difference(*(wire.to(device) for wire in wires), 0)
        same &= torch.equal(there.to("cpu"), -coding.difference(wires[1], wires[0], 0))
        began = time.perf_counter()
        own.commit()
        times.append(spent + time.perf_counter() - began)
        own.snapshot.add_(own.slow)
    began = time.perf_counter()
    other.slow.to(device, copy=True)
    crossing = time.perf_counter() - began
    return {
        "beside": accelerator is not None,
        "step_ns": round(min(times) / size * 1e9, 2),
        "there_ns": round(crossing / size * 1e9, 2),
        "ok": same,
    }


def measure(size: int) -> list[dict[str, object]]:
    """All codecs."""
    rows: list[dict[str, object]] = []
    for codec in CODECS.values():
        row: dict[str, object] = {"codec": codec.name, "bytes_per_weight": codec.wire_bytes(size) / size}
        torch.set_num_threads(1)
        row["error_share"] = {kind: float(f"{error_share(codec, kind, size):.2g}") for kind in KINDS}
        for threads in (1, 2):
            row[f"threads_{threads}"] = nanoseconds(codec, size, threads)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def of_activations(size: int) -> list[dict[str, object]]:
    """Each codec of activations: bytes of a number, and its least CPU time on one core to encode and to decode."""
    torch.set_num_threads(1)
    tensor = torch.randn(size // TOKEN, TOKEN, generator=torch.Generator().manual_seed(1))
    rows: list[dict[str, object]] = []
    for codec in ACTIVATION_CODECS:
        times: list[tuple[float, float]] = []
        for _ in range(REPEATS):
            began = time.thread_time()
            wire = encode(tensor, codec)
            between = time.thread_time()
            decode(wire, codec, torch.float32, TOKEN)
            times.append((between - began, time.thread_time() - between))
        there, back = (round(min(column) / tensor.numel() * 1e9, 1) for column in zip(*times, strict=True))
        nbytes = token_bytes(TOKEN, codec) / TOKEN
        rows.append({"codec": codec, "bytes_per_number": nbytes, "encode_ns": there, "decode_ns": back})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure and write."""
    parser = parser_of(__doc__, out=False)
    parser.add_argument("--activations", action="store_true", help="the codecs of activations alone")
    parser.add_argument("--size", type=whole, default=1 << 22, help="weights")
    parser.add_argument("--out", type=results_file, required=True)
    arguments = parser.parse_args()
    result = {
        "weights": arguments.size,
        "torch": str(torch.__version__),
        "activations": of_activations(arguments.size),
        "codecs": [] if arguments.activations else measure(arguments.size),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command(main)
