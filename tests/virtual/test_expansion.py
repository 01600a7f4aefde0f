"""An experiment as written becomes the right trainings, or is refused by name before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest

from noloco_node.config.experiments import ALL_ALGORITHMS
from noloco_node.errors import ExitCode, UserError
from noloco_node.laboratory.expansion import check_points, expand, job_of
from noloco_node.laboratory.experiment import planned
from tests.virtual import made_results as made


def noloco(**more: Any) -> dict[str, Any]:
    """One variant."""
    return {"name": "noloco", "algorithm": "noloco", **more}


def refusal(lab: dict[str, Any], *overrides: str) -> UserError:
    """The error that an experiment gets."""
    with pytest.raises(UserError) as caught:
        check_points(expand(made.config(lab, *overrides)))
    assert caught.value.exit_code == ExitCode.CONFIG
    return caught.value


def test_a_file_without_a_laboratory_compares_the_four_algorithms() -> None:
    """The default is the whole comparison, on the file's own length."""
    cells = expand(made.config({}))
    assert [cell.points[0].variant for cell in cells] == [variant.name for variant in ALL_ALGORITHMS]
    assert {cell.points[0].tokens for cell in cells} == {49_152}
    assert [len(cell.points) for cell in cells] == [1] * 4


def test_variants_and_replicas_multiply_and_a_sweep_is_every_combination() -> None:
    """Two cells of 2 × 3 points, each with its settings applied."""
    lab = {
        "variants": [
            noloco(
                set={"outer.momentum": "local", "world.tensors_sent": 2},
                sweep={"outer.alpha": [0.0, 0.3], "inner.learning_rate": [1e-3, 2e-3, 4e-3]},
            )
        ],
        "replicas": [4, 8],
    }
    cells = expand(made.config(lab))
    assert [(cell.points[0].replicas, cell.points[0].tokens) for cell in cells] == [(4, 49_152), (8, 49_152)]
    for cell in cells:
        pairs = [(point.run.outer.alpha, point.run.inner.learning_rate) for point in cell.points]
        assert pairs == [(a, rate) for a in (0.0, 0.3) for rate in (1e-3, 2e-3, 4e-3)]
        for point in cell.points:
            assert (point.run.outer.momentum, point.world.tensors_sent) == ("local", 2)
            assert point.options == {"outer.momentum": "local", "world.tensors_sent": 2, **point.swept}
            assert point.run.inner.target_tokens == point.tokens


def test_gamma_may_leave_the_admissible_set_only_where_the_world_allows_it() -> None:
    """By the file or by the variant's own set; elsewhere the setting is named with its place."""
    beyond = noloco(sweep={"outer.gamma": [0.5, 2.7]})
    message = refusal({"variants": [beyond]}).message
    assert "lab.variants[0].sweep outer.gamma" in message
    assert "outer.gamma (2.7) is outside the admissible set" in message
    for lab in (
        {"variants": [beyond], "world": {"allow_inadmissible": True}},
        {"variants": [{**beyond, "set": {"world.allow_inadmissible": True}}]},
    ):
        assert [point.run.outer.gamma for point in expand(made.config(lab))[0].points] == [0.5, 2.7]


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        (noloco(set={"outer.betta": 0.5}), ["lab.variants[1].set outer.betta", "did you mean outer.beta"]),
        (noloco(set={"outer.beta": "much"}), ["lab.variants[1].set outer.beta: 'much'"]),
        (noloco(sweep={"outer.codec": ["fp32", "zip"]}), ["lab.variants[1].sweep outer.codec: 'zip'"]),
        (noloco(set={"world.nesterow": 1}), ["lab.variants[1].set world.nesterow", "did you mean"]),
        (noloco(set={"run.outer.beta": 1}), ["lab.variants[1].set run.outer.beta", "no setting of the run"]),
        (noloco(set={"world.tensors_sent": 3}), ["lab.variants[1].set world.tensors_sent: 3"]),
        (noloco(set={"outer.min_inner_steps": 9}), ["lab.variants[1].set outer.min_inner_steps", "exceeds"]),
        (noloco(set={"inner.target_tokens": 9}), ["lab.variants[1].set inner.target_tokens", "equally long"]),
        (noloco(sweep={"outer.beta": []}), ["lab.variants[1].sweep outer.beta", "no value"]),
        (noloco(set={"outer.beta": 1}, sweep={"outer.beta": [1]}), ["lab.variants[1].sweep outer.beta", "`set`"]),
        (noloco(set={"model.stages": 3}), ["model.stages"]),
        (noloco(set={"inner.global_batch_tokens": 1056}), ["'noloco' on 4 replicas", "inner.global_batch_tokens"]),
    ],
)
def test_a_wrong_setting_is_named_with_the_variant_it_stands_in(variant: dict[str, Any], words: list[str]) -> None:
    """The second variant is wrong: index, group and dotted name appear."""
    message = refusal({"variants": [{"name": "none", "algorithm": "local"}, variant]}).message
    for word in words:
        assert word in message


def test_all_mistakes_of_all_variants_come_at_once_and_each_once() -> None:
    """Four cells with the same mistake are one line."""
    variants = [noloco(set={"outer.betta": 1}), {"name": "b", "algorithm": "diloco", "set": {"world.nesterow": 1}}]
    lines = refusal({"variants": variants, "replicas": [4, 8]}).message.splitlines()
    assert len(lines) == 3
    assert "lab.variants[0].set outer.betta" in lines[1]
    assert "lab.variants[1].set world.nesterow" in lines[2]


@pytest.mark.parametrize(
    ("lab", "word"), [({"reference": "fsdp"}, "lab.reference"), ({"plots": ["gamma"]}, "lab.plots: 'gamma'")]
)
def test_what_the_whole_experiment_lacks_is_named(lab: dict[str, Any], word: str) -> None:
    """A reference that is no variant, a plot of nothing."""
    assert word in refusal(lab).message


def test_data_parallel_is_one_training_whatever_the_number_of_replicas() -> None:
    """The others are one for each."""
    config = made.config({"replicas": [4, 8]})
    keys: dict[str, set[str]] = {}
    for point in made.points(config):
        keys.setdefault(point.algorithm, set()).add(job_of(point, 1, config.lab).key)
    assert {algorithm: len(found) for algorithm, found in keys.items()} == {
        "noloco": 2,
        "diloco": 2,
        "data_parallel": 1,
        "local": 2,
    }


def test_a_setting_of_one_algorithm_is_refused_for_others() -> None:
    """It would change nothing, and a table would say that it did not help."""
    message = refusal({"variants": [noloco(set={"world.nesterov": True})]}).message
    assert "world.nesterov is for the algorithm diloco" in message


def test_the_key_of_a_training_holds_all_that_it_depends_on_and_nothing_else() -> None:
    """Seed, settings, world, algorithm, replicas and measurements change it; names and purposes do not."""
    config = made.config({"variants": [noloco()], "replicas": [4]})
    (point,) = made.points(config)
    key = job_of(point, 1, config.lab).key
    renamed = made.config({"variants": [{**noloco(), "name": "other"}], "replicas": [4]})
    (same,) = made.points(renamed)
    assert job_of(same, 1, renamed.lab).key == key
    others = [
        made.config({"variants": [noloco(set={"outer.beta": 0.4})]}),
        made.config({"variants": [noloco(set={"world.tensors_sent": 2})]}),
        made.config({"variants": [{**noloco(), "algorithm": "diloco"}]}),
        made.config({"variants": [noloco()], "replicas": [8]}),
        made.config({"variants": [noloco()], "evaluations": 3}),
        made.config({"variants": [noloco()], "divergence_points": 3}),
        made.config({"variants": [noloco()]}, "run.inner.learning_rate=1e-3"),
    ]
    found = {job_of(next(made.points(other)), 1, other.lab).key for other in others}
    assert len(found | {key, job_of(point, 2, config.lab).key}) == len(others) + 2


def test_the_plan_counts_trainings_and_tokens_by_phase() -> None:
    """Five points on each of three seeds, then one on each of three others; data parallel once."""
    lab = {
        "variants": [
            {"name": "data parallel", "algorithm": "data_parallel"},
            noloco(sweep={"outer.gamma": [0.2, 0.4, 0.6, 0.8, 0.9]}),
        ],
        "replicas": [4, 8],
        "tune_seeds": [1, 2, 3],
        "seeds": [4, 5, 6],
    }
    config = made.config(lab)
    phases = planned(config.lab, expand(config))
    assert [phase.trainings for phase in phases] == [2 * 5 * 3, 3 + 2 * 3]
    assert [phase.tokens for phase in phases] == [count * 49_152 for count in (30, 9)]


def test_routers_are_not_trained_here_and_it_says_so() -> None:
    """The setting that is in the way is named."""
    mixture = ("model_type=mixtral", "num_local_experts=4", "output_router_logits=true")
    error = refusal({}, *(f"run.model.config.{setting}" for setting in mixture))
    assert "output_router_logits is true" in error.message
