"""The experiment on compression: rows within their budgets, and a record of them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from matplotlib.image import imread
from torch import nn

from prong.lab.compression import (
    RULES,
    Setup,
    absorb_means_,
    classifier,
    compare,
    evaluate,
    main,
    table,
    why_not_possible,
)
from tests.lab.digits import small_digits

TINY = Setup(widths=(784, 12, 12, 10), updates=3, batch=8, period=2, samples=40, shares=(0.5, 0.3))


def test_every_rule_makes_networks_within_the_share_and_rows_are_reproducible():
    rows = list(compare(TINY, small_digits(), seeds=(1,)))
    trained, *compressed = rows
    assert [(row.share, row.rule) for row in compressed] == [(s, rule) for s in TINY.shares for rule in RULES]
    assert all(row.parameters <= row.share * trained.parameters for row in compressed)
    assert all(row.flops < trained.flops and 0 <= row.test_error <= 1 for row in compressed)
    assert {len(row.ranks) for row in compressed if "whole" in row.rule} == {2}
    assert list(compare(TINY, small_digits(), seeds=(1,))) == rows


def test_evaluation_is_that_of_a_loop():
    model, x, labels = classifier((784, 6, 10)), torch.rand(7, 784), torch.arange(7)
    loss, error = evaluate(model, x, labels)
    wrong = [int(model(row).argmax()) != int(label) for row, label in zip(x, labels, strict=True)]
    assert error == pytest.approx(sum(wrong) / 7)
    assert loss == pytest.approx(float(nn.functional.cross_entropy(model(x).detach(), labels)))


def test_absorbed_means_are_those_of_the_given_network():
    model = nn.Sequential(nn.Linear(5, 4))
    small = nn.Sequential(nn.Sequential(nn.Linear(5, 1, bias=False), nn.Linear(1, 4)))
    h = torch.rand(20, 5)
    absorb_means_(small, model, h)
    torch.testing.assert_close(small(h).mean(0), model(h).mean(0))


def test_the_command_writes_a_record_and_a_picture(mnist, tmp_path, capsys):
    main(tmp_path / "record.json", tmp_path / "plot.png", seeds=(0, 1), setup=TINY)
    assert imread(tmp_path / "plot.png").ndim == 3
    record = json.loads((tmp_path / "record.json").read_text())
    assert {"config", "commit", "environment", "rows"} <= set(record)
    assert len(record["rows"]) == 2 * (1 + len(TINY.shares) * len(RULES))
    assert table(record) in capsys.readouterr().out
    with pytest.raises(SystemExit, match="two seeds"):
        main(tmp_path / "other.json", seeds=(0,), setup=TINY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shares": (2.0,)}, "shares"),
        ({"shares": (0.5, 0.0)}, "shares"),
        ({"shares": ()}, "shares"),
        ({"shares": (0.5, 0.5)}, "shares"),
        ({"shares": (0.5, 0.001)}, "shares 0.001 .* fewest"),
        ({"samples": 1}, "samples"),
        ({"widths": (100, 10)}, "widths"),
        ({"widths": (784, 10)}, "widths"),
        ({"widths": (784, 0, 10)}, "widths"),
        ({"updates": 0}, "updates"),
        ({"batch": 0}, "batch"),
        ({"batch": 10**6}, "batch"),
        ({"period": 0}, "period"),
        ({"lr": 0.0}, "lr"),
        ({"eps": float("nan")}, "eps"),
    ],
)
def test_what_cannot_be_compressed_is_refused_in_one_line_before_training(
    change, message, mnist, tmp_path, monkeypatch
):
    monkeypatch.setattr("prong.lab.compression.trained", lambda *_: pytest.fail("training began"))
    with pytest.raises(SystemExit, match=rf"^--setup\.{message}") as refused:
        main(tmp_path / "record.json", seeds=(0, 1), setup=replace(TINY, **change))
    assert "\n" not in str(refused.value)


def test_the_smallest_share_that_is_accepted_can_be_reached():
    total = sum(a * b + b for a, b in pairwise(TINY.widths))
    shares = [n / total for n in range(1, total)]
    lowest = next(share for share in shares if why_not_possible(replace(TINY, shares=(share,))) is None)
    rows = list(compare(replace(TINY, shares=(lowest,)), small_digits(), seeds=(1,)))
    assert len(rows) == 1 + len(RULES)
    with pytest.raises(ValueError, match="larger budget"):
        list(compare(replace(TINY, shares=(lowest - 1 / total,)), small_digits(), seeds=(1,)))


def test_the_page_shows_what_was_recorded():
    root = Path(__file__).parents[2]
    record = json.loads((root / "results" / "compression.json").read_text())
    page = (root / "docs" / "spectral.md").read_text()
    assert table(record) in page
    errors = [100 * row["test_error"] for row in record["rows"] if row["rule"] == "as trained"]
    assert f"{mean(errors):.2f} ± {stdev(errors):.2f}" in page
