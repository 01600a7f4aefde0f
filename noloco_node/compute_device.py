"""The device that a node computes on: what `node.device` names, or the one that is there."""

from __future__ import annotations

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
    without = torch.version.cuda is None and torch.version.hip is None
    why = "this torch is built without CUDA" if without else "torch finds no CUDA device"
    return f"node.device auto: cpu, since {why}; in a container, --gpus all shows it the GPUs"


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
