"""Corrections for the drift of inputs are damped as much as held-out samples require."""

import pytest
import torch

from iobs.pruning.calibration.gram import Gram, Statistics
from iobs.pruning.layerwise.problem import DAMPINGS, corrected


def statistics(samples: int, heldout: int, columns: int = 20, noise: float = 0.5) -> Statistics:
    """Gram matrices of the dense network's inputs plus noise, for calibration and held-out samples."""
    generator = torch.Generator().manual_seed(0)

    def gram(count: int) -> Gram:
        dense = torch.randn(1, count, columns, generator=generator, dtype=torch.float64)
        drifted = dense + noise * torch.randn(1, count, columns, generator=generator, dtype=torch.float64)
        zeros = torch.zeros(1, columns, columns, dtype=torch.float64)
        found = Gram(zeros.clone(), zeros.clone(), zeros.clone())
        found.add(drifted, dense)
        found.finish()
        return found

    return Statistics(gram(samples), gram(heldout) if heldout else None)


def weights(columns: int = 20) -> torch.Tensor:
    return torch.randn(3, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def error(gram: Gram, weight: torch.Tensor, target: torch.Tensor) -> float:
    assert gram.cross is not None
    return float(((weight @ gram.own[0]) * weight).sum() - 2 * ((target @ gram.cross[0]) * weight).sum())


def test_corrected_damps_little_if_samples_are_many() -> None:
    given, target = statistics(20000, 5000), weights()
    found = corrected(given, 0, target, target, 0.01)
    assert given.calibration.cross is not None
    assert found.damping <= 0.03
    plain = target @ given.calibration.cross[0]
    assert torch.allclose(found.linear, plain, atol=0.05)


def test_corrected_damps_few_samples_and_lowers_heldout_error() -> None:
    given, target = statistics(24, 400), weights()
    found = corrected(given, 0, target, target, 0.01)
    assert found.damping > 0.03
    hessian = given.calibration.own[0]
    ridge = 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    assert given.calibration.cross is not None
    assert given.heldout is not None
    plain = torch.linalg.solve(hessian + ridge, (target @ given.calibration.cross[0] + target @ ridge).T).T
    damped = torch.linalg.solve(hessian, found.linear.T).T
    assert error(given.heldout, damped, target) < error(given.heldout, plain, target)


def test_corrected_is_ridge_regression_to_the_current_weights() -> None:
    given, target, current = statistics(24, 400), weights(), weights() + 0.1
    found = corrected(given, 0, target, current, 0.01)
    assert found.damping in DAMPINGS
    hessian = given.calibration.own[0]
    assert given.calibration.cross is not None
    ridge = found.damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    expected = torch.linalg.solve(hessian + ridge, (target @ given.calibration.cross[0] + current @ ridge).T).T
    assert torch.allclose(found.linear, expected @ hessian)


def test_some_rows_choose_the_damping_of_all_rows():
    given = statistics(24, 400)
    target = torch.randn(600, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, few = corrected(given, 0, target, target, 0.01), corrected(given, 0, target[::4], target[::4], 0.01)
    assert found.damping == few.damping > 0
    torch.testing.assert_close(found.linear[::4], few.linear)
    torch.testing.assert_close(found.linear[1::4], corrected(given, 0, target[1::4], target[1::4], 0.01).linear)


@pytest.mark.parametrize("heldout", [0, 400])
def test_corrected_damps_nothing_without_drift_or_heldout(heldout: int) -> None:
    given, target = statistics(24, heldout, noise=0.0 if heldout else 0.5), weights()
    found = corrected(given, 0, target, target, 0.01)
    assert given.calibration.cross is not None
    assert torch.equal(found.linear, target @ given.calibration.cross[0])
    assert found.damping == 0


def test_corrected_ignores_too_few_heldout_samples():
    given, target = statistics(900, 10), weights()
    assert corrected(given, 0, target, target, 0.01).damping == 0


def test_corrected_treats_groups_separately():
    whole, target = statistics(24, 400), weights()
    both = Statistics(*(pair(gram) for gram in (whole.calibration, whole.heldout)))
    for group in range(2):
        assert torch.allclose(
            corrected(both, group, target, target, 0.0).linear, corrected(whole, 0, target, target, 0.0).linear
        )


def test_corrected_leaves_out_dampings_below_the_rounding_of_the_gram():
    given, target = statistics(24, 400), weights()
    gram = given.calibration
    gram.own.diagonal(dim1=1, dim2=2).sub_(0.2 * float(gram.own[0].diagonal().mean()))
    found = corrected(given, 0, target, target, 0.01)
    assert found.damping >= 0.3
    assert torch.isfinite(found.linear).all()
    gram.own.diagonal(dim1=1, dim2=2).sub_(1e3 * float(gram.own[0].diagonal().mean()))
    assert corrected(given, 0, target, target, 0.01).damping == 0


def pair(gram: Gram | None) -> Gram:
    assert gram is not None
    assert gram.cross is not None
    assert gram.dense is not None
    return Gram(*(torch.cat([one, one]) for one in (gram.own, gram.cross, gram.dense)), count=gram.count)
