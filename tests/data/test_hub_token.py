"""A run that a stranger wrote is fetched without the volunteer's own token, against a hub on this machine."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from datasets.splits import SplitDict, SplitInfo

from noloco_node.cli.main import parser
from noloco_node.cli.printing import print_run
from noloco_node.config import environment
from noloco_node.config.data_spec import DataSpec
from noloco_node.config.load import load_config, load_join
from noloco_node.config.pretrained import open_pretrained
from noloco_node.data.hub import hub_documents, hub_shards, revision_of
from noloco_node.data.tokenizers import load_tokenizer
from noloco_node.directory.summary import SwarmSummary
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.export import pretrained_tokenizer
from tests.hub import TOKEN, Hub, running_hub

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
NAME = "stranger/private"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that has nothing, and a user that is logged in there."""
    import datasets.config  # noqa: F401 - each library keeps where the hub is as it is loaded

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv(environment.HUB_VARIABLE, "")
    for name, value in (
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", False),
        ("HF_HUB_CACHE", str(tmp_path / "cache")),
    ):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    with running_hub() as made:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", made.url)
        template = made.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", made.url)
        yield made


def fetch_all(spec: DataSpec) -> list[str]:
    """Whatever a run has fetched from a hub, and with what words each is refused."""
    said: list[str] = []
    for fetch in (
        lambda: list(hub_documents(spec)),
        lambda: hub_shards(spec.model_copy(update={"streaming": True})),
        lambda: revision_of(spec),
        lambda: load_tokenizer(spec),
        lambda: open_pretrained(NAME),
    ):
        with pytest.raises(UserError) as refused:
            fetch()
        said.append(str(refused.value))
    with pytest.raises(OSError, match="private"):
        pretrained_tokenizer(NAME)
    return said


def test_a_run_is_fetched_without_the_users_token_unless_they_say_so(hub: Hub) -> None:
    """A stranger's run would choose among all that the volunteer may read. Refusals name the option."""
    text = f"run.data={{source: huggingface, path: {NAME}, tokenizer: {NAME}, sequence_length: 16}}"
    spec = load_config(MICRO, [text]).run.data
    assert all(environment.HUB_OPTION in words for words in fetch_all(spec))
    assert len(hub.asked) >= 6
    assert set(hub.shown) == {None}
    hub.shown.clear()
    load_join(parser().parse_args(["join", "--hub-token", "--set", "node.seed=1"]).set)
    assert not any(environment.HUB_OPTION in words for words in fetch_all(spec))
    assert set(hub.shown) == {f"Bearer {TOKEN}"}


def test_a_hub_that_nobody_reaches_is_no_defect(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library that asks has exceptions of its own, which were let through. A service manager never started a node
    again that had come up while the hub was away: its exit code said that the text could not be used."""
    spec = DataSpec(source="huggingface", path=NAME, streaming=True)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _seconds: None)
    for status, code in ((401, ExitCode.DATA), (429, ExitCode.PEERS_UNREACHABLE), (503, ExitCode.PEERS_UNREACHABLE)):
        hub.status = status
        assert codes(spec) == {code}
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert codes(spec) == {ExitCode.PEERS_UNREACHABLE}


def codes(spec: DataSpec) -> set[ExitCode]:
    """With what a node ends that wants a text of the hub."""
    found: set[ExitCode] = set()
    for fetch in (revision_of, hub_shards):
        with pytest.raises(UserError) as refused:
            fetch(spec)
        found.add(refused.value.exit_code)
    return found


def test_who_joins_is_told_what_comes_from_the_hub_and_that_no_token_goes_there(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is fetched; a run that takes nothing from there says nothing of it."""
    spec = load_config(MICRO, [f"run.data.tokenizer={NAME}"]).run
    nobody = SwarmSummary(0.0, 49_152, (0,) * spec.stages, 0.0)
    print_run(spec, nobody)
    assert "from the hub      its tokenizer, without your token; --hub-token sends it" in capsys.readouterr().out
    load_config(MICRO, ["node.hub_token=true"])
    print_run(spec.model_copy(update={"data": DataSpec(source="huggingface", path=NAME, sequence_length=16)}), nobody)
    assert "from the hub      its text, with your own token (--hub-token)" in capsys.readouterr().out
    print_run(load_config(MICRO).run, nobody)
    assert "from the hub" not in capsys.readouterr().out
    assert not hub.asked


def test_a_private_dataset_that_the_library_kept_here_is_no_strangers_to_choose(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library falls back to what it kept where the hub refuses."""
    kept = tmp_path / "kept" / "stranger___private" / "default" / "0.0.0" / "abc"
    made = datasets.Dataset.from_dict({"text": ["my diary"]})
    made.save_to_disk(str(tmp_path / "made"))
    kept.mkdir(parents=True)
    shutil.copy(next((tmp_path / "made").glob("*.arrow")), kept / "private-train.arrow")
    splits = SplitDict({"train": SplitInfo("train", num_examples=1, dataset_name="private")})
    info = datasets.DatasetInfo(features=made.features, splits=splits)
    info.builder_name, info.dataset_name, info.config_name, info.version = "parquet", "private", "default", "0.0.0"
    info.write_to_directory(str(kept))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr("datasets.builder.config.HF_DATASETS_CACHE", str(tmp_path / "kept"))
    with pytest.raises(UserError, match=environment.HUB_OPTION):
        list(hub_documents(DataSpec(source="huggingface", path=NAME)))
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _seconds: None)
    hub.status = 429
    assert [each.text for each in hub_documents(DataSpec(source="huggingface", path=NAME))] == ["my diary"]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert [each.text for each in hub_documents(DataSpec(source="huggingface", path=NAME))] == ["my diary"]
