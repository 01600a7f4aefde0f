"""The table says what the results say."""

from __future__ import annotations

from typing import Any

from noloco_node.laboratory.course import ALIKE, COSTS, markdown
from noloco_node.laboratory.figures import Results
from tests.virtual import made_results as made

VARIANTS = [
    {"name": "data parallel", "algorithm": "data_parallel"},
    {"name": "noloco", "algorithm": "noloco", "sweep": {"outer.gamma": [0.4, 0.6]}},
]


def table(record: Results) -> dict[tuple[str, str, str], dict[str, str]]:
    """Rows of the table by block, variant and settings, each a cell by column."""
    block, columns, found = "", list[str](), dict[tuple[str, str, str], dict[str, str]]()
    for line in markdown(record).splitlines():
        if line.startswith("## "):
            block, columns = line.removeprefix("## "), []
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and not columns:
            columns = cells
        elif line.startswith(ALIKE):
            said = [
                cell.partition(name)
                for cell in line.removeprefix(ALIKE).removesuffix(".").split(", ")
                for name in COSTS
            ]
            told = {name: cell.strip() for before, name, cell in said if name and not before}
            found |= {key: row | told for key, row in found.items() if key[0] == block}
        elif cells and set(cells) != {"---"}:
            row = dict(zip(columns, cells, strict=True))
            found[block, row["variant"], row["settings"]] = row
    return found


def record(lab: dict[str, Any]) -> Results:
    """Every point trained."""
    config = made.config({"variants": VARIANTS, **lab})
    return made.record(config, [made.result(point, seed) for point in made.points(config) for seed in config.lab.seeds])


def test_a_row_holds_the_mean_over_seeds_its_deviation_and_the_gaps() -> None:
    """Losses 1.645, 1.665, 1.705 against 1.545, 1.565, 1.605 of data parallel."""
    rows = table(record({"seeds": [1, 2, 4], "replicas": [4]}))
    row = rows["49,152 tokens, 4 replicas", "noloco", "outer.gamma 0.6"]
    assert (row["validation loss"], row["merged"]) == ("1.6717 ± 0.0306 (n = 3)", "1.6667")
    assert row["gap"] == f"+{0.1 / 1.57166667:.2%}" == "+6.36%"
    assert (row["sent per outer step"], row["sent per inner step"]) == ("74.0 kB", "12.3 kB")
    assert (row["outer steps"], row["no partner"], row["clipped"], row["seconds"]) == ("8.0", "12.5%", "0.0%", "3")
    assert rows["49,152 tokens, 4 replicas", "data parallel", "–"]["gap"] == "+0.00%"


def test_all_bytes_are_counted_and_the_loss_is_shown_on_both_sides_of_the_last_exchange() -> None:
    """4 replicas × 48 steps share 49,152 tokens: 256 a replica and step, each 2 × 4 × 32 bytes and a label."""
    row = table(record({"replicas": [4]}))["49,152 tokens, 4 replicas", "noloco", "outer.gamma 0.6"]
    assert row["before the last exchange"] == "1.6550"
    assert row["validation loss"] == "1.6450 (n = 1)"
    hidden = made.config({"variants": VARIANTS}).run.model.config["hidden_size"]
    assert isinstance(hidden, int)
    assert row["activations per inner step"] == f"{256 * (8 * hidden + 4) / 1000:.3g} kB"
    told = record({"replicas": [4]})
    assert ALIKE in markdown(told), "each replica carries the same, whatever it exchanges"
    assert "| activations per inner step |" not in markdown(told)
    run = told.run | {"model": told.run["model"] | {"subspace_rank": 16}}
    row = table(told.model_copy(update={"run": run}))["49,152 tokens, 4 replicas", "noloco", "outer.gamma 0.6"]
    assert row["activations per inner step"] == f"{256 * (8 * 16 + 4) / 1000:.3g} kB"


def test_fewer_than_twenty_outer_rounds_are_said_to_say_nothing() -> None:
    """That is said of a method that exchanges; data parallel and replicas alone take none, and twenty are enough."""
    few = record({"replicas": [4], "variants": [*VARIANTS, {"name": "none", "algorithm": "local"}]})
    results = [r if r.algorithm == "noloco" else r.model_copy(update={"outer_rounds": 0.0}) for r in few.results]
    text = markdown(few.model_copy(update={"results": results}))
    assert "**Fewer than 20 outer steps say nothing about a method**: noloco took 8.0. Raise" in text
    enough = [r.model_copy(update={"outer_rounds": 20.0}) for r in results]
    assert "say nothing" not in markdown(few.model_copy(update={"results": enough}))


def test_there_is_a_block_for_each_number_of_replicas_and_a_row_for_each_point() -> None:
    """Two blocks of three rows, each against the reference of its own block."""
    rows = table(record({"replicas": [4, 16]}))
    assert list(dict.fromkeys(block for block, _, _ in rows)) == [
        "49,152 tokens, 4 replicas",
        "49,152 tokens, 16 replicas",
    ]
    assert len(rows) == 6
    row = rows["49,152 tokens, 16 replicas", "noloco", "outer.gamma 0.4"]
    assert (row["validation loss"], row["gap"]) == ("1.6263 (n = 1)", f"+{0.1 / 1.52625:.2%}")


def test_a_variant_that_diverged_on_a_seed_has_no_loss_and_no_gap() -> None:
    """The mean of those that lived would flatter it."""
    made_record = record({"seeds": [1, 2], "replicas": [4]})
    results = list(made_record.results)
    (point,) = [p for p in made.points(made.config({"variants": VARIANTS})) if p.swept == {"outer.gamma": 0.6}]
    place = next(i for i, r in enumerate(results) if r.options == point.options and r.seed == 2)
    results[place] = made.diverged(point, 2)
    rows = table(made_record.model_copy(update={"results": results}))
    row = rows["49,152 tokens, 4 replicas", "noloco", "outer.gamma 0.6"]
    assert (row["validation loss"], row["gap"], row["merged"]) == ("diverged in 1 of 2", "–", "–")
    assert rows["49,152 tokens, 4 replicas", "noloco", "outer.gamma 0.4"]["gap"] != "–"


def test_the_settings_of_a_variant_are_shown_whether_swept_or_not() -> None:
    """What it sets for itself tells it from the others as well; where nobody sets anything there is no such column."""
    variants = [{"name": "a", "algorithm": "noloco", "set": {"outer.alpha": 0.5}}, {"name": "b", "algorithm": "local"}]
    rows = table(record({"variants": variants, "replicas": [4], "reference": "b"}))
    assert {(variant, settings) for _, variant, settings in rows} == {("a", "outer.alpha 0.5"), ("b", "–")}
    plain = markdown(record({"variants": [variants[1]], "replicas": [4], "reference": "b"}))
    assert "| variant | validation loss |" in plain


def test_the_tuning_is_listed_apart_and_the_block_names_what_was_chosen() -> None:
    """Tune seeds do not enter the reported means."""
    config = made.config({"variants": VARIANTS, "tune_seeds": [1], "seeds": [4, 5]})
    text = markdown(made.everything(config))
    block, _, tuning = text.partition("## Tuning")
    rows = table(made.everything(config))
    assert ("49,152 tokens, 4 replicas", "noloco", "outer.gamma 0.4") in rows
    assert ("49,152 tokens, 4 replicas", "noloco", "outer.gamma 0.6") not in rows
    assert "outer.gamma 0.6" not in block
    assert {"outer.gamma 0.4", "outer.gamma 0.6"} <= {settings for part, _, settings in rows if part == "Tuning"}
    assert "seeds 1" in tuning
