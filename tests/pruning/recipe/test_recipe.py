"""Recipes are values: they compare, change, print, and survive YAML."""

from dataclasses import FrozenInstanceError, fields, replace
from typing import get_args

import numpy as np
import pytest
import torch

import iobs
from iobs.core.structured import Units
from iobs.errors import IOBSError, ProblemError
from iobs.pruning.descent import OPTIMIZERS
from iobs.pruning.descent.scoring import LOSSES
from iobs.pruning.layerwise.projection import TARGETS
from iobs.pruning.recipe import PRESETS, BlockFit, Changes, Optimizer, TargetName, as_recipe
from iobs.pruning.recipe.parts import LossName
from iobs.pruning.recipe.text import with_settings
from iobs.pruning.structured.parts import PARTS

RECIPES = {
    **PRESETS,
    "options": iobs.Recipe(solver=iobs.ADMM("best"), refine="swap", damping=0.1, keep_zeros=True),
    "blocks": iobs.Recipe(
        solver=iobs.SparseGPT(block=64), allocation=iobs.Allocation("fisher", 0.1, 0.9, {"*.0": (0, 0.5)})
    ),
    "chita++": iobs.Recipe(solver=iobs.CHITA(stages=15, block=100, searches=2)),
    "rules": iobs.Recipe(
        rules=(
            iobs.Rule("re:.*attn.*", pattern="2:4", solver="sparsegpt"),
            iobs.Rule("*.up", pattern=0.3),
            iobs.Rule("*.down", pattern=iobs.Unstructured(0.5, per="row")),
            iobs.Rule("lm_head", dense=True),
        )
    ),
    "rounds": iobs.Recipe(rounds=iobs.Rounds(4, "cubic", iobs.FineTune(steps=3), "fresh"), finetune=iobs.FineTune()),
}


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_yaml_round_trip_is_equal(name, complete):
    recipe = RECIPES[name]
    assert iobs.Recipe.from_yaml(recipe.to_yaml(complete)) == recipe
    assert iobs.Recipe.from_dict(recipe.to_dict(complete)) == recipe


def test_recipe_is_read_from_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(RECIPES["rules"].to_yaml() + "run: {seed: 3}\n", encoding="utf8")
    assert as_recipe(file) == as_recipe(str(file)) == iobs.Recipe.from_yaml(file) == RECIPES["rules"]


def test_recipe_preset_gives_the_named_recipe():
    assert iobs.Recipe.preset("paper").rounds == iobs.Rounds(10, finetune=iobs.FineTune(lr=0.01, loss="task"))
    allocation = iobs.Allocation("auto", generations=0)
    expected = iobs.Recipe(target="residual", curvature="auto", allocation=allocation)
    assert iobs.Recipe.preset("one-shot") == expected


def test_recipe_is_frozen():
    with pytest.raises(FrozenInstanceError):
        iobs.Recipe().damping = 1.0


def test_but_changes_fields_and_leaves_the_original():
    best = iobs.Recipe.preset("best")
    other = best.but(solver="sparsegpt", rounds=6)
    assert other == replace(best, solver="sparsegpt", rounds=replace(best.rounds, count=6))
    assert best.rounds.count == 5


def test_but_number_of_rounds_on_one_round_takes_those_of_best():
    assert iobs.Recipe.preset("fast").but(rounds=3).rounds == replace(iobs.Recipe.preset("best").rounds, count=3)


@pytest.mark.parametrize("count", [1, 3])
def test_number_of_rounds_means_the_same_in_a_file_and_in_python(count):
    recipe = iobs.Recipe(solver="obc").but(rounds=count)
    assert iobs.Recipe.from_yaml(f"solver: obc\nrounds: {count}\n") == recipe
    assert iobs.Recipe.from_yaml(recipe.to_yaml(complete=True)) == recipe


def test_yaml_reads_shares_in_percent():
    text = "allocation: {criterion: fisher, least: 12.5%}\nrules: [{match: a, pattern: 33.3%}]\n"
    recipe = iobs.Recipe.from_yaml(text)
    assert recipe.allocation.least == 0.125
    assert recipe.rules[0].pattern == iobs.Unstructured(0.333)
    assert with_settings(iobs.Recipe(), {"allocation.most": "90%"}).allocation.most == 0.9
    assert iobs.Recipe.from_yaml(recipe.to_yaml()) == recipe


def test_infinite_epochs_are_no_limit():
    fit = BlockFit(steps=7, epochs=float("inf"))
    assert fit.within(3) == fit


def test_but_one_round_drops_schedule_and_steps():
    assert iobs.Recipe.preset("best").but(rounds=1).rounds == iobs.Rounds()


def test_print_shows_what_differs_from_the_defaults():
    text = str(iobs.Recipe.preset("fast"))
    assert "target: residual" in text
    assert "damping" not in text


def test_print_names_functions():
    def my_loss(model, batch):
        raise AssertionError

    assert "my_loss" in str(iobs.Recipe(finetune=iobs.FineTune(loss=my_loss)))


def test_yaml_of_a_function_is_refused():
    recipe = iobs.Recipe(finetune=iobs.FineTune(loss=lambda model, batch: None))
    with pytest.raises(ProblemError, match="no YAML form"):
        recipe.to_yaml()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a list", "holds no recipe"),
        ("solver: [", "no YAML"),
        ("wish: 3", "no key 'wish'"),
        ("rounds: {wish: 3}", "rounds of a recipe has no key 'wish'"),
        ("finetune: {wish: 3}", "finetune of a recipe has no key 'wish'"),
        ("rounds: {finetune: 3}", r"rounds\.finetune must be a mapping"),
        ("rounds: many", "whole number"),
        ("rounds: yes", "whole number"),
        ("damping: on", "damping must be a number"),
        ("blocks: {network_steps: true}", "network_steps of blocks must be a whole number"),
        ("finetune: {lr: 1e400}", 'lr must be "auto" or a finite number above zero, got inf'),
        ("blocks: {network_lr: 1e400}", 'network_lr of blocks must be "auto" or a finite number above zero, got inf'),
        ("finetune: {steps: true}", "steps must be a whole number"),
        ("solver: wish", "no solver 'wish'"),
        ("solver: {block: 3}", "needs a name"),
        ("solver: {name: sparsegpt, wish: 3}", "does not take these options"),
        ("solver: {name: sparsegpt, block: 0}", "block must be a whole number of at least 1"),
        ("target: wish", 'target must be one of "layer", "dense", "residual", "model"'),
        ("rules: {match: a}", "rules must be a list"),
        ("rules: [{pattern: 0.5}]", "key match"),
        ("rules: [{match: a}]", "changes nothing"),
        ("rules: [{match: a, dense: true, pattern: 0.5}]", "give one of them"),
        ("rules: [{match: 're:(', dense: true}]", "not a regular expression"),
        ("rules: [{match: a, pattern: 2.0}]", r"\[0, 1\)"),
        ("{solver: chita, target: dense}", "not with a solver of the whole network"),
        ("damping: -1", "damping must not be negative"),
        ("target: model\ninputs: dense", 'with inputs="dense" use "layer"'),
        ("rounds: {count: 2, schedule: cubic}", "three rounds or more"),
        ("rounds: {count: 1, finetune: {steps: 3}}", "lies between two rounds"),
        ("allocation: wish", "no allocation 'wish'"),
        ("solver: null", "solver cannot be|solver must be"),
        ("solver: {name: refit}", "needs a name: one of magnitude"),
        ("solver: {name: [a]}", "needs a name"),
        ("refine: {name: admm}", "needs a name: one of refit, swap"),
        ("rules: [{match: a, dense: 'false'}]", "dense of the rule 'a' must be true or false"),
    ],
)
def test_impossible_recipes_are_refused_with_the_reason(text, message):
    with pytest.raises(IOBSError, match=message):
        iobs.Recipe.from_yaml(text)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("damping", "1e-3", iobs.Recipe(damping=0.001)),
        ("solver", "obc", iobs.Recipe(solver="obc")),
        ("solver.budget", "fast", iobs.Recipe(solver=iobs.ADMM("fast"))),
        ("keep_zeros", "true", iobs.Recipe(keep_zeros=True)),
        ("allocation.least", "0.2", iobs.Recipe(allocation=iobs.Allocation("uniform", least=0.2))),
        ("finetune", "none", iobs.Recipe()),
        ("finetune.steps", "900", iobs.Recipe(finetune=replace(PRESETS["best"].finetune, steps=900))),
        ("rounds", "2", iobs.Recipe().but(rounds=2)),
        ("rounds.count", "4", iobs.Recipe().but(rounds=4)),
    ],
)
def test_changed_sets_one_field_from_text(key, text, expected):
    assert with_settings(iobs.Recipe(), {key: text}) == expected


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("wish", "1", "no field 'wish'"),
        ("rounds.wish", "1", "'wish' is unknown"),
        ("damping.deep", "1", "'deep' is unknown"),
        ("damping", "much", "damping must be a number"),
        ("rounds.count", "0", "whole number of at least 1"),
        ("finetune.lr", "quick", 'lr must be "auto" or a finite number'),
    ],
)
def test_changed_refuses_with_the_reason(key, text, message):
    with pytest.raises(ProblemError, match=message):
        with_settings(iobs.Recipe(), {key: text})


@pytest.mark.parametrize("solver", ["gptq", "obr", "greedy"])
def test_changed_refuses_options_of_a_solver_without_a_text_form(solver):
    with pytest.raises(ProblemError, match=f"The solver '{solver}' takes no options from text"):
        with_settings(iobs.Recipe(), {"solver": solver, "solver.block": "64"})


def test_prune_refuses_unknown_fields_by_name():
    with pytest.raises(ProblemError, match="no field budget; the fields are solver"):
        iobs.prune(torch.nn.Linear(2, 2), [], 0.5, budget="fast")


def test_unknown_recipes_are_refused_with_the_names():
    for recipe in ("wish", 3, None):
        with pytest.raises(ProblemError, match="one-shot, fast, best, paper"):
            iobs.prune(torch.nn.Linear(2, 2), [], 0.5, recipe)
    with pytest.raises(ProblemError, match=r"wish\.yaml cannot be read"):
        iobs.prune(torch.nn.Linear(2, 2), [], 0.5, "wish.yaml")


@pytest.mark.parametrize("match", ["08", "1e3", "null", "yes", "1e1", "0x10", "2:4", "~", "3.", "2026-01-01"])
def test_recipe_yaml_keeps_names_that_look_like_other_values(match):
    bounds = iobs.Allocation("fisher", bounds={match: (0.0, 0.5)})
    recipe = iobs.Recipe(allocation=bounds, rules=(iobs.Rule(match, solver="obc"),))
    assert iobs.Recipe.from_yaml(recipe.to_yaml()) == recipe


def test_recipe_yaml_takes_numbers_of_numpy():
    recipe = iobs.Recipe(damping=np.float64(0.05), rounds=iobs.Rounds(np.int64(3)))
    assert iobs.Recipe.from_yaml(recipe.to_yaml()) == recipe


def test_recipe_refuses_objects_that_are_no_solver():
    for change in ({"solver": None}, {"solver": 3}, {"refine": 3}, {"rules": None}, {"rules": iobs.Rule("a", 0.5)}):
        with pytest.raises(ProblemError):
            iobs.Recipe(**change)
    with pytest.raises(ProblemError, match="callbacks must be a list"):
        iobs.prune(None, [], 0.5, callbacks=print)


def test_but_rounds_of_a_network_solver_takes_no_steps():
    assert iobs.Recipe().but(solver="chita", rounds=3) == iobs.Recipe(solver="chita").but(rounds=3)
    assert iobs.Recipe(solver="chita").but(rounds=3).rounds == iobs.Rounds(3)


def test_every_name_of_a_recipe_is_in_the_table_that_defines_it():
    assert {*get_args(LossName)} == LOSSES.keys()
    assert {*get_args(TargetName)} == TARGETS.keys()
    assert {*get_args(Optimizer)} - {"auto"} <= OPTIMIZERS.keys()
    assert {*get_args(Units)} - {"auto", "stream", "vocabulary"} == PARTS.keys()
    assert Changes.__annotations__.keys() == {field.name for field in fields(iobs.Recipe)}
