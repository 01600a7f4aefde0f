"""`benchmarks.gpu` runs on the processor as it does on a GPU, and says in one line that there is none."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_checks, host_time
from benchmarks.gpu import NO_DEVICE, layout_row, main
from benchmarks.gpu_trace import UNDER_WAY, length_of, shares_of, traced
from benchmarks.gpu_waits import waits, waits_of_stages
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.training import trainer
from noloco_node.training.host_copies import HostCopies
from tests.training.late_streams import late_copies

SMALL = ("--hidden", "64", "--layers", "1", "--length", "16", "--windows", "1", "--seconds", "0.01", "--rounds", "1")


def test_the_same_code_runs_small_on_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step but the daemons, each figure a line; nothing is said of a device that is not there."""
    monkeypatch.setattr(gpu, "PRODUCT", 64)
    monkeypatch.setattr(gpu, "STEP_EVERY", 2)
    out, trace = tmp_path / "gpu.jsonl", tmp_path / "trace.json"
    asked = ("--device", "cpu", *SMALL, "--layers", "2", "--precisions", "fp32", "bf16", "--out", str(out))
    monkeypatch.setattr(gpu, "CROSSINGS", 5)
    for step in (step for step in gpu.STEPS if step != "daemons"):
        assert main([*asked, "--trace", str(trace), "--step", step]) == 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    found = {step: [row for row in rows if row["step"] == step] for step in gpu.STEPS}
    assert [row["what"] for row in found["exact"]] == ["keep", "recompute", "checkpoint", "two stages"]
    assert all(row["ok"] for row in found["exact"])
    assert [(row["what"], row["ok"]) for row in found["streams"]] == [
        ("inputs ahead", True),
        ("to the host", True),
        ("snapshot", True),
        ("snapshot", True),
    ]
    assert all("no memory of its own" in found[step][0]["left_out"] for step in ("oom", "oom_first"))
    assert all(row["flop_per_second"] > 0.0 for row in found["machine"][:2])
    assert [(row["pinned"], row["to_host_bytes_per_second"] > 0.0) for row in found["machine"][2:]] == [
        (True, True),
        (False, True),
    ]
    assert [(row["precision"], row["backward"], row["optimizer"]) for row in found["alone"]] == [
        ("fp32", "keep", "adamw"),
        ("fp32", "checkpoint", "adamw"),
        ("fp32", "checkpoint", "muon"),
        ("bf16", "keep", "adamw"),
    ]
    assert [row["backward"] for row in found["large"]] == ["keep", "checkpoint", "checkpoint"]
    assert min(row["parameters"] for row in found["large"]) > 4 * found["alone"][0]["parameters"]
    for row in (*found["alone"], *found["large"]):
        assert row["tokens_per_second"] > 0.0
        assert row["of_a_plain_loop"] > 0.0
        assert row["planned"] > 0
        assert row["mfu"] is None
        assert 0 < row["waits_a_microbatch"] <= 4
        assert row["waits_a_step"] == 1
    assert [row["what"] for row in found["codecs"]] == ["int8", "int4", "sign"]
    assert all(row["ok"] and row["step_ns"] > 0.0 and not row["beside"] for row in found["codecs"])
    assert len(found["waits"]) == 3
    for row in (*found["worker"], *found["states"][:2], *found["documents"]):
        assert row["tokens_per_second"] > 0.0
    assert [row.get("switch_s") for row in found["worker"]] == [None, 5e-3, 5e-4, None, None]
    assert [row.get("threads") for row in found["worker"]] == [None, None, None, 1, 8]
    assert all(row["arithmetic_s"] > 0.0 for row in found["worker"][3:])
    assert [row["what"] for row in found["states"]] == ["outer step alone", "checkpoint", "joiner"]
    assert found["states"][1]["took_s"] > 0.0 < found["states"][2]["taken_over_s"]
    assert [row["count"] for row in found["documents"]] == [1, 2]
    [shares] = found["trace"]
    course = shares["course"]
    assert shares["computing"] is None
    assert course["outer_steps"] == 1
    assert course["inner_steps"] >= 1
    assert course["fewest_waiting"] >= 1, "the device was kept at work; on a busy machine its callers come late"
    drawn = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert len({each["tid"] for each in drawn if each["name"] == "aten::mm"}) >= 1, "the device's thread is in it"


def test_what_a_device_has_no_room_for_is_left_out_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be refused after a minute in which its weights were drawn; nodes train in bf16 on a card."""
    options = gpu.options_of(["--device", "cpu", *SMALL])
    assert options.precisions[0] == "bf16"
    monkeypatch.setattr(gpu, "memory_of_device", lambda _device: {"free": 1 << 10})
    rows: list[tuple[str, dict[str, object]]] = []
    gpu.large(options, {}, lambda what, **found: rows.append((what, found)))
    [(what, found)] = rows
    assert what == "large"
    assert "which has 1024" in str(found["left_out"])


def test_fp32_is_measured_as_a_node_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card it was a fifteenth of what a node reaches there, beside the peak of its tensor cores."""
    asked: list[torch.device] = []
    monkeypatch.setattr(gpu, "use_tensor_cores", asked.append)
    monkeypatch.setattr(gpu, "product_flop_per_second", lambda *_: float(len(asked)))
    monkeypatch.setattr(gpu, "bus", lambda *_, **__: dict[str, float]())
    found: list[object] = []
    gpu.STEPS["machine"][1](
        gpu.options_of(["--device", "cpu"]), lambda _, **row: found.append(row.get("flop_per_second"))
    )
    assert found[:2] == [1.0, 1.0]


def test_a_device_that_is_full_refuses_a_microbatch_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told of by its figures: what is kept, and whether it goes on."""
    refuses = {"now": False}
    memory = {"free": 1 << 20, "allocated": 0}
    monkeypatch.setattr(gpu_checks, "memory_of_device", lambda _device: memory)
    empty = torch.empty
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(gpu_checks.StageTrainer, "loss", lambda *_: refuse(refuses))

    def filled(*size: Any, **kind: Any) -> torch.Tensor:
        refuses["now"] = kind.get("dtype") is torch.uint8
        return empty(*size, **kind)

    monkeypatch.setattr(torch, "empty", filled)

    def say(_what: str, **found: object) -> None:
        rows.append(found)

    gpu_checks.without_memory(small_run("run.model.stages=1"), "cpu", say, iter([1 << 10]))
    assert rows == [{"left": 1 << 10, "refused": "NoMemory", "kept_bytes": 0, "goes_on": True, "ok": True}]


def refuse(refuses: dict[str, bool]) -> None:
    """Once, after the device was filled."""
    if refuses["now"]:
        refuses["now"] = False
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_step_that_takes_too_long_or_dies_costs_no_other_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is put down as cut, and the next one begins; a time that is over begins no more."""
    sleeping = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    assert gpu.carried_out(sleeping, 0.05) == "longer than 0 s"
    assert gpu.carried_out([sys.executable, "-S", "-c", "raise SystemExit(3)"], 30.0) == "its process ended with 3"
    assert gpu.carried_out([sys.executable, "-S", "-c", ""], 30.0) == ""
    asked: list[tuple[str, float]] = []

    def carried(command: list[str], seconds: float) -> str:
        asked.append((command[-1], seconds))
        return "" if command[-1] != "oom" else "its process ended with -9"

    monkeypatch.setattr(gpu, "carried_out", carried)
    out = tmp_path / "gpu.jsonl"
    assert main(["--device", "auto", *SMALL, "--out", str(out), "--only", "oom", "exact", "--total", "60"]) != 0
    assert [step for step, _ in asked] == ["exact", "oom"]
    assert all(seconds <= 60.0 for _, seconds in asked)
    env, cut = (json.loads(line) for line in out.read_text(encoding="utf-8").splitlines())
    assert env["began_utc"] > "2026"
    assert env["torch"] == torch.__version__
    assert env["device"] == ("cpu" if not torch.cuda.is_available() else env["device"])
    assert (cut["step"], cut["what"], cut["why"]) == ("oom", "cut", "its process ended with -9")


def test_waits_for_copies_are_counted_beside_those_that_torch_warns_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for an event is none of these."""
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    copies = HostCopies(torch.device("cpu"))

    def work() -> None:
        copies.to_host(torch.ones(1))
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    assert waits(torch.device("cuda"), copies, work) == 2
    assert waits(torch.device("cpu"), copies, lambda: copies.to_host(torch.ones(1)) and torch.ones(1).item()) == 2


def small_run(*overrides: str) -> RunSpec:
    """What the smallest options come to."""
    options = gpu.options_of(["--device", "cpu", *SMALL, "--layers", "3"])
    return gpu.config_of(options, *overrides).run


def test_waits_are_counted_for_every_call_of_a_model_in_stages() -> None:
    """Forward and backward of a first and a middle stage, and the last one's loss; each waits for a copy."""
    found = waits_of_stages(small_run("run.model.stages=3"), "cpu")
    both = [f"{stage} stage, {way}" for stage in ("first", "middle") for way in ("forward", "backward")]
    assert list(found) == [*both, "last stage, loss"]
    assert all(1 <= count <= 4 for count in found.values())


async def test_what_is_traced_goes_the_way_of_a_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On its thread, with calls that wait, whose inputs come ahead, and a snapshot that crosses beside them."""
    copies, streams = late_copies(monkeypatch)
    monkeypatch.setattr(trainer, "HostCopies", lambda _device: copies)
    sent: list[str] = []
    begin = copies.begin

    def begins(*of: Any) -> None:
        sent.append(threading.current_thread().name)
        begin(*of)

    monkeypatch.setattr(copies, "begin", begins)
    run = small_run("run.model.stages=1")
    _, course = await traced(run, "cpu", tmp_path / "trace.json")
    assert set(sent) == {"copies"}
    assert course.microbatches >= UNDER_WAY
    assert 2 <= course.fewest_waiting < UNDER_WAY
    assert sum(copy.stream is streams.made[2] for copy in streams.copies) >= 2, "a snapshot and what it is corrected by"


@pytest.mark.parametrize("kind", ["CUDA", "XPU"])
def test_copies_of_a_device_within_itself_are_computing(kind: str) -> None:
    """What crosses is apart, and what crosses beside computing is told."""

    def event(name: str, start: float, end: float) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, device_type=f"DeviceType.{kind}", time_range=span)

    told = [
        event("gemm", 0.0, 4e5),
        event("Memcpy HtoD (Pinned -> Device)", 3e5, 5e5),
        event("Memcpy DtoD (Device -> Device)", 6e5, 7e5),
        SimpleNamespace(name="aten::mm", device_type="DeviceType.CPU", time_range=None),
    ]
    assert shares_of(told, 1.0) == pytest.approx({"computing": 0.5, "copying": 0.2, "copying beside computing": 0.1})


def test_a_trace_that_is_not_written_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kineto says nothing of it; an earlier trace is none of this one."""
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda *_: None)
    (tmp_path / "trace.json").write_text("an earlier one", encoding="utf-8")
    with pytest.raises(UserError, match="was not written"):
        asyncio.run(traced(small_run("run.model.stages=1"), "cpu", tmp_path / "trace.json"))


def test_nothing_of_an_earlier_look_is_left_when_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory would be counted with that of the next."""
    made: list[weakref.ref[gpu.Trained]] = []
    alive: list[int] = []

    class Watched(gpu.Trained):
        def __init__(self, run: RunSpec, device: str) -> None:
            alive.append(sum(each() is not None for each in made))
            made.append(weakref.ref(self))
            super().__init__(run, device)

    monkeypatch.setattr(gpu, "Trained", Watched)
    options = gpu.options_of(["--device", "cpu", *SMALL, "--rounds", "2", "--precisions", "fp32"])
    gpu.alone(options, dict.fromkeys((torch.float32, torch.bfloat16), 1.0), lambda *_, **__: None)
    assert alive == [0] * 6


def test_memory_is_asked_of_whoever_made_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of NVIDIA's, AMD's and Intel's by one name; of a device without memory of its own nothing is asked."""
    asked: list[str] = []
    made = SimpleNamespace(
        reset_peak_memory_stats=lambda _device: asked.append("reset"), max_memory_allocated=lambda _device: 7
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _device: made)
    run = small_run("run.model.stages=1")
    assert gpu.look(run, "cpu", 0.01)[1][2] == 0
    monkeypatch.setattr(gpu, "has_own_memory", lambda _name: True)
    assert gpu.look(run, "cpu", 0.01)[1][2] == 7
    assert asked == ["reset"]


def test_a_product_is_timed_after_the_device_has_done_what_sets_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the first one is only given to it, with all that loads."""
    order: list[str] = []
    clock = iter((0.0, 0.0, 2.0, 2.0))

    def now() -> float:
        order.append("clock")
        return next(clock)

    monkeypatch.setattr(gpu, "finish", lambda _device: order.append("finish"))
    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=now))
    gpu.product_flop_per_second(torch.device("cpu"), torch.float32, 1.0)
    assert order == ["finish", "clock", "clock", "finish", "clock", "clock"]


def test_daemons_on_one_device_are_held_against_its_peak() -> None:
    """All of them together; without a peak only against a product."""
    row = layout_row("two", [90.0, 100.0, 120.0], 2e6, 1e9, 4e8)
    assert (row.tokens_per_second, row.mfu, row.of_a_product) == (100.0, pytest.approx(0.2), pytest.approx(0.5))
    assert layout_row("two", [1.0], 2e6, None, 4e8).mfu is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--daemon-steps", "9"), "--daemon-steps is 9"),
        (("--layers", "1"), "run.model.stages"),
        (("--hidden", "130", "--layers", "2"), "head_dim"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name."""
    monkeypatch.setattr(gpu, "carried_out", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(UserError) as refused:
        main(["--device", "cpu", *SMALL, *arguments])
    assert words in refused.value.message


def test_few_steps_of_daemons_need_no_other_warm_up() -> None:
    """The run's own is longer than such a swarm."""
    options = gpu.options_of(["--device", "cpu", *SMALL, "--layers", "2", "--daemon-steps", "12"])
    for config in gpu.layouts_of(options, "fp32").values():
        assert config.run.inner.warmup_tokens < config.run.inner.target_tokens == 12 * 8 * 16


def test_a_trace_that_could_not_be_written_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """As the file of the figures is."""
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cpu", "--trace", "/nowhere/t.json"])
    assert ended.value.code == ExitCode.USAGE
    assert "--trace: '/nowhere/t.json': there is no folder" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is one")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """With an exit code of its own."""
    assert main([]) == NO_DEVICE
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "torch finds no CUDA device; --device cpu" in told


def test_what_a_microbatch_costs_the_host_is_told_by_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    """And what passes beside a thread of Python, by how often Python changes threads."""
    before = sys.getswitchinterval()
    host_time.main(["--layers", "1", "--beside", "--switch", "0.002", "0.005"])
    told = capsys.readouterr().out.splitlines()
    ways = ["keep", "recompute", "checkpoint", "plain module"]
    assert [line.split(":")[0] for line in told[:4]] == [f"1 layers, {way}" for way in ways]
    assert [line.split(":")[0] for line in told[4:]] == [f"1 layers, keep, beside Python and {ms} ms" for ms in (2, 5)]
    assert sys.getswitchinterval() == before


def test_copies_beside_computing_are_counted_once() -> None:
    """Spans that overlap, touch, lie within each other, and lie apart."""
    assert length_of([]) == 0.0
    assert length_of([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6), (3.0, 4.0)]) == 5.0
