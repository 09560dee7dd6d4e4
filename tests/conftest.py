"""What all tests share: a seed, and how hypothesis looks for examples."""

from __future__ import annotations

import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "prong", deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("prong")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores Ctrl-C for what it runs in the background


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch.set_flush_denormal(False)  # the lab's commands set it for their process
