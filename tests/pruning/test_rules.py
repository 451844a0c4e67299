"""Rules change single layers by name; the last match wins."""

import menagerie
import pytest

import iobs
from iobs.errors import LayerSelectionError, PatternError, ProblemError

EQUAL = iobs.Recipe(target="residual")
DIVIDED = iobs.Recipe(solver="magnitude", allocation="fisher")


def pruned(rules, pattern=0.5, recipe=EQUAL):
    model, data = menagerie.build("transformer")
    report = iobs.prune(model, data, pattern, recipe, rules=rules)
    return {row.name: row for row in report.audit}, report, model


def test_rules_set_the_pattern_and_solver_of_their_layers():
    rules = (iobs.Rule("re:layers\\..\\.[qkv]", pattern="2:4", solver="sparsegpt"), iobs.Rule("*.out", dense=True))
    rows, report, model = pruned(rules)
    assert all(row.zeros == row.weights // 2 for row in rows.values())
    assert report.skipped["layers.0.out"] == "dense by the rule '*.out'"
    assert not (model.layers[0].out.weight == 0).any()
    iobs.audit(model, iobs.NM(2, 4), layers=[name for name in rows if name[-1] in "qkv"])


def test_the_last_matching_rule_wins():
    rules = (iobs.Rule("*", pattern=0.25), iobs.Rule("*.up", pattern=0.75), iobs.Rule("layers.0.up", dense=True))
    rows, report, _ = pruned(rules)
    assert rows["layers.1.up"].zeros == rows["layers.1.up"].weights * 3 // 4
    assert rows["layers.1.q"].zeros == rows["layers.1.q"].weights // 4
    assert "layers.0.up" in report.skipped


class QuarterOfEachRow:
    """A pattern of the user, without a repr of its own."""

    def groups(self, shape):
        return iobs.Unstructured(0.25, per="row").groups(shape)


def test_a_pattern_of_the_user_works_in_a_rule_and_as_the_pattern_of_a_resumed_run(tmp_path):
    rows, _, _ = pruned((iobs.Rule("*.up", pattern=QuarterOfEachRow()),))
    row = rows["layers.0.up"]
    assert row.zeros == row.weights // 4
    with pytest.raises(ProblemError, match="no YAML form"):
        iobs.Recipe(rules=(iobs.Rule("*.up", pattern=QuarterOfEachRow()),)).to_yaml()
    patterns = [QuarterOfEachRow() for _ in range(2)]  # at other addresses, as in another process
    for pattern in patterns:
        model, data = menagerie.build("transformer")
        iobs.prune(model, data, pattern, "one-shot", checkpoint=tmp_path / "run")


def test_a_rules_solver_is_used_for_its_layers():
    rules = (iobs.Rule("*.up", solver="magnitude"),)
    dense = menagerie.build("transformer")[0].layers[0].up.weight
    _, _, model = pruned(rules, recipe=iobs.Recipe())
    kept = model.layers[0].up.weight != 0
    assert (model.layers[0].up.weight[kept] == dense[kept]).all(), "magnitude leaves weights as they are"
    other = model.layers[0].down.weight
    kept = other != 0
    assert not (other[kept] == menagerie.build("transformer")[0].layers[0].down.weight[kept]).all()


def test_layers_with_a_pattern_of_their_own_take_no_part_in_the_allocation():
    rows, report, _ = pruned((iobs.Rule("*.up", pattern=0.25),), 0.6, DIVIDED)
    others = [row for name, row in rows.items() if not name.endswith("up")]
    weights = sum(row.weights for row in others)
    assert sum(row.zeros for row in others) == weights - int(weights * 0.4 + 0.5)
    assert all(row.zeros == row.weights // 4 for name, row in rows.items() if name.endswith("up"))
    assert all(not record.name.endswith("up") for record in report.allocation)


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (iobs.Rule("wish", dense=True), LayerSelectionError, "matches none of the model's layers"),
        (iobs.Rule("head", pattern=0.5), LayerSelectionError, "only weights that stay dense: 'head'"),
        (iobs.Rule("*", dense=True), LayerSelectionError, "leave every layer dense"),
        (iobs.Rule("*.up", pattern="3:7"), PatternError, "divisible by 7"),
    ],
)
def test_impossible_rules_are_refused_before_any_work(rule, error, message):
    model, data = menagerie.build("transformer")
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was called"))
    with pytest.raises(error, match=message):
        iobs.prune(model, data, 0.5, rules=(rule,))


def test_a_dense_rule_may_name_what_is_dense_already():
    rows, _, _ = pruned((iobs.Rule("head", dense=True),))
    assert len(rows) == 18


def test_a_rule_with_the_pattern_of_the_run_takes_no_part_either():
    pattern = iobs.Unstructured(0.5)
    rows, _, _ = pruned((iobs.Rule("*.up", pattern=pattern),), pattern, DIVIDED)
    assert all(row.zeros == row.weights // 2 for name, row in rows.items() if name.endswith("up"))
