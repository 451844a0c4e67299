"""Figures of a report."""

import xml.etree.ElementTree as ElementTree

import matplotlib as mpl
import pytest
from sample_reports import SCORES, make_finetuned, make_report, pictures, words

from iobs import report
from iobs.pruning.report import AllocationRecord, ComparisonLoss
from iobs.report import comparisons, plots


def test_plots_are_deterministic():
    made = make_report(scores=SCORES)
    assert plots.rounds(made) == plots.rounds(made)


TEX = r"$\frac_$"  # matplotlib would take it for TeX and fail to parse it


def test_plots_do_not_parse_dollars_as_tex(tmp_path):
    made = make_report(scores={f"{name}{TEX}": {TEX: 0.5} for name in "abc"})
    made.loss = ComparisonLoss(TEX)
    for number, row in enumerate(made.audit):
        row.name, row.zeros = f"{number % 2}.{TEX}", 24 + number
    for record in made.rounds:
        for number, layer in enumerate(record.layers):
            layer.name = f"{TEX}{number}"
    with mpl.rc_context(
        {"text.usetex": True, "axes.formatter.use_mathtext": True}
    ):  # possible settings of a user's matplotlibrc
        report.write_report(made, tmp_path)
    drawn = pictures((tmp_path / "report.html").read_text(encoding="utf8"))
    assert len(drawn) == 4
    assert sum(any(TEX in word for word in words(picture)) for picture in drawn) == 4
    trials = [comparisons.MethodTrial(TEX, "0.5", sparsity, TEX, 9.5, 2.0) for sparsity in (0.5, 0.6)]
    assert TEX in words(comparisons.trials_figure(trials, 8.5))


def test_trials_figure_labels_n_of_m_points():
    trials = [
        comparisons.MethodTrial("fast", pattern, sparsity, "perplexity", score, 2.0)
        for pattern, sparsity, score in (("0.5", 0.5, 9.5), ("2:4", 0.5, 12.0), ("0.7", 0.7, 20.0))
    ]
    assert "2:4" in words(comparisons.trials_figure(trials, 8.5))


@pytest.mark.parametrize(("value", "shown"), [(float("inf"), "inf"), (float("nan"), "nan")])
def test_scores_that_are_not_finite_are_written_beside_their_bars(value, shown):
    scores = {"dense": {"perplexity": 3.0}, "broken": {"perplexity": value}, "good": {"perplexity": 5.0}}
    drawn = plots.comparison(scores, "perplexity")
    assert {shown, "5.000"} <= {*words(drawn)}
    assert drawn.count(plots.GREEN) == 1


def test_plots_label_logarithmic_axes_in_plain_text():
    made = make_report()
    made.best.layers[0].error_dense = 1e-3
    drawn = words(plots.error_by_layer(made))
    assert {"0.001", "0.01"} <= {*drawn}
    assert not any("$" in word for word in drawn)


def test_report_is_written_if_a_figure_fails(tmp_path, monkeypatch):
    def broken(*_):
        raise ValueError("no room")

    monkeypatch.setattr(plots, "_short_names", broken)
    with pytest.warns(UserWarning, match="could not be drawn: no room"):
        report.write_report(make_report(), tmp_path)
    drawn = pictures((tmp_path / "report.html").read_text(encoding="utf8"))
    assert len(drawn) == 2
    assert sum("could not be drawn" in picture for picture in drawn) == 1
    for picture in drawn:
        ElementTree.fromstring(picture)


@pytest.mark.parametrize("rounds", [1, 3, 40])
def test_plots_separate_finetunings_from_rounds(rounds):
    drawn = words(plots.rounds(make_finetuned(rounds)))
    assert drawn.count("tuning") == 2
    assert {"of 600", "of 60"} <= {*drawn}
    assert str(rounds + 1) not in drawn
    assert "1" in drawn


def test_allocation_record_interpolates_effects():
    record = AllocationRecord("a", (8, 6), [0.75, 0.5, 0.0], [0.4, 0.1, 0.0], [0.8, 0.2, 0.0], 0.5)
    assert [record.effect(share) for share in (0.0, 0.25, 0.5, 0.6, 0.75, 0.9)] == pytest.approx(
        [0.0, 0.1, 0.2, 0.44, 0.8, 0.8]
    )
