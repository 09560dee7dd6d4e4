"""The paper's autoencoder on full MNIST: the figures that the design asks for, one seed, 600 updates of 128."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import prong
from prong.lab.data import load_mnist
from prong.lab.models import autoencoder
from prong.lab.tasks.reconstruction import reconstruction_errors
from prong.lab.training import minibatches

SHARED = Path(__file__).parents[2] / "shared" / "data"
FOLDER = Path(os.environ["PRONG_DATA"]) if os.environ.get("PRONG_DATA") else SHARED
UPDATES, SAMPLES = 600, 12_800


@pytest.fixture(scope="module")
def digits():
    if not FOLDER.is_dir():
        pytest.skip("full MNIST is not here; set PRONG_DATA to a folder with its four IDX files")
    return load_mnist(FOLDER).train


def rate(update: int) -> float:
    """Linear warm-up over 50 updates, then constant, then linear decay over the last half."""
    return min(1.0, (update + 1) / 50, 2 * (1 - update / UPDATES))


def error_after_training(digits, make, eps):
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    model = autoencoder()
    optimizer = make(model)
    prong.initialize_(model, torch.split(digits[:SAMPLES], 1280), prong.Absolute(eps))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for x in islice(minibatches(digits, 128, seed=0), UPDATES):
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(x), x, reduction="sum").div(len(x)).backward()
        optimizer.step()
        scheduler.step()
    return reconstruction_errors(model, digits)["squared_error"]


def paper(eps, **options):
    """The paper's damping and no bound on steps."""
    refresh = prong.Every(200, samples=SAMPLES)
    return {"damping": prong.Absolute(eps), "refresh": refresh, "trust": None, **options}


def test_prong_reaches_an_error_of_9(digits):
    error = error_after_training(
        digits, lambda m: prong.PRONG(m, 5e-4, nesterov=True, **paper(3e-3, form="implicit")), 3e-3
    )
    assert error <= 9.0


def test_adam_in_whitened_coordinates_reaches_an_error_of_8(digits):
    error = error_after_training(digits, lambda m: prong.AdamW(m, 3e-3, weight_decay=0, **paper(0.1)), 0.1)
    assert error <= 8.0
