"""Tasks: the pictures that are trained on, those that are held out, and what is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import prong
from prong.lab.cifar import CLASSES, Pictures
from prong.lab.tasks import pictures as module
from prong.lab.tasks.conditioning import SmallDigits, pooled
from prong.lab.tasks.pictures import Classification, central_crops, random_crops
from prong.lab.tasks.reconstruction import Reconstruction, reconstruction_errors
from tests.lab.digits import contents, write_files


def coloured(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)


SMALL = Pictures(coloured(60, 0), coloured(20, 1), torch.arange(60) % 10, torch.arange(20) % 10, CLASSES, "noise")


def small_net(batch_norm: bool = False) -> nn.Sequential:
    norm = [nn.BatchNorm2d(4)] if batch_norm else []
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), *norm, nn.ReLU(), nn.Conv2d(4, 10, 3), nn.AdaptiveMaxPool2d(1), nn.Flatten()
    )


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Classification:
    monkeypatch.setattr(module, "load_cifar10", lambda folder: SMALL)
    return Classification(small_net, tmp_path, held_out=10)


@given(n=st.integers(1, 4), side=st.integers(5, 9), size=st.integers(1, 5), seed=st.integers(0, 99))
def test_a_random_crop_is_a_window_of_its_picture_or_its_mirror_image(n: int, side: int, size: int, seed: int) -> None:
    pictures = torch.arange(n * 3 * side * side).view(n, 3, side, side)
    crops = random_crops(pictures, size, torch.Generator().manual_seed(seed))
    assert crops.shape == (n, 3, size, size)
    for picture, crop in zip(pictures, crops, strict=True):
        spots = range(side - size + 1)
        windows = [picture[:, r : r + size, c : c + size] for r in spots for c in spots]
        assert any(torch.equal(crop, w) or torch.equal(crop, w.flip(-1)) for w in windows)


def test_crops_are_everywhere_and_half_of_them_mirrored() -> None:
    picture = torch.arange(3 * 32 * 32).view(1, 3, 32, 32).expand(2000, 3, 32, 32)
    crops = random_crops(picture, 24, torch.Generator().manual_seed(0))
    mirrored = crops[:, 0, 0, 0] > crops[:, 0, 0, 1]
    assert 0.45 < mirrored.float().mean() < 0.55
    corners = torch.where(mirrored, crops[:, 0, 0, -1], crops[:, 0, 0, 0])
    assert len(set(corners.tolist())) == 81


def test_the_middle_is_the_middle() -> None:
    pictures = coloured(2, 0)
    assert torch.equal(central_crops(pictures, 24), pictures[:, :, 4:28, 4:28])


def test_held_out_pictures_are_not_trained_on(task: Classification) -> None:
    assert task.count == 50 and "the last 10 training pictures" in task.source
    measures = task.measure(task.build(), 1000)
    assert set(measures) == {f"{p}_{m}" for p in ("train", "validation", "test") for m in ("error", "cross_entropy")}


def test_pictures_are_normalised_by_those_that_are_trained_on(task: Classification) -> None:
    pixels = SMALL.train[:50].double()
    mean, deviation = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3), correction=0)
    x = task._prepared(SMALL.test)
    expected = (SMALL.test.double() - mean.view(3, 1, 1)) / deviation.view(3, 1, 1)
    assert torch.allclose(x.double(), expected, atol=1e-5)
    assert x.is_contiguous(memory_format=torch.channels_last)


def test_errors_are_those_of_a_loop_over_pictures(task: Classification) -> None:
    model = task.build()
    measured = task.measure(model, 1000)
    wrong, entropy = 0, 0.0
    for picture, label in zip(SMALL.test, SMALL.test_labels, strict=True):
        logits = model(task._prepared(central_crops(picture[None], 24)))
        wrong += int(logits.argmax() != label)
        entropy += F.cross_entropy(logits, label[None]).item()
    assert measured["test_error"] == pytest.approx(wrong / 20)
    assert measured["test_cross_entropy"] == pytest.approx(entropy / 20, rel=1e-4)


def test_an_update_has_the_same_crops_whenever_it_is_made(task: Classification) -> None:
    chosen = torch.arange(7)
    first, again, other = (task.batch(chosen, torch.Generator().manual_seed(s))[0] for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == (7, 3, 24, 24) and torch.equal(
        task.batch(chosen, torch.Generator())[1], SMALL.train_labels[:7]
    )


def test_the_fisher_is_looked_at_in_the_coordinates_that_are_trained(mnist: Path) -> None:
    task = SmallDigits(width=6, samples=100, folder=mnist)
    torch.manual_seed(0)
    model = task.build()
    canonical = task.block(model, 40)
    prong.whiten_(model)
    assert torch.allclose(task.block(model, 40), canonical), "not whitened yet"
    prong.refresh_(model, task.initial_batches(), prong.Absolute(1e-3))
    spectrum = prong.fisher.spectrum
    assert spectrum(task.block(model, 40)).condition < spectrum(canonical).condition


def test_keepsakes_are_of_the_first_reparametrisation_and_change_nothing(mnist: Path) -> None:
    task = SmallDigits(width=6, samples=100, folder=mnist)
    torch.manual_seed(0)
    model = task.build()
    assert task.keepsakes(model) == {}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prong.whiten_(model)
    kept = task.keepsakes(model)
    assert kept["condition_before"] > kept["condition_after"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_matrix_is_kept_small_by_the_mean_of_each_tile() -> None:
    matrix = torch.zeros(7, 7).double()
    matrix[6, 6], matrix[0, 1], matrix[3, 3] = -5.0, 2.0, 1.23456
    assert pooled(matrix, side=4) == [[0.5, 0, 0, 0], [0, 0.309, 0, 0], [0, 0, 0, 0], [0, 0, 0, 5.0]]


@pytest.mark.parametrize("task", [Reconstruction(), SmallDigits()])
def test_digits_are_of_the_folder_that_the_environment_names_now(
    task: Reconstruction | SmallDigits, mnist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert task.count == 160
    write_files(mnist / "others", contents(train=70))
    monkeypatch.setenv("PRONG_DATA", str(mnist / "others"))
    assert task.count == 70 and "70 training" in task.source


def test_errors_of_half_precision_outputs_are_added_up_in_single(mnist: Path) -> None:
    examples = Reconstruction().digits().train

    class Outputs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (6 * x - 3).bfloat16()

    logits = (6 * examples - 3).bfloat16().double()
    errors = reconstruction_errors(Outputs(), examples)
    squares = (torch.sigmoid(logits) - examples).square().sum().item() / len(examples)
    assert errors["squared_error"] == pytest.approx(squares, rel=1e-5), "bfloat16 would be off by a few thousandths"
