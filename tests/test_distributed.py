"""Several workers, under a real torchrun: they train as one process with the whole batch does, and fail together.

One launch per number of workers runs everything in `distributed_scenarios` and `distributed_behaviour`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prong.core import moments
from prong.core.moments import Moments
from prong.distributed.exchange import owners
from prong.refresh.factorise import _symmetric, _triangle
from tests.distributed_behaviour import BEHAVIOUR
from tests.distributed_scenarios import CORE, EVERY_ROW, SCENARIOS, Place

ROOT = Path(__file__).parents[1]
FOUR = pytest.mark.slow
AGREED = [(2, name) for name in CORE] + [pytest.param(4, name, marks=FOUR) for name in SCENARIOS]
BEHAVED = [(2, name) for name in BEHAVIOUR] + [pytest.param(4, name, marks=FOUR) for name in BEHAVIOUR]
FLOAT32 = 1e-4  # relative to the largest parameter of a tensor; products over parts are added up in another order
FLOAT64 = 1e-10


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every rank of so many has returned, by name; run once."""
    folders: dict[int, Path] = {}

    def results(size: int, name: str) -> list[Any]:
        if size not in folders:
            folders[size] = tmp_path_factory.mktemp(f"ranks{size}")
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
            names = [*(CORE if size == 2 else SCENARIOS), *BEHAVIOUR]
            command = [*torchrun, "-m", "tests.distributed_worker", str(folders[size]), *names]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280 if size == 2 else 1500
            )
            assert done.returncode == 0, done.stderr
        found = [torch.load(folders[size] / f"{name}.{rank}.pt", weights_only=True) for rank in range(size)]
        for rank, result in enumerate(found):
            assert not (isinstance(result, str) and result.startswith("Traceback")), f"rank {rank}: {result}"
        return found

    return results


@pytest.mark.parametrize(("size", "name"), AGREED)
def test_workers_train_as_one_process_with_the_whole_batch(launched, size, name, monkeypatch):
    """After 100 updates and three refreshes or more; and all workers have the same bits."""
    first, *others = launched(size, name)
    for other in others:
        assert_same(other, first)
    monkeypatch.setattr(moments, "LEAST", EVERY_ROW)
    for key, expected in SCENARIOS[name](Place()).items():
        bound = FLOAT64 if expected.dtype == torch.float64 else FLOAT32
        off = (first[key] - expected).abs().max() / expected.abs().max()
        assert off < bound, f"{key} is off by {off:.1e}"


@pytest.mark.parametrize(("size", "name"), BEHAVED)
def test_workers_agree_that(launched, size, name):
    """Each behaviour is checked on every rank, and what they return is the same on all."""
    first, *others = launched(size, name)
    for other in others:
        assert_same(other, first)


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Nested states are equal to the bit."""
    assert type(left) is type(right), where
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same(left[key], right[key], f"{where}/{key}")
    elif isinstance(left, torch.Tensor):
        torch.testing.assert_close(left, right, rtol=0, atol=0, msg=lambda m: f"{where}: {m}")
    else:
        assert left == right, where


@given(costs=st.lists(st.floats(0, 1e6), max_size=20), size=st.integers(1, 6))
def test_no_rank_has_more_than_its_share_and_one_piece_beyond(costs, size):
    """The bound of longest-first scheduling: the busiest rank has at most the mean load and the largest piece."""
    owner = owners(dict(enumerate(costs)), size)
    assert set(owner) == set(range(len(costs)))
    loads = [sum(costs[piece] for piece, rank in owner.items() if rank == r) for r in range(size)]
    assert max(loads) <= sum(costs) / size + max(costs, default=0.0) + 1e-6


@given(rows=st.integers(0, 12), groups=st.integers(1, 3), features=st.integers(1, 6))
def test_a_packed_triangle_holds_the_scatter_about_any_mean(rows, groups, features):
    data = torch.randn(groups, rows, features, dtype=torch.float64) + 3
    seen = Moments(groups, features, torch.float64)
    seen.add(data)
    mean = torch.randn(groups, features, dtype=torch.float64)
    centred = data - mean.unsqueeze(1)
    packed = _triangle(seen, mean)
    assert packed.shape == (groups, features * (features + 1) // 2)
    torch.testing.assert_close(_symmetric(packed, mean), centred.mT @ centred)


@pytest.mark.slow
def test_the_script_of_the_documentation_runs(tmp_path):
    page = (ROOT / "docs" / "distributed.md").read_text()
    script = re.search(r'```python title="train.py"\n(.*?)```', page, re.DOTALL)
    assert script is not None
    (tmp_path / "train.py").write_text(script[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    saved = torch.load(tmp_path / "last.pt", weights_only=True)
    assert saved["optimizer"]["prong"]["updates"] == 32
