"""Summaries of spectra, and Lanczos against the dense matrix."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prong import fisher
from tests.closeness import assert_close
from tests.fisher_loops import BUILDERS, DISTRIBUTIONS, data_for, whitened
from tests.training import mlp


def matrix_with(eigenvalues, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = len(eigenvalues)
    Q = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    return (Q * torch.tensor(eigenvalues, dtype=torch.float64)) @ Q.T


def test_a_spectrum_is_that_of_its_eigenvalues():
    found = fisher.spectrum(matrix_with([4.0, 1.0, 2.0, 0.5]))
    assert_close(found.eigenvalues, torch.tensor([4.0, 2.0, 1.0, 0.5]).double(), 1e-12)
    assert found.trace == pytest.approx(7.5)
    assert found.condition == pytest.approx(8.0)
    assert found.below == 0
    assert found.effective_rank == pytest.approx(7.5**2 / 21.25)


def test_eigenvalues_at_or_below_the_floor_count_as_zero():
    F = matrix_with([1.0, 1e-3, 1e-7, 0.0])
    assert fisher.spectrum(F).below == 1
    assert fisher.spectrum(F).condition == pytest.approx(1e7, rel=1e-6)
    found = fisher.spectrum(F, floor=1e-4)
    assert (found.below, found.floor) == (2, 1e-4)
    assert found.condition == pytest.approx(1e3)


@settings(max_examples=20)
@given(rank=st.integers(1, 6), size=st.integers(6, 9), scale=st.floats(1e-6, 1e6))
def test_of_a_projection_the_effective_rank_is_the_rank_and_the_condition_is_one(rank, size, scale):
    found = fisher.spectrum(matrix_with([scale] * rank + [0.0] * (size - rank)))
    assert found.effective_rank == pytest.approx(rank)
    assert found.condition == pytest.approx(1.0)
    assert found.below == size - rank


def test_a_zero_matrix_has_no_condition():
    found = fisher.spectrum(torch.zeros(3, 3))
    assert math.isnan(found.condition) and math.isnan(found.effective_rank)
    assert found.below == 3


def test_what_has_no_such_spectrum_is_refused():
    with pytest.raises(ValueError, match="square"):
        fisher.spectrum(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="not finite"):
        fisher.spectrum(torch.full((2, 2), torch.nan))
    with pytest.raises(ValueError, match="not symmetric"):
        fisher.spectrum(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    with pytest.raises(ValueError, match="none below zero"):
        fisher.spectrum(torch.diag(torch.tensor([1.0, -0.1])))
    with pytest.raises(ValueError, match="floor"):
        fisher.spectrum(torch.eye(2), floor=1.0)


def test_rounding_of_float32_in_a_float64_matrix_gets_the_floor_that_cures_it():
    F = torch.diag(torch.tensor([1.0, 0.5, -1e-7])).double()
    with pytest.raises(ValueError, match=r"float32.*floor=1e-5"):
        fisher.spectrum(F)
    assert fisher.spectrum(F, floor=1e-5).below == 1
    with pytest.raises(ValueError, match="none below zero") as caught:
        fisher.spectrum(torch.diag(torch.tensor([1.0, -0.1])))
    assert "floor" not in str(caught.value)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.parametrize("coordinates", ["canonical", "whitened"])
def test_lanczos_finds_the_ends_of_the_dense_spectrum(build, coordinates, distribution):
    model = build()
    x = data_for(model, 8)
    model = whitened(model, x, "implicit")
    F = fisher.dense(model, x, distribution, coordinates=coordinates)
    expected = fisher.spectrum(F, floor=1e-8)
    operator = fisher.Operator(model, x, distribution, coordinates=coordinates)
    found = fisher.extreme_eigenvalues(operator, steps=len(F), floor=1e-8)
    assert all(found.converged)
    assert found.largest == pytest.approx(expected.eigenvalues[0].item(), rel=0.01)
    assert found.smallest == pytest.approx(expected.eigenvalues[-1 - expected.below].item(), rel=0.01)
    assert found.condition == pytest.approx(expected.condition, rel=0.02)


@settings(max_examples=25)
@given(values=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=12), zeros=st.integers(0, 5), seed=st.integers(0, 9))
def test_lanczos_is_exact_when_it_runs_to_the_end(values, zeros, seed):
    F = matrix_with([*values, *[0.0] * zeros], seed)
    found = fisher.extreme_eigenvalues(F, steps=len(F), tolerance=1e-12, floor=1e-8)
    assert found.largest == pytest.approx(max(values), rel=1e-6)
    assert found.smallest == pytest.approx(min(values), rel=1e-6)


def test_one_eigenvalue_that_dominates_does_not_pass_for_both_ends():
    found = fisher.extreme_eigenvalues(torch.diag(torch.tensor([1, 1e-4, 5e-5, 1e-6]).double()))
    assert found.condition == pytest.approx(1e6, rel=1e-3)
    assert all(found.converged)


@settings(max_examples=50)
@given(
    size=st.integers(1, 20),
    spread=st.floats(1, 4),
    dominance=st.floats(0, 4),
    zeros=st.integers(0, 5),
    seed=st.integers(0, 999),
)
def test_what_has_converged_is_the_condition_of_a_random_spectrum(size, spread, dominance, zeros, seed):
    draws = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = [10**dominance, *(10 ** (-spread * draws)).tolist()]  # one on top, the others even on a log scale
    found = fisher.extreme_eigenvalues(matrix_with([*values, *[0.0] * zeros], seed), floor=1e-10)
    assert all(found.converged)
    assert found.condition == pytest.approx(max(values) / min(values), rel=0.02)


def test_an_end_that_ran_out_of_steps_before_it_settled_has_not_converged():
    F = matrix_with([1.0, 1e-6, 1e-7, 1e-8, 1e-9])
    found = fisher.extreme_eigenvalues(F, steps=2)
    assert found.converged == (False, False)
    assert fisher.extreme_eigenvalues(F, steps=5).converged == (True, True)


def test_the_largest_eigenvalue_comes_first_and_the_flags_tell_so():
    F = matrix_with([2.0, *torch.logspace(0, -6, 199).tolist()])
    found = fisher.extreme_eigenvalues(F, steps=20)
    assert found.largest == pytest.approx(2.0, rel=1e-3)
    assert found.converged == (True, False)
    assert found.steps == 21
    assert fisher.extreme_eigenvalues(F, steps=3, tolerance=1e-6).converged == (False, False)


def test_a_residual_bounds_the_error_of_what_has_converged():
    F = matrix_with(torch.linspace(1, 2, 50).tolist())
    found = fisher.extreme_eigenvalues(F, tolerance=1e-6)
    assert all(found.converged)
    assert found.largest == pytest.approx(2.0, rel=1e-6)
    assert found.smallest == pytest.approx(1.0, rel=1e-6)


def test_bad_requests_are_refused():
    F = torch.eye(3)
    with pytest.raises(ValueError, match="square"):
        fisher.extreme_eigenvalues(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="zero"):
        fisher.extreme_eigenvalues(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="none below zero"):
        fisher.extreme_eigenvalues(torch.diag(torch.tensor([1.0, -1.0, 2.0])))
    with pytest.raises(ValueError, match="none below zero"):
        fisher.extreme_eigenvalues(-F)
    with pytest.raises(FloatingPointError, match="not finite"):
        fisher.extreme_eigenvalues(F * torch.inf)
    with pytest.raises(ValueError, match="steps"):
        fisher.extreme_eigenvalues(F, steps=0)
    with pytest.raises(ValueError, match="tolerance"):
        fisher.extreme_eigenvalues(F, tolerance=0.0)


LARGE = """
import json, resource, torch, prong
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(784, 1000), nn.Tanh(), nn.Linear(1000, 256), nn.Tanh(), nn.Linear(256, 10))
x = torch.randn(512, 784)
operator = prong.fisher.Operator(model, x, "categorical", chunk=64)
found = prong.fisher.extreme_eigenvalues(operator, steps=40)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"size": operator.shape[0], "peak": peak, "largest": found.largest, "converged": found.converged[0]}))
"""


@pytest.mark.slow
def test_lanczos_on_a_million_parameters_takes_less_than_two_gigabytes():
    run = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True)
    told = json.loads(run.stdout)
    assert told["size"] > 1_000_000
    assert told["converged"] and told["largest"] > 0
    assert told["peak"] < 2e9, f"{told['peak'] / 1e9:.2f} GB"


def test_a_dense_fisher_and_its_operator_have_the_same_largest_eigenvalue_in_float32():
    model = mlp(dtype=torch.float32)
    x = data_for(model)
    top = fisher.spectrum(fisher.dense(model, x, "categorical")).eigenvalues[0].item()
    found = fisher.extreme_eigenvalues(fisher.Operator(model, x, "categorical"), steps=30)
    assert found.largest == pytest.approx(top, rel=1e-3)
