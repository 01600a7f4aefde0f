"""The device that a node computes on: what `node.device` names, or the one that is there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from noloco_node.errors import ExitCode, UserError

AUTO = "auto"
"""CUDA where there is a device of it, else the processor."""


def resolve_device(name: str) -> str:
    """The name of a torch device for `node.device`: `auto` is settled by what torch finds, another name is itself."""
    if name != AUTO:
        return name
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() else "cpu"


def describe_device(name: str) -> str:
    """What `node.device` comes to on this machine, in one line."""
    chosen = resolve_device(name)
    if chosen.partition(":")[0] == "cuda":
        return f"node.device {name}: {chosen}, {torch.cuda.get_device_name(torch.device(chosen))}"
    if name != AUTO:
        return f"node.device {name}"
    if torch.version.cuda is None and torch.version.hip is None:
        return "node.device auto: cpu, since this torch is built without CUDA; for a GPU install a torch with CUDA"
    return "node.device auto: cpu, since torch finds no CUDA device; in a container, --gpus all shows it the GPUs"


def free_cached_memory(name: str) -> None:
    """Give the memory that nothing on the device uses any more back to other programs."""
    if resolve_device(name).partition(":")[0] == "cuda":
        torch.cuda.empty_cache()


def idle_gpu(name: str, root: Path = Path("/")) -> tuple[str, str] | None:
    """Why `auto` computes on the processor of a machine that has an NVIDIA GPU, and what to do; None where it does not,
    or where there is none to be seen. `root` of the system's files."""
    if name != AUTO or resolve_device(name) != "cpu":
        return None
    shown = any(root.glob("dev/nvidia[0-9]*"))
    if not shown and not any(root.glob("proc/driver/nvidia/gpus/*")):
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA", "install a torch with CUDA"
    if not shown:
        return "it is not shown to this container", "start the container with --gpus all"
    built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        built = f"{str(error).splitlines()[0]} ({built})"
    return built, "update the machine's driver, or install a torch that is built for an older CUDA"


PEAK_TFLOP_PER_SECOND = {
    "B200": {"bf16": 2250.0, "fp32": 80.0},
    "H200 NVL": {"bf16": 835.5, "fp32": 60.0},
    "H200": {"bf16": 989.4, "fp32": 66.9},
    "H100 PCIe": {"bf16": 756.5, "fp32": 51.2},
    "H100 NVL": {"bf16": 835.5, "fp32": 60.0},
    "H100": {"bf16": 989.4, "fp32": 66.9},
    "A100": {"bf16": 312.0, "fp32": 19.5},
    "A40": {"bf16": 149.7, "fp32": 37.4},
    "A10G": {"bf16": 70.0, "fp32": 35.0},
    "A10": {"bf16": 125.0, "fp32": 31.2},
    "L40S": {"bf16": 362.0, "fp32": 91.6},
    "L40": {"bf16": 181.0, "fp32": 90.5},
    "L4": {"bf16": 121.0, "fp32": 30.3},
    "RTX 6000 Ada": {"bf16": 364.2, "fp32": 91.1},
    "RTX A6000": {"bf16": 154.8, "fp32": 38.7},
    "RTX 5090": {"bf16": 209.5, "fp32": 104.8},
    "RTX 4090": {"bf16": 165.2, "fp32": 82.6},
    "RTX 4080 SUPER": {"bf16": 104.4, "fp32": 52.2},
    "RTX 4080": {"bf16": 97.5, "fp32": 48.7},
    "RTX 4070 Ti SUPER": {"bf16": 88.2, "fp32": 44.1},
    "RTX 4070 Ti": {"bf16": 80.2, "fp32": 40.1},
    "RTX 4070 SUPER": {"bf16": 71.0, "fp32": 35.5},
    "RTX 4070": {"bf16": 58.3, "fp32": 29.1},
    "RTX 4060 Ti": {"bf16": 44.1, "fp32": 22.1},
    "RTX 4060": {"bf16": 30.2, "fp32": 15.1},
    "RTX 3090 Ti": {"bf16": 80.0, "fp32": 40.0},
    "RTX 3090": {"bf16": 71.0, "fp32": 35.6},
    "RTX 3080 Ti": {"bf16": 68.2, "fp32": 34.1},
    "RTX 3080": {"bf16": 59.5, "fp32": 29.8},
    "RTX 3070 Ti": {"bf16": 43.5, "fp32": 21.7},
    "RTX 3070": {"bf16": 40.6, "fp32": 20.3},
    "RTX 3060 Ti": {"bf16": 32.4, "fp32": 16.2},
    "RTX 3060": {"bf16": 25.5, "fp32": 12.7},
    "V100 PCIe": {"fp32": 14.0},
    "V100": {"fp32": 15.7},
    "T4": {"fp32": 8.1},
}
"""By a part of the device's name, as its maker says: dense, without sparsity; fp32 without tensor cores, which torch
leaves aside for it."""

_KIN = frozenset(("ti", "super", "d", "nvl", "laptop", "mobile", "max"))
"""Words by which a maker tells a device from another of the same number."""
_A_PART = re.compile(r"mig|\d+[abcq]")
"""Words by which a driver tells that a device is a part of one: MIG and virtual GPUs."""


def device_name(name: str) -> str:
    """What `node.device` comes to: `cpu`, or the name of the GPU."""
    chosen = torch.device(resolve_device(name))
    return torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else chosen.type


def peak_flop_per_second(name: str, precision: str) -> float | None:
    """Of `node.device` at a precision of `inner.precision`; None where it is not known."""
    return peak_of(device_name(name), precision)


def peak_of(device: str, precision: str) -> float | None:
    """The same by the device's own name. All precisions that compute in bf16 have one peak."""
    peaks = PEAK_TFLOP_PER_SECOND.get(entry_of(device, PEAK_TFLOP_PER_SECOND) or "", {})
    peak = peaks.get(precision.partition("-")[0])
    return None if peak is None else 1e12 * peak


def entry_of(device: str, entries: Iterable[str]) -> str | None:
    """Which of these devices one is, by its own name: the entry with most of its words. None where it is none of them,
    or a kin of one, or a part of one."""
    words = _words(device)
    if any(_A_PART.fullmatch(word) for word in words):
        return None
    within = [entry for entry in entries if _words(entry) <= words]
    longest = max(within, key=lambda entry: len(_words(entry)), default=None)
    return None if longest is None or (words - _words(longest)) & _KIN else longest


def _words(name: str) -> set[str]:
    return set(re.split(r"[\s-]+", name.casefold()))


def check_device(name: str) -> None:
    """Raise UserError (CONFIG) where `node.device` is no device of this machine that torch can compute on."""
    chosen = resolve_device(name)
    try:
        device = torch.device(chosen)
    except RuntimeError:
        raise _no_device(name, "torch knows no such device") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise _no_device(name, "torch finds no CUDA device")
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise _no_device(name, f"this machine has CUDA devices 0 to {count - 1}")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise _no_device(name, f"it cannot be computed on ({reason})") from None


def _no_device(name: str, reason: str) -> UserError:
    return UserError(
        ExitCode.CONFIG,
        f"node.device is '{name}', but {reason}",
        "set node.device to auto, cpu, cuda, or cuda:N with the number of a GPU of this machine",
    )
