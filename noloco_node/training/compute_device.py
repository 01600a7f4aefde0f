"""The device that a node computes on: what `node.device` names, or the one that is there.

This is the only file that knows one maker's devices from another's. All else asks here what a device has.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from noloco_node.errors import ExitCode, UserError

AUTO = "auto"
"""The first kind of `KINDS` of which there is a device, else the processor."""
PROCESSOR = "cpu"
BUILT_IN = "0000:00:02.0"
"""Intel's processors show their graphics at this place, and torch computes on few of them."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device beside the processor, as torch names it, and what its devices have."""

    torch_name: str
    makers_name: str
    own_memory: bool = True
    """Else it shares the machine's, and what lies there is planned once."""
    streams: bool = True
    """Whether copies run beside the computing, by streams and by memory that is never paged out."""
    waits_asleep: bool = True
    """Whether an event can be waited for without a core that is kept busy."""

    @property
    def title(self) -> str:
        """For a person. torch names AMD's devices as it names NVIDIA's."""
        return "ROCm" if self is CUDA and torch.version.hip else self.makers_name

    @property
    def count(self) -> int:
        module = torch.get_device_module(self.torch_name)
        return int(module.device_count()) if module.is_available() else 0


CUDA = DeviceKind("cuda", "CUDA")
XPU = DeviceKind("xpu", "XPU", waits_asleep=False)
MPS = DeviceKind("mps", "MPS", own_memory=False, streams=False)
KINDS = (CUDA, XPU, MPS)
"""All kinds, in the order in which `auto` looks for them."""


def device_kind(device: torch.device | str) -> DeviceKind | None:
    """The kind of a device, or of what a setting names; None for the processor and for what torch has no such device
    of."""
    word = device.type if isinstance(device, torch.device) else resolve_device(device).partition(":")[0]
    return next((kind for kind in KINDS if kind.torch_name == word), None)


def resolve_device(name: str) -> str:
    """The name of a torch device for `node.device`: `auto` is settled by what torch finds, another name is itself."""
    return name if name != AUTO else next((kind.torch_name for kind in KINDS if kind.count), PROCESSOR)


def all_devices() -> list[str]:
    """The names of all devices of the kind that `auto` takes; none where that is the processor."""
    kind = device_kind(AUTO)
    return [] if kind is None else [f"{kind.torch_name}:{index}" for index in range(kind.count)]


def device_name(name: str) -> str:
    """What `node.device` comes to: `cpu`, or the name of the GPU."""
    chosen, kind = torch.device(resolve_device(name)), device_kind(name)
    if kind is MPS:
        return f"Apple GPU ({platform.machine()})"
    return chosen.type if kind is None else str(torch.get_device_module(chosen).get_device_name(chosen))


def has_own_memory(name: str) -> bool:
    """Whether what lies on `node.device` takes none of the machine's memory."""
    kind = device_kind(name)
    return kind is not None and kind.own_memory


def memory_of_device(device: torch.device) -> dict[str, int]:
    """Bytes of a device's memory: allocated and reserved by this process, free and total. Empty where it has none of
    its own."""
    kind = device_kind(device)
    if kind is None or not kind.own_memory:
        return {}
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    reserved, allocated = module.memory_reserved(device), module.memory_allocated(device)
    return {"allocated": allocated, "reserved": reserved, "free": free, "total": total}


def free_cached_memory(name: str) -> None:
    """Give the memory that nothing on the device uses any more back to other programs."""
    if device_kind(name) is not None:
        torch.get_device_module(resolve_device(name)).empty_cache()


def finish(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device_kind(device) is not None:
        module = torch.get_device_module(device)
        module.synchronize(*(() if device.type == MPS.torch_name else (device,)))


def streams_of(device: torch.device) -> Any:
    """torch's module with the streams and events of such a device; None where copies run with the computing."""
    kind = device_kind(device)
    return torch.get_device_module(device) if kind is not None and kind.streams else None


def new_event(streams: Any, device: torch.device, *, timed: bool = False) -> Any:
    """An event of such a module, which threads wait for asleep where the device lets them."""
    kind = device_kind(device)
    asleep = {"blocking": True} if kind is None or kind.waits_asleep else {}
    return streams.Event(enable_timing=timed, **asleep)


def use_tensor_cores(device: torch.device) -> None:
    """Let products of fp32 on a GPU run on its tensor cores. Their sums stay fp32, and what goes in has ten bits
    (TF32). Without it fp32 is several times slower there. A process has one such setting, so the processor's stays."""
    if device_kind(device) is not None:
        torch.set_float32_matmul_precision("high")


def describe_device(name: str) -> str:
    """What `node.device` comes to on this machine, in one line."""
    if device_kind(name) is not None:
        return f"node.device {name}: {resolve_device(name)}, {device_name(name)}"
    if name != AUTO:
        return f"node.device {name}"
    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    found = next((title for title, version in built.items() if version is not None), None)
    if found is None:
        return "node.device auto: cpu, since this torch is built without CUDA; for a GPU install a torch with CUDA"
    remedy = "in a container, --gpus all shows it the GPUs" if found == "CUDA" else "noloco-node doctor says why"
    return f"node.device auto: cpu, since torch finds no {found} device; {remedy}"


def idle_gpu(name: str, root: Path = Path("/")) -> tuple[str, str] | None:
    """Why `auto` computes on the processor of a machine that has a GPU, and what to do. None where it does not, or
    where there is none to be seen. `root` of the system's files."""
    if name != AUTO or resolve_device(name) != PROCESSOR:
        return None
    looks: tuple[Callable[[Path], tuple[str, str] | None], ...] = (_idle_nvidia, _idle_amd, _idle_intel, _idle_apple)
    return next((found for look in looks if (found := look(root))), None)


def _idle_nvidia(root: Path) -> tuple[str, str] | None:
    shown = any(root.glob("dev/nvidia[0-9]*"))
    if not shown and not any(root.glob("proc/driver/nvidia/gpus/*")):
        return None
    if torch.version.cuda is None:
        return _built_without("CUDA")
    if not shown:
        return "it is not shown to this container", "start the container with --gpus all"
    built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        built = f"{str(error).splitlines()[0]} ({built})"
    return built, "update the machine's driver, or install a torch that is built for an older CUDA"


def _idle_amd(root: Path) -> tuple[str, str] | None:
    sizes = [_text(card / "mem_info_vram_total") for card in _cards(root, "0x1002")]
    # AMD's processors show their graphics as a card, too. They set aside less of the machine's memory than this.
    if not any(size.isdigit() and int(size) >= (4 << 30) for size in sizes):
        return None
    if torch.version.hip is None:
        return _built_without("ROCm")
    if not (root / "dev/kfd").exists():
        return "it is not shown to this container", "start the container with --device /dev/kfd --device /dev/dri"
    found = f"torch {torch.__version__} is built for ROCm {torch.version.hip} and finds no device of it"
    return found, "add this user to the groups render and video, or install a torch for the ROCm of the driver"


def _idle_intel(root: Path) -> tuple[str, str] | None:
    if all(card.resolve().name == BUILT_IN for card in _cards(root, "0x8086")):
        return None
    if torch.version.xpu is None:
        return _built_without("XPU")
    found = f"torch {torch.__version__} is built for XPU and finds no device of it"
    return found, "install Intel's compute runtime (Level Zero), and add this user to the group render"


def _idle_apple(_root: Path) -> tuple[str, str] | None:
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return None
    if not torch.backends.mps.is_built():
        return _built_without("MPS")
    return "torch finds no MPS device", "update macOS, and use a Python that is built for arm64"


def _built_without(what: str) -> tuple[str, str]:
    return f"torch {torch.__version__} is built without {what}", f"install a torch with {what} (pytorch.org says how)"


def _cards(root: Path, vendor: str) -> Iterator[Path]:
    """Where the system tells of each card of a vendor."""
    devices = (card / "device" for card in sorted(root.glob("sys/class/drm/card*")))
    return (device for device in devices if _text(device / "vendor") == vendor)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def check_device(name: str) -> None:
    """Raise UserError (CONFIG) where `node.device` is no device of this machine that torch can compute on."""
    try:
        device = torch.device(resolve_device(name))
    except RuntimeError:
        raise _no_device(name, "torch knows no such device") from None
    if (kind := device_kind(device)) is not None:
        if not kind.count:
            raise _no_device(name, f"torch finds no {kind.title} device")
        if (device.index or 0) >= kind.count:
            raise _no_device(name, f"this machine has {kind.title} devices 0 to {kind.count - 1}")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise _no_device(name, f"it cannot be computed on ({reason})") from None


def _no_device(name: str, reason: str) -> UserError:
    return UserError(
        ExitCode.CONFIG,
        f"node.device is '{name}', but {reason}",
        "set node.device to auto, cpu, cuda (NVIDIA or AMD), xpu (Intel), mps (Apple), or cuda:N with a GPU's number",
    )
