"""The files that come along are what their names say: parameters, memory, the paper's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from noloco_node.config.files import find_config, shipped_configs
from noloco_node.config.load import load_config
from noloco_node.sizing.advice import expect
from noloco_node.sizing.devices import device_by_name
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.memory import GIB, planned_memory, program_bytes
from noloco_node.sizing.preflight import plan
from noloco_node.sizing.screen import NAMES
from noloco_node.sizing.utilisation import Link

PAPER = {"125m": (125e6, 0.5e6), "1.3b": (1.3e9, 1e6), "6.8b": (6.8e9, 2e6)}
"""Parameters as the name says, and the batch."""
PUBLISHED = {"125m": (3072, 309.9e6), "1.3b": (8192, 2.135e9), "6.8b": (16384, 9.639e9)}
"""Size of the feed-forward part of the published code's model of that name, and parameters."""


@pytest.mark.parametrize(
    "name", [name for name in shipped_configs() if not name.startswith("lab/") and name != "sim/hunt"]
)
def test_every_file_for_nodes_fits_together(name: str) -> None:
    """Model, stages, batch and bytes; nothing of it needs the text."""
    config = load_config(Path(name))
    assert plan(config).parameters > 0


@pytest.mark.parametrize("name", [name for name in shipped_configs() if name.startswith(("consumer", "paper", "own"))])
def test_products_are_as_wide_as_tensor_cores_want_them(name: str) -> None:
    """A width that is no multiple of 64 leaves a part of a GPU idle in each product."""
    model = load_config(Path(name)).run.model.config
    assert [size for size in ("hidden_size", "intermediate_size", "vocab_size") if int(str(model[size])) % 64] == []


@pytest.mark.parametrize("size", PAPER)
def test_the_papers_models_have_its_sizes_and_settings(size: str) -> None:
    """Parameters of all stages, both tables of tokens among them, within 1 % of the name's figure."""
    run = load_config(Path(f"paper-{size}")).run
    parameters, batch = PAPER[size]
    assert sum(footprint_of(run).parameters) == pytest.approx(parameters, rel=0.01)
    assert run.inner.global_batch_tokens == pytest.approx(batch, rel=0.05)
    assert run.inner.target_tokens == 25_000 * run.inner.global_batch_tokens
    assert run.inner.warmup_tokens == 1_000 * run.inner.global_batch_tokens
    assert (run.outer.inner_steps, run.outer.alpha, run.outer.beta, run.outer.momentum) == (50, 0.5, 0.7, "local")
    assert run.data.sequence_length == 1024


@pytest.mark.parametrize("size", PAPER)
def test_the_published_codes_models_are_a_setting_away(size: str) -> None:
    """As the comment in the file says."""
    width, parameters = PUBLISHED[size]
    changes = [
        "run.model.config.vocab_size=128_002",
        f"run.model.config.intermediate_size={width}",
        "run.data.tokenizer=meta-llama/Meta-Llama-3-8B",
    ]
    text = (Path("noloco_node/configs") / f"paper-{size}.yaml").read_text(encoding="utf-8")
    assert all(f"--set {change}" in text for change in changes)
    run = load_config(Path(f"paper-{size}"), changes).run
    assert sum(footprint_of(run).parameters) == pytest.approx(parameters, rel=0.001)


@pytest.mark.parametrize("size", PAPER)
def test_the_papers_runs_read_tokens_that_others_made(size: str) -> None:
    """As the comment in the file says."""
    changes = ["run.data.path=tokens/*.parquet", "run.data.text_field=input_ids"]
    assert load_config(Path(f"paper-{size}"), changes).run.data.text_field == "input_ids"


@pytest.mark.parametrize(
    ("size", "host", "card"), [(8, 8, "RTX 4060"), (16, 12, "RTX 4080"), (24, 16, "RTX 4090")], ids=["8", "16", "24"]
)
def test_a_consumers_card_holds_a_stage_of_its_file_and_works_on_a_home_line(size: int, host: int, card: str) -> None:
    """A tenth of the card is left for CUDA and the allocator. It takes no less than a third of the card,
    or the file would waste it. With the program and all that comes and goes, the host's memory is that of a machine
    that people have. Behind 20 Mbit/s and 100 ms the card works three quarters of the time by the plan."""
    config = load_config(Path(f"consumer-{size}gb"))
    footprint = footprint_of(config.run)
    device = device_by_name(card, config.run.inner.precision)
    assert expect(config, Link(2.5e6, 0.1), device).outlook.share >= 0.75
    needs = planned_memory(config, footprint)
    assert size / 3 < max(need.on_device for need in needs) / GIB < 0.9 * size
    most = max(need.total(own_memory=True).host for need in needs)
    assert (most + program_bytes(config.node)) / GIB < host


def test_what_an_owner_begins_with_explains_itself() -> None:
    """As docs/owner.md says: a comment behind every setting, and a legend for the columns that are none."""
    lines = find_config(Path("own-text")).read_text(encoding="utf-8").splitlines()
    bare = [line for line in lines if ":" in line and "#" not in line and not line.endswith(":")]
    assert not bare
    page = (Path(__file__).parents[2] / "docs" / "owner.md").read_text(encoding="utf-8")
    for column in ("versions", "waiting", "at work", "ahead", "= device", "host"):
        assert f"`{column}`" in page
        assert column in (*NAMES, "= device", "host")
    assert "`run.data.fingerprint`" in page
