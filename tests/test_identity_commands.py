"""`noloco-node identity`: show, export, import, and how the passphrase is asked for."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from noloco_node.cli import identity as identity_commands
from noloco_node.cli import main as cli
from noloco_node.cli.help_texts import HELP
from noloco_node.errors import ExitCode
from noloco_node.identity.keys import BACKUP_LABEL, IdentityLock, load_or_create_identity

PASSPHRASE = "correct horse battery"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """An identity file."""
    return load_or_create_identity(tmp_path / "identity.key").path


@pytest.fixture
def passphrase(tmp_path: Path) -> Path:
    """A passphrase file, as an editor leaves it."""
    path = tmp_path / "passphrase"
    path.write_text(f"{PASSPHRASE}\nsecond line\n")
    return path


def identity(*arguments: object) -> int:
    """The exit code of `noloco-node identity ...`."""
    return cli.main(["identity", *map(str, arguments)])


def test_show_says_who_where_how_safe_and_in_use(key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key that others can read gets a warning with the remedy; a running node is named."""
    peer_id = load_or_create_identity(key).peer_id
    assert identity("show", key) == 0
    shown = capsys.readouterr().out
    for words in (peer_id, str(key), "0600, for its owner only", "by no node on this machine"):
        assert words in shown
    key.chmod(0o640)
    with IdentityLock(key):
        assert identity("show", key) == 0
    shown = capsys.readouterr().out
    for words in ("0640, WARNING", f"chmod 600 {key}", f"by the process with pid {os.getpid()} on this machine"):
        assert words in shown


def test_one_that_is_made_before_the_first_start_is_the_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An owner that invites by name needs the peer id before the node has ever run. It is made once, however often
    asked."""
    path = tmp_path / "new" / "identity.key"
    assert identity("create", path) == 0
    made = capsys.readouterr().out
    assert load_or_create_identity(path).peer_id in made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert identity("create", path) == 0
    assert capsys.readouterr().out == made


def test_where_no_file_is_named_it_is_the_one_of_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help names it; the environment of the node holds for this command, too."""
    monkeypatch.chdir(tmp_path)
    created = load_or_create_identity(identity_commands.default_identity())
    assert identity("show") == 0
    assert created.peer_id in capsys.readouterr().out
    assert str(identity_commands.default_identity()) in HELP["identity show"]
    monkeypatch.setenv("NOLOCO_NODE_RUN_FOLDER", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    other = load_or_create_identity(tmp_path / "other" / "identity.key")
    assert identity("show") == 0
    assert other.peer_id in capsys.readouterr().out
    monkeypatch.setenv("NOLOCO_NODE_IDENTITY", str(identity_commands.default_identity()))
    assert identity("show") == 0
    assert created.peer_id in capsys.readouterr().out


def test_a_round_trip_gives_the_same_identity(
    tmp_path: Path, key: Path, passphrase: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes and peer id are equal; backup and new file are for the owner only; only file names and the id are shown."""
    backup, back = tmp_path / "node.pem", tmp_path / "elsewhere" / "identity.key"
    assert identity("export", key, "--to", backup, "--passphrase-file", passphrase) == 0
    assert identity("import", backup, "--to", back, "--passphrase-file", passphrase) == 0
    assert back.read_bytes() == key.read_bytes()
    assert BACKUP_LABEL in backup.read_bytes()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (backup, back)] == [0o600, 0o600]
    shown = capsys.readouterr()
    assert shown.out.count(load_or_create_identity(key).peer_id) == 2
    assert PASSPHRASE not in shown.out + shown.err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [("", "0 characters"), ("elevenchars", "fewer than 12"), ("x" * 1024, "longer than 1023 bytes")],
)
def test_an_export_refuses_a_weak_passphrase(
    tmp_path: Path, key: Path, words: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written, and the remedy is named."""
    file, backup = tmp_path / "passphrase", tmp_path / "node.pem"
    file.write_text(f"{words}\n")
    assert identity("export", key, "--to", backup, "--passphrase-file", file) == ExitCode.CONFIG
    shown = capsys.readouterr().err
    assert complaint in shown
    assert "remedy:" in shown
    assert not backup.exists()


def test_neither_way_overwrites_a_file(
    tmp_path: Path, key: Path, passphrase: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands there is left as it is, links that lead nowhere included."""
    backup, link = tmp_path / "node.pem", tmp_path / "link"
    assert identity("export", key, "--to", backup, "--passphrase-file", passphrase) == 0
    link.symlink_to(tmp_path / "nowhere")
    content = {path: path.read_bytes() for path in (key, backup)}
    for target in (key, backup, link):
        for action, source in (("export", key), ("import", backup)):
            assert identity(action, source, "--to", target, "--passphrase-file", passphrase) == ExitCode.CONFIG
            assert f"{target} exists already" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (key, backup)} == content
    assert not (tmp_path / "nowhere").exists()


def test_an_import_says_in_one_screen_why_it_fails(
    tmp_path: Path, key: Path, passphrase: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong passphrase, a file that is no backup, none at all, a passphrase file that is none: nothing is written."""
    backup, wrong, target = tmp_path / "node.pem", tmp_path / "wrong", tmp_path / "back.key"
    assert identity("export", key, "--to", backup, "--passphrase-file", passphrase) == 0
    wrong.write_text("quite another one\n")
    capsys.readouterr()
    cases = [
        (backup, wrong, ExitCode.CONFIG, "passphrase: it does not open"),
        (key, passphrase, ExitCode.CONFIG, "no encrypted private key in PEM form"),
        (tmp_path / "missing", passphrase, ExitCode.CONFIG, "No such file"),
        (tmp_path, passphrase, ExitCode.CONFIG, "Is a directory"),
        (backup, tmp_path / "missing", ExitCode.CONFIG, "passphrase_file"),
    ]
    for source, file, code, complaint in cases:
        assert identity("import", source, "--to", target, "--passphrase-file", file) == code
        shown = capsys.readouterr().err
        assert complaint in shown
        assert len(shown.splitlines()) == 2, "one line, and the remedy"
        assert not target.exists()
    under_a_file = key / "back.key"
    assert identity("import", backup, "--to", under_a_file, "--passphrase-file", passphrase) == ExitCode.RUN_FOLDER
    assert identity("export", key, "--to", under_a_file, "--passphrase-file", passphrase) == ExitCode.RUN_FOLDER


ASKER = """
from noloco_node.errors import UserError
from noloco_node.cli.identity import new_passphrase
try:
    print("got", len(new_passphrase(None)))
except UserError as error:
    print("refused", error.exit_code.name, error.message)
"""


@pytest.mark.parametrize(
    ("again", "answer"),
    [(PASSPHRASE, f"got {len(PASSPHRASE)}"), ("correct house", "refused CONFIG passphrase: the two")],
)
def test_a_terminal_is_asked_twice_and_shows_nothing(again: str, answer: str) -> None:
    """On a real terminal: two questions, no echo of either answer."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", ASKER]
    with subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True, text=True
    ) as asker:
        try:
            os.close(theirs)
            screen = ""
            for question, typed in (("for the backup: ", PASSPHRASE), ("once more: ", again)):
                while question not in screen:
                    screen += os.read(ours, 1024).decode()
                os.write(ours, f"{typed}\n".encode())
            assert asker.stdout is not None
            assert asker.stdout.read().startswith(answer)
            screen += os.read(ours, 1024).decode()
            assert "correct" not in screen
        finally:
            asker.kill()
            os.close(ours)


def test_without_a_terminal_the_passphrase_is_not_read_from_a_pipe() -> None:
    """Nothing is asked with echo; the remedy is the passphrase file."""
    answer = subprocess.run(
        [sys.executable, "-c", ASKER],
        input=f"{PASSPHRASE}\n{PASSPHRASE}\n",
        capture_output=True,
        start_new_session=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.stdout.startswith("refused USAGE passphrase: there is no terminal")
