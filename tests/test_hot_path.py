"""An update between refreshes: the host waits for nothing, only whitened inputs are allocated beside SGD's."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile

import prong
from tests.training import FORMS

WIDTHS = (60, 40, 30, 60)
ROWS = 32
WAITS = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal"}  # for a device
SMALL = 4096  # bytes: vectors, not matrices


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTHS[0], WIDTHS[1]),
        nn.Tanh(),
        nn.Linear(WIDTHS[1], WIDTHS[2]),
        nn.Tanh(),
        nn.Linear(WIDTHS[2], WIDTHS[3]),
    )


def update(model: nn.Module, optimizer: torch.optim.Optimizer, h: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(h).square().sum(1).mean().backward()
    optimizer.step()


def traced(model: nn.Module, optimizer: torch.optim.Optimizer, h: torch.Tensor) -> tuple[Counter[str], int]:
    """What torch is asked for in one update, and how many bytes it allocates for that."""
    with profile(profile_memory=True) as trace:
        update(model, optimizer, h)
    events = trace.function_events
    return Counter(event.name for event in events), sum(max(0, event.self_cpu_memory_usage) for event in events)


def warmed(model: nn.Module, optimizer: torch.optim.Optimizer, h: torch.Tensor, updates: int = 12) -> None:
    """Past the first refresh, with no window open."""
    for _ in range(updates):
        update(model, optimizer, h)


OPTIONS = {
    **{form: {"form": form} for form in FORMS},
    "cutoff": {"form": prong.Implicit(cutoff=1.0)},
    "bfloat16": {"form": prong.Implicit(storage=torch.bfloat16)},
}


RARELY = prong.Every(1000, samples=64, growth=1.0)  # after update 8 nothing happens until update 16


@pytest.mark.parametrize("name", OPTIONS)
def test_no_number_is_read_back_between_refreshes(name):
    model, h = network(), torch.randn(ROWS, WIDTHS[0])
    optimizer = prong.PRONG(model, lr=1e-3, refresh=RARELY, trust=None, **OPTIONS[name])
    asked = [traced(model, optimizer, h)[0] for _ in range(12)]
    assert any(WAITS & set(each) for each in asked[:4]), "a refresh does, so this test can see it"
    # Where V and d are held, it is seen whether anybody has changed W or b since: once for all layers.
    most = 1 if name == "materialised" else 0
    assert all(sum(each[wait] for wait in WAITS) <= most for each in asked[8:])


@pytest.mark.parametrize("form", FORMS)
def test_a_bound_on_steps_waits_once_for_all_layers(form):
    model, h = network(), torch.randn(ROWS, WIDTHS[0])
    optimizer = prong.PRONG(model, lr=1e-3, form=form, refresh=RARELY, trust=0.01)
    warmed(model, optimizer, h)
    asked = traced(model, optimizer, h)[0]
    numbers = 2 * len(WIDTHS[1:])  # a sum and a count of each layer, which come together
    assert asked["aten::item"] + asked["aten::_local_scalar_dense"] <= 2 * numbers


def test_diagonal_corrections_wait_once_for_all_layers():
    model, h = network(), torch.randn(ROWS, WIDTHS[0])
    form = prong.Explicit(plus=True)
    optimizer = prong.PRONG(model, lr=1e-3, form=form, refresh=RARELY, trust=None)
    warmed(model, optimizer, h)
    assert traced(model, optimizer, h)[0]["aten::item"] == 1, "whether what they divide by is finite"
    model(h).square().mean().backward()
    assert traced(model, optimizer, h)[0]["aten::item"] == 1, "also when gradients of several passes are added up"


@pytest.mark.parametrize("rows", [32, 512], ids=["activation space", "gradient space"])
def test_an_update_allocates_whitened_inputs_or_gradients_beside_what_sgd_does(rows):
    h = torch.randn(rows, WIDTHS[0])
    plain, model = network(), network()
    sgd = torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9)
    natural = prong.PRONG(model, lr=1e-3, form="implicit", refresh=RARELY, trust=None)
    warmed(plain, sgd, h)
    warmed(model, natural, h)
    extra = traced(model, natural, h)[1] - traced(plain, sgd, h)[1]
    numbers = sum(min(rows, outputs) * inputs for inputs, outputs in pairwise(WIDTHS))
    assert 4 * numbers < extra <= 4 * numbers + SMALL, "no outer product is written down, nothing is copied"
