"""`benchmarks.gpu` runs on the processor as it does on a GPU, and says in one line that there is none."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import NO_DEVICE, length_of, main, waits
from noloco_node.training.host_copies import HostCopies

SMALL = ("--hidden", "64", "--layers", "1", "--length", "16", "--windows", "1", "--seconds", "0.01", "--rounds", "1")


def test_the_same_code_runs_small_on_the_processor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rates, waits and a trace; nothing is said of a device that is not there."""
    out, trace = tmp_path / "gpu.json", tmp_path / "trace.json"
    asked = ("--device", "cpu", *SMALL, "--precisions", "fp32", "bf16", "--no-daemons")
    assert main([*asked, "--out", str(out), "--trace", str(trace)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["precision"] for row in found["alone"]] == ["fp32", "bf16"]
    for row in found["alone"]:
        assert row["tokens_per_second"] > 0.0
        assert row["mfu"] is None
        assert 0 < row["waits_a_microbatch"] <= 4
    assert set(found["trace"].values()) == {None}
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert "| fp32 |" in capsys.readouterr().out


def test_waits_for_copies_are_counted_beside_those_that_torch_warns_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for an event is none of these."""
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    copies = HostCopies(torch.device("cpu"))

    def work() -> None:
        copies.to_host(torch.ones(1))
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    assert waits(torch.device("cuda"), copies, work) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is one")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """With an exit code of its own."""
    assert main([]) == NO_DEVICE
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "torch finds no CUDA device; --device cpu" in told


def test_copies_beside_computing_are_counted_once() -> None:
    """Spans that overlap, touch, lie within each other, and lie apart."""
    assert length_of([]) == 0.0
    assert length_of([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6), (3.0, 4.0)]) == 5.0
