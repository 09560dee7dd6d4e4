"""What the tests of the lab's commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.digits import contents, write_files
from tests.lab.tiny import tiny_autoencoder


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a little MNIST, which commands find."""
    write_files(tmp_path / "data", contents(train=160, test=20))
    monkeypatch.setenv("PRONG_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def small_autoencoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands train a small model instead of the paper's."""

    for module in ("racing.race", "experiments.autoencoder", "experiments.sensitivity"):
        monkeypatch.setattr(f"prong.lab.{module}.autoencoder", tiny_autoencoder)
