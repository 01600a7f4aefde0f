"""A report tells what the event files tell: the summary's figures, `status`' words, and no stranger's markup."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean

import pytest

from noloco_node.cli import main as cli
from noloco_node.diagnostics.status import status_lines
from noloco_node.errors import ExitCode, UserError
from noloco_node.report import figures
from noloco_node.report.folder import Chronicle, Moment, read_folder
from noloco_node.report.page import make_report, page
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import Account, AnyEvent, Doing, P2pdRestarted, StateSourceFailed, Warned
from noloco_node.telemetry.history import NodeHistory
from noloco_node.telemetry.summary import throughput_curve, token_counters
from tests.telemetry import made_events as made
from tests.telemetry.made_events import write

NOW = 1121.0
RUDE = "<script>alert(1)</script><img src=x onerror=alert(2)> \x1b[31m$\\frac{1}{2}$ \"'&"
TAGS = {
    *("html", "head", "meta", "link", "title", "style", "body", "main", "section", "h1", "h2", "p", "div", "span"),
    *("b", "i", "svg", "text", "line", "polyline", "circle", "table", "thead", "tbody", "tr", "th", "td", "ol", "li"),
    "time",
}


def swarm_in(folder: Path) -> Path:
    """The made-up run, whose four nodes lie in this folder."""
    for name, events in made.whole_run().items():
        write(folder / name, *events)
    return folder


def row_of(shown: str, node: str) -> list[str]:
    """A node's cells in the table of nodes."""
    rows = re.findall(r"<tr>(.*?)</tr>", shown, re.DOTALL)
    cells = [[unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row, re.DOTALL)] for row in rows]
    return next(row for row in cells if row and row[0] == node)


def counted(counts: Sequence[figures.Count]) -> dict[str, int]:
    """Faults by name."""
    return {count.what: count.times for count in counts}


@pytest.mark.parametrize("below", ["nodes", "."])
def test_the_figures_are_the_summarys_and_those_of_status(below: str, tmp_path: Path) -> None:
    """A local swarm's nodes lie in `nodes`, those of a machine's devices side by side."""
    swarm_in(tmp_path / below)
    told = read_folder(tmp_path, NOW)
    assert told.summary == made.summarize(made.whole_run())
    shown, lines = page(told), status_lines(tmp_path, NOW)
    for tile in (f"{told.summary.tokens:,}", f"{told.summary.tokens_per_second:,.0f}"):
        assert f"<b>{tile}</b>" in shown
    assert (
        f"<b>{told.summary.training_loss:.4f}</b><span>training loss, mean of the last 5 % of the tokens</span>"
        in shown
    )
    assert "<th>training loss, last inner step</th>" in shown
    for node in made.NAMES:
        name, stage, share, loss, held_out, steps, rounds, stage_peers, now = row_of(shown, node)
        (line,) = (line for line in lines if line.split()[0] == name)
        assert f"stage {stage}, {share}, training loss {loss}; {now}" in line
        own = "\n".join(status_lines(tmp_path / below / node, NOW))
        assert held_out == "–" if stage == "1" else f"validation loss   {held_out} nats/token" in own
        part = told.summary.per_node[node]
        assert (steps, rounds) == (str(part.inner_steps), str(told.summary.outer_steps_taken[node]))
        assert stage_peers == str(told.summary.distinct_partners[node])
    met = [(row.stage, row.one, row.other, row.times) for row in figures.meetings(told)]
    assert met == [(0, "s0-r0", "s0-r1", 6), (1, "s1-r0", "s1-r1", 6)]
    assert "<tr><td>1</td><td>s1-r0</td><td>s1-r1</td><td>6</td></tr>" in shown
    assert counted(figures.faults(told)) == {
        "refusals given: busy": 20,
        "microbatches tried again": 16,
        "microbatches requeued": 12,
        "microbatches asked for again after their answer broke off": 4,
    }


def test_a_refusal_of_who_has_no_stage_is_told_in_words(tmp_path: Path) -> None:
    """Others ask a node that is paused, which refuses as unknown what only its stage answers."""
    for name, events in made.whole_run().items():
        refused = {"refused": {"unknown_method": 16}}
        write(tmp_path / name, *(e.model_copy(update=refused) if isinstance(e, Account) else e for e in events))
    told = counted(figures.faults(read_folder(tmp_path, NOW)))
    assert told["refusals given: not served then, as while joining or paused"] == 64


def test_the_merged_loss_of_a_finished_run_is_that_of_its_summary(tmp_path: Path) -> None:
    """No event tells it; a summary that is torn or another's tells nothing."""
    swarm_in(tmp_path / "nodes")
    (tmp_path / "summary.json").write_text(
        json.dumps(made.summarize(made.whole_run(), 1.6).as_json()), encoding="utf-8"
    )
    told = read_folder(tmp_path, NOW)
    assert told.summary.as_json() == json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert "1.6000" in page(told)
    (tmp_path / "summary.json").write_text("{", encoding="utf-8")
    assert read_folder(tmp_path, NOW).summary.validation_loss_merged is None


def test_speeds_along_the_time_have_the_mean_of_the_summary() -> None:
    """Whatever the width of the stretches; a time in which the whole swarm was down is no part of any."""
    events = made.whole_run()
    later = [made.started("s0-r0").model_copy(update={"time": 1700.0})]
    later += [made.inner_step(step, time=1700.0 + 1.5 * step) for step in range(1, 30)]
    events["s0-r0"] = [*events["s0-r0"][:-1], *later]
    histories = [NodeHistory.of(name, rows) for name, rows in events.items()]
    summary = made.summarize(events)
    for points in (1, 7, 120):
        curve = throughput_curve(token_counters(histories), points)
        assert sum(point.seconds for point in curve) == pytest.approx(summary.seconds)
        tokens = sum(point.seconds * point.tokens_per_second for point in curve)
        assert tokens / summary.seconds == pytest.approx(summary.tokens_per_second)
    assert throughput_curve([]) == []


def test_where_nobody_trained_or_looked_no_line_goes_on(tmp_path: Path) -> None:
    """A straight line bridged the time in which all were off, and the dashed one went on over it."""

    def life(name: str, begin: float, seconds: int) -> list[AnyEvent]:
        steps = [made.inner_step(step, time=begin + step) for step in range(1, seconds)]
        looks = [made.account(time=begin + at) for at in (1.0, float(seconds))]
        return [made.started(name).model_copy(update={"time": begin}), *steps, *looks]

    write(tmp_path / "s0-r0", *life("s0-r0", 1000.0, 100), *life("s0-r0", 1300.0, 100))
    write(tmp_path / "s1-r0", *life("s1-r0", 1600.0, 100))
    told = read_folder(tmp_path, NOW)
    speed, seen = figures.throughput(told).lines
    axis = figures.TimeAxis.of(told.chronicles)
    rates = dict(speed.points)
    assert all(rates[at] == 0.0 for at in rates if axis.at(1110.0) < at < axis.at(1290.0))
    assert any(axis.at(1110.0) < at < axis.at(1290.0) for at in rates)
    assert all(rates[at] > 0.0 for at in rates if at < axis.at(1090.0) or axis.at(1310.0) < at < axis.at(1399.0))
    assert speed.points[-2:] == ((axis.at(1399.0), 0.0), (axis.end, 0.0))
    assert [(piece[0][0], piece[-1][0]) for piece in seen.pieces] == [
        (axis.at(begin + 1.0), axis.at(begin + 100.0)) for begin in (1000.0, 1300.0)
    ]
    assert page(told).count('stroke-dasharray="5 4"') == 3, "two pieces, and the learning rate"
    with RunFolder(tmp_path / "s0-r0").lock():
        (speed, _) = figures.throughput(read_folder(tmp_path, NOW)).lines
    assert speed.points[-1][1] > 0.0, "who runs may train on"


def test_a_node_of_a_later_stage_counts_its_own_tokens(tmp_path: Path) -> None:
    """A volunteer's folder holds one node, seldom of stage 0."""
    write(tmp_path, *made.node_events("s1-r0"))
    told = read_folder(tmp_path, NOW)
    assert told.summary.tokens == made.STEPS * made.TOKENS
    assert figures.losses(told).lines[0].points
    assert figures.spread(told).lines[1].label == "learning rate"
    (met,) = figures.meetings(told)
    assert (met.stage, met.times) == (1, 6)


def test_nodes_whose_long_names_begin_alike_are_two(tmp_path: Path) -> None:
    """Both had the figures of the last one."""
    names = [f"{'a-name-as-long-as-a-folder-may-well-have-it':s}-{number}" for number in (1, 2)]
    for name, node in zip(names, ("s0-r0", "s1-r0"), strict=True):
        write(tmp_path / name, *made.node_events(node))
    told = read_folder(tmp_path, NOW)
    assert list(told.summary.per_node) == names
    assert [row_of(page(told), name)[1] for name in names] == ["0", "1"]


def test_a_folder_with_nodes_of_several_runs_is_refused_by_their_names(tmp_path: Path) -> None:
    """One report of them all had the name of one and the tokens of another."""
    swarm_in(tmp_path)
    other = made.started("s0-r0").model_copy(update={"run_id": "f" * 32, "run_name": "another"})
    write(tmp_path / "a-node-of-another", other)
    with pytest.raises(UserError) as refused:
        read_folder(tmp_path, NOW)
    assert refused.value.exit_code is ExitCode.RUN_FOLDER
    assert "2 runs: another, " in refused.value.message


def test_who_met_whom_is_told_at_the_stage_at_which_they_met(tmp_path: Path) -> None:
    """A node that had averaged at stage 0 and then moved was drawn with the same partners at stage 1."""
    rows = list(made.node_events("s0-r0"))
    last = rows[-1].time
    moved = made.moved(time=last, from_stage=0, stage=1)
    write(tmp_path / "nodes" / "a-mover", *rows[:-1], moved)
    (met,) = figures.meetings(read_folder(tmp_path, NOW))
    assert (met.stage, met.times) == (0, 6)


def test_a_folder_in_which_training_goes_on(tmp_path: Path) -> None:
    """One node runs, one died, one's last line is half written, one is not up yet: each is told as it is."""
    for name in made.NAMES[:3]:
        write(tmp_path / "nodes" / name, *list(made.node_events(name))[:30])
    with RunFolder(tmp_path / "nodes" / "s0-r1").events.open("ab") as file:
        file.write(b'{"time":1090.0,"event":"inner_st')
    write(tmp_path / "nodes" / "s1-r1", Doing(what="joining", detail="joining", since=1000.0, time=1000.0))
    with RunFolder(tmp_path / "nodes" / "s0-r0").lock():
        told = read_folder(tmp_path, NOW)
    assert told.running == {"s0-r0"}
    assert told.passed_over == 0
    shown = page(told)
    assert "The training goes on" in shown
    assert "1 of the nodes run." in shown
    assert row_of(shown, "s1-r1")[1:3] == ["–", "–"]
    assert "gone without a last word" in row_of(shown, "s0-r1")[-1]
    assert counted(figures.faults(told))["ended without a last word"] == 2


def test_folders_of_which_nothing_can_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with its reason, and a remedy; nothing is written."""

    def refusal(path: Path) -> str:
        with pytest.raises(UserError) as caught:
            make_report(path)
        assert caught.value.exit_code is ExitCode.RUN_FOLDER
        assert not (path / "report").exists()
        return str(caught.value)

    assert "no node has run there" in refusal(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "events.jsonl").touch()
    assert "no node has been up there" in refusal(tmp_path / "empty")
    other = write(tmp_path / "other", made.started("s0-r0")) / "events.jsonl"
    line = json.loads(other.read_text(encoding="utf-8")) | {"version": "7.1.0"}
    del line["stage"]
    other.write_text(json.dumps(line, separators=(",", ":")) + "\n", encoding="utf-8")
    assert "are of noloco-node 7.1.0" in refusal(tmp_path / "other")
    good = write(tmp_path / "good", made.started("s0-r0"))
    (good / "taken").touch()
    with pytest.raises(UserError, match="the report cannot be written to"):
        make_report(good, good / "taken")
    assert cli.main(["report", str(tmp_path / "empty")]) == ExitCode.RUN_FOLDER
    assert "remedy: try again when one is" in capsys.readouterr().err


class Tags(HTMLParser):
    """Collects what a browser would take for markup."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: set[str] = set()
        self.loads: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One more."""
        self.found.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.loads |= {value or "" for name, value in attrs if name in ("href", "src", "action", "xlink:href")}


def test_words_of_strangers_are_words_on_the_page(tmp_path: Path) -> None:
    """Run names, partners, reasons, details. The page loads nothing."""
    name = "s0-$x$<b>"
    started = made.started("s0-r0").model_copy(update={"run_name": RUDE, "run_id": RUDE, "version": RUDE})
    events: list[AnyEvent] = [
        started,
        *(made.inner_step(step) for step in range(1, 21)),
        made.outer_step(1, "s0-r1").model_copy(update={"partner": RUDE[:31]}),
        made.outer_step(2, None, kind="aborted", reason=RUDE),
        Warned(what="stage_lost", detail=RUDE, time=1005.0),
        StateSourceFailed(source=RUDE, reason=RUDE, time=1006.0),
        made.account(refused={RUDE: 3}),
        made.stopped("s0-r0").model_copy(update={"detail": RUDE}),
    ]
    report = make_report(write(tmp_path / name, *events), tmp_path / "out", NOW)
    text = report.page.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert tags.found <= TAGS
    assert not {name for name in tags.attributes if name.startswith("on")}
    assert tags.loads == {"data:,"}
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 7
    assert "\x1b" not in text
    assert "<title" in text
    assert "http" not in text.replace("http-equiv", "")
    assert [path.name for path in report.page.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan, 1e308, -1e30, 5e-324])
def test_numbers_that_no_node_writes_have_no_place_on_an_axis(odd: float, tmp_path: Path) -> None:
    """Their lines are passed over, and counted; losses and norms may have gone beyond all measure."""
    good = list(made.node_events("s0-r0"))
    bad: list[AnyEvent] = [
        made.inner_step(61, time=odd),
        made.inner_step(61, clock=odd),
        made.outer_step(7, "s0-r1", learning_rate=odd),
        made.account(busy_by_work={"forward": odd}),
        made.started("s0-r0").model_copy(update={"time": odd}),
        Doing(what="training", detail="", since=odd, time=1001.0),
    ]
    write(tmp_path / "s0-r0", *good[:20], *bad, *good[20:])
    write(tmp_path / "s0-r1", made.inner_step(1, loss=math.inf, gradient_norm=math.nan), *made.node_events("s0-r1"))
    told = read_folder(tmp_path, NOW)
    assert told.passed_over == len(bad)
    shown = page(told)
    assert f"{len(bad)} lines hold no event that this version writes" in shown
    assert not re.search(r"\b(nan|inf)\b", shown.partition("</style>")[2])


def test_the_time_of_a_node_adds_up_over_its_lives() -> None:
    """Idle time goes to what was waited for; a new process counts from 0, and the time between two is nobody's."""

    def life(begin: float) -> list[AnyEvent]:
        return [
            made.started("s0-r0").model_copy(update={"time": begin}),
            Doing(what="training", detail="training", since=begin, time=begin),
            made.account(time=begin, busy_seconds=1.0, busy_by_work={"forward": 1.0}, in_hand=1),
            made.account(time=begin + 10.0, busy_seconds=5.0, busy_by_work={"forward": 5.0}, in_hand=1),
            Doing(what="waiting_for_peers", detail="a replica of stage 1", since=begin + 10.0, time=begin + 10.0),
            made.account(time=begin + 20.0, busy_seconds=5.0, busy_by_work={"forward": 5.0}, nodes_per_stage=[2, 1]),
        ]

    told = Chronicle.of("s0-r0", [*life(1000.0), *life(2000.0), P2pdRestarted(cause="died", restarts=1, time=2021.0)])
    assert told.spent.busy == {"forward": 10.0}
    assert told.spent.idle == {"answers": 12.0, "no_replica": 20.0}
    assert told.counts == {"ended without a last word": 1, "p2pd started again": 1}
    assert [moment.kind for moment in told.moments] == ["start", "death", "start", "fault"]
    assert fmean(life.last - life.began for life in told.lives) == 20.5


def test_what_it_took_is_that_of_all_lives(tmp_path: Path) -> None:
    """Bytes were those of the last process beside the device's time in all."""
    accounts = [
        made.account(time=at, busy_seconds=at - 1000.0, busy_by_work={"forward": at - 1000.0})
        for at in (1000.0, 1060.0)
    ]
    again = made.started("s0-r0").model_copy(update={"time": 1100.0})
    write(tmp_path, made.started("s0-r0"), *accounts, again, made.account(time=1110.0, bytes_sent={"state": 4000}))
    assert "<td>60 s</td><td>0 s</td><td>5.5 kB</td><td>1.8 kB</td>" in page(read_folder(tmp_path, NOW))


@pytest.mark.parametrize("killed", [False, True])
def test_a_life_ends_where_its_process_did(killed: bool) -> None:
    """What the next process tells before it is up, a quarter of an hour later, is no part of it."""
    begun = made.started("s0-r0").model_copy(update={"time": 1000.0})
    end = made.stopped("s0-r0").model_copy(update={"time": 1020.0})
    coming = Doing(what="joining", detail="looking for the nodes of the run", since=1900.0, time=1900.0)
    again = begun.model_copy(update={"time": 1910.0})
    told = Chronicle.of("s0-r0", [begun, made.account(time=1020.0), *(() if killed else (end,)), coming, again])
    assert [(life.began, life.last) for life in told.lives] == [(1000.0, 1020.0), (1910.0, 1910.0)]
    assert [(m.kind, m.time) for m in told.moments][1] == ("death" if killed else "end", 1020.0)


def test_a_pause_is_a_moment_of_the_node() -> None:
    """The list of what befell a node left the hours out in which its user had it rest."""
    rests = "paused until 22:00 (node.hours): device and line are free; noloco-node resume goes on at once"
    told = Chronicle.of("s0-r0", [made.started("s0-r0"), Doing(what="paused", detail=rests, since=9.0, time=9.0)])
    assert told.moments[-1] == Moment(9.0, "end", "paused until 22:00 (node.hours)")
