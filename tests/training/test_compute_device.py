"""Every maker's devices behind one interface: NVIDIA's, AMD's, Intel's and Apple's, none of which is here."""

from __future__ import annotations

import ast
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from noloco_node.errors import UserError
from noloco_node.model.stage import Stage, build_stage
from noloco_node.sizing.memory import free_memory
from noloco_node.training import compute_device, placing
from noloco_node.training.compute_device import (
    CUDA,
    KINDS,
    MPS,
    XPU,
    all_devices,
    check_device,
    describe_device,
    device_kind,
    device_name,
    finish,
    free_cached_memory,
    has_own_memory,
    idle_gpu,
    memory_of_device,
    new_event,
    resolve_device,
    streams_of,
)
from noloco_node.training.compute_thread import ComputeThread
from noloco_node.training.host_copies import HostCopies
from noloco_node.training.placing import place_stage
from tests.sources import nodes_of
from tests.worlds import micro_spec

PACKAGE = Path(compute_device.__file__).parent.parent
KNOWS = Path(compute_device.__file__)
WORD = re.compile(r"(cuda|xpu|mps|hip|rocm)(:.*)?")


def named_devices(path: Path) -> Iterator[str]:
    """Where a file speaks to one maker's devices: `torch.cuda`, or a device's name as a value."""
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and WORD.fullmatch(node.attr):
            yield f"{path.name}:{node.lineno} .{node.attr}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and WORD.fullmatch(node.value):
            yield f"{path.name}:{node.lineno} {node.value!r}"


def test_one_file_alone_knows_one_makers_devices_from_anothers() -> None:
    """All others ask it what a device has."""
    assert len(list(named_devices(KNOWS))) > 3, "the law sees them where they are"
    found = [each for path in sorted(PACKAGE.rglob("*.py")) if path != KNOWS for each in named_devices(path)]
    assert found == []


class Module(SimpleNamespace):
    """A module of torch for a kind of device, of which there are some."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.done = count, list[str]()

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def get_device_name(self, device: torch.device) -> str:
        return f"GPU {device.index or 0}"

    def mem_get_info(self, _device: torch.device) -> tuple[int, int]:
        return 30, 40

    def memory_allocated(self, _device: torch.device) -> int:
        return 5

    def memory_reserved(self, _device: torch.device) -> int:
        return 7

    def empty_cache(self) -> None:
        self.done.append("empty_cache")

    def synchronize(self, *device: torch.device) -> None:
        self.done.append(f"synchronize {device and device[0].type}")

    def Event(self, **options: bool) -> dict[str, bool]:
        return options


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Module]:
    """A machine with the devices that a test puts there."""
    modules = {kind.torch_name: Module(0) for kind in KINDS}
    monkeypatch.setattr(torch, "get_device_module", lambda of: modules[str(of).partition(":")[0]])
    return modules


def test_the_default_device_is_the_first_kind_that_is_there(machine: dict[str, Module]) -> None:
    """NVIDIA's and AMD's before Intel's, those before Apple's, the processor last."""
    chosen = [resolve_device("auto")]
    for name in ("mps", "xpu", "cuda"):
        machine[name].count = 2
        chosen.append(resolve_device("auto"))
    assert chosen == ["cpu", "mps", "xpu", "cuda"]
    assert all_devices() == ["cuda:0", "cuda:1"]
    assert device_name("xpu:1") == "GPU 1"


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_device_has_is_asked_of_its_kind(kind: compute_device.DeviceKind, machine: dict[str, Module]) -> None:
    """A Mac's shares the machine's memory: it is counted once. torch shows no streams of it."""
    machine[kind.torch_name].count = 1
    device = torch.device(kind.torch_name)
    own = kind is not MPS
    assert device_kind(device) is kind is device_kind("auto")
    assert has_own_memory("auto") is has_own_memory(kind.torch_name) is own
    assert memory_of_device(device) == ({"allocated": 5, "reserved": 7, "free": 30, "total": 40} if own else {})
    assert free_memory("auto").device == (30 if own else 0)
    assert (streams_of(device) is None) is (kind is MPS)
    assert new_event(machine[kind.torch_name], device, timed=True) == (
        {"enable_timing": True, "blocking": True} if kind is CUDA or kind is MPS else {"enable_timing": True}
    ), "XPU's events know no waiting asleep"
    free_cached_memory("auto")
    finish(device)
    assert machine[kind.torch_name].done == ["empty_cache", f"synchronize {kind.torch_name if own else ()}"]
    with pytest.raises(UserError, match=f"{kind.title} devices 0 to 0"):
        check_device(f"{kind.torch_name}:1")


def test_the_processor_has_none_of_it(machine: dict[str, Module]) -> None:
    """Its memory is the machine's, and nothing is waited for."""
    here = torch.device("cpu")
    assert device_kind(here) is device_kind("auto") is streams_of(here) is None
    assert not has_own_memory("auto")
    assert memory_of_device(here) == {}
    finish(here)
    free_cached_memory("auto")
    with pytest.raises(UserError, match="torch finds no XPU device"):
        check_device("xpu")
    assert machine["xpu"].done == []


def test_a_device_without_streams_is_crossed_to_all_the_same() -> None:
    """What the host reads of it piece by piece is brought to the host."""
    copies = HostCopies(torch.device("meta"))
    assert copies.ahead(torch.ones(2)) is None
    assert copies.to_device(torch.ones(2), torch.float32).device.type == "meta"
    assert copies.bring(torch.ones(2)).device.type == "meta"
    with pytest.raises(NotImplementedError, match="meta tensor"):
        copies.piece_to_host(torch.ones(2, device="meta"))


CARDS = {
    "AMD": ("0x1002", "0000:03:00.0", 24 << 30),
    "AMD's processor": ("0x1002", "0000:03:00.0", 512 << 20),
    "Intel": ("0x8086", "0000:03:00.0", None),
    "Intel's processor": ("0x8086", "0000:00:02.0", None),
    "a server's screen": ("0x1a03", "0000:02:00.0", None),
}


@pytest.mark.parametrize(
    ("card", "built", "said"),
    [
        ("AMD", {}, "is built without ROCm"),
        ("AMD", {"hip": "6.4"}, "not shown to this container"),
        ("AMD with its driver", {"hip": "6.4"}, "finds no device of it"),
        ("AMD's processor", {}, None),
        ("Intel", {}, "is built without XPU"),
        ("Intel", {"xpu": "2025"}, "finds no device of it"),
        ("Intel's processor", {}, None),
        ("a server's screen", {}, None),
    ],
)
def test_a_gpu_of_any_maker_that_lies_idle_is_told_of(
    card: str, built: dict[str, str], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the remedy; the graphics of a processor are none that anybody trains on."""
    vendor, place, memory = CARDS[card.removesuffix(" with its driver")]
    (at := tmp_path / "sys/devices" / place).mkdir(parents=True)
    (at / "vendor").write_text(vendor + "\n")
    if memory is not None:
        (at / "mem_info_vram_total").write_text(f"{memory}\n")
    (of := tmp_path / "sys/class/drm/card0").mkdir(parents=True)
    (of / "device").symlink_to(at)
    (tmp_path / "sys/class/drm/card0-HDMI-A-1").mkdir()
    if card.endswith("driver"):
        (tmp_path / "dev/kfd").mkdir(parents=True)
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, built.get(name))
    found = idle_gpu("auto", tmp_path)
    assert (found and said and said in found[0]) or found is said
    assert found is None or found[1]


def test_a_mac_whose_torch_has_no_mps_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An Intel Mac has nothing that lies idle."""
    monkeypatch.setattr(sys, "platform", "darwin")
    for processor, said in (("x86_64", None), ("arm64", "is built without MPS")):
        monkeypatch.setattr(platform, "machine", lambda processor=processor: processor)
        found = idle_gpu("auto", tmp_path)
        assert (found and found[0].partition(" ")[2].partition(" ")[2]) == said
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    assert idle_gpu("auto", tmp_path) == (
        "torch finds no MPS device",
        "update macOS, and use a Python that is built for arm64",
    )


@pytest.mark.parametrize(("built", "title"), [("hip", "ROCm"), ("xpu", "XPU")])
def test_a_torch_for_other_makers_is_not_told_to_have_no_cuda(
    built: str, title: str, machine: dict[str, Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has none, and needs none."""
    assert resolve_device("auto") == "cpu", f"no device among {list(machine)}"
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, "1" if name == built else None)
    assert describe_device("auto") == (
        f"node.device auto: cpu, since torch finds no {title} device; noloco-node doctor says why"
    )


def test_amds_devices_are_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls them cuda."""
    assert (CUDA.title, XPU.title) == ("CUDA", "XPU")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert (CUDA.title, XPU.title) == ("ROCm", "XPU")


@pytest.mark.parametrize("there", [True, False])
async def test_a_gpu_is_tried_out_before_any_microbatch(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its libraries take their memory while there is some, and its tensor cores take fp32, too. Nothing gathers, and
    the processor's setting stays."""
    monkeypatch.setattr(placing, "device_kind", lambda _device: MPS if there else None)
    monkeypatch.setattr(compute_device, "device_kind", lambda _device: MPS if there else None)
    set_to: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", set_to.append)
    shapes: list[tuple[int, ...]] = []
    forward = Stage.forward

    def seen(stage: Stage, inputs: torch.Tensor, *given: object, **more: object) -> object:
        shapes.append(tuple(inputs.shape))
        return forward(stage, inputs, *given, **more)  # pyright: ignore

    monkeypatch.setattr(Stage, "forward", seen)
    run, thread = micro_spec(stages=2), ComputeThread()
    for index in (0, 1):
        stage = build_stage(run.model, index)
        placed = await place_stage(run, stage, thread, device="cpu", wire_dtype=torch.float32)
        assert not placed.trainer.gradient.any()
        assert placed.trainer.tokens_accumulated == 0
    await thread.close()
    assert [shape[:2] for shape in shapes] == [(1, 1)] * (2 * there)
    assert set_to == ["high"] * (2 * there)
