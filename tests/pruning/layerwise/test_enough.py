"""Calibration data that are too few are said, with the number that would do; scores say what they are of."""

import logging

import pytest
import torch
from torch import nn

import iobs
from iobs.pruning.report import interval
from iobs.report.tables import summary_lines


@pytest.mark.parametrize(("count", "said"), [(1, "64 in place of 1 "), (18, "64 in place of 9 "), (40, "")])
def test_few_inputs_for_the_columns_are_said_with_the_number_that_would_do(count, said, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    data, holdout = [(torch.randn(count, 8), torch.randint(3, (count,)))], 0.0 if count == 1 else 0.5
    with caplog.at_level(logging.WARNING, logger="iobs"):
        report = iobs.prune(model, data, 0.5, "one-shot", holdout=holdout)
    assert len(report.cautions) == bool(said)
    assert len(caplog.messages) == bool(said)
    for text in (str(report), *caplog.messages, "\n".join(summary_lines(report))):
        assert said.replace("in place", "samples in place") in text
    labels = count // 2 if holdout else 1
    assert f"({labels} labels, 95 % intervals " in str(report)


def test_accuracy_of_fifty_pictures_has_a_wide_interval():
    assert interval(0.76, 50) == pytest.approx((0.626, 0.857), abs=1e-3)  # statsmodels, method "wilson"
    assert interval(0.68, 50) == pytest.approx((0.542, 0.792), abs=1e-3)
    assert interval(1.0, 10)[1] == pytest.approx(1.0)
