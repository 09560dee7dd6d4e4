"""Rows of `prong bench untuned`: made once, whole, and telling what was lost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from prong.lab.bench import problems, untuned
from prong.lab.cli import main


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Runs the command on a shortened problem; returns what is in its file."""
    short = {name: replace(problem, updates=40) for name, problem in problems.PROBLEMS.items()}
    monkeypatch.setattr(untuned, "PROBLEMS", short)
    path = tmp_path / "rows.jsonl"

    def made(*words: str) -> list[dict]:
        main(["bench", "untuned", "--problems", "table", "--seeds", "1", "--json", str(path), *words])
        return [json.loads(line) for line in path.read_text().splitlines()]

    made.path = path
    return made


def test_rows_are_made_once_and_a_torn_one_again(rows):
    first = rows("--methods", "prong-adamw", "adamw", "--rates", "0.01")
    assert [(row["method"], row["lost"]) for row in first] == [("prong-adamw", None), ("adamw", None)]
    assert all(list(row["measured"]) == [str(n) for n in range(41)] and row["commit"] for row in first)
    assert first[0]["measured"]["40"] < first[0]["measured"]["0"]
    whole, _, last = rows.path.read_text().rstrip().rpartition("\n")
    rows.path.write_text(f"{whole}\n{last[:50]}")
    again = rows("--methods", "prong-adamw", "adamw", "--rates", "0.01")
    assert [row["measured"] for row in again] == [row["measured"] for row in first]
    assert len(rows("--methods", "sgd", "--rates", "0.01")) == 3


def test_a_run_that_overflows_is_a_row_that_says_so(rows):
    (row,) = rows("--methods", "sgd", "--rates", "1e20")
    assert "finite" in row["lost"] and untuned.last(row) == row["measured"]["0"]


def test_the_clock_counts_whole_runs_side_by_side(rows, capsys):
    (row,) = rows("--methods", "adamw", "prong-adamw", "--clock", "2")
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in row["seconds"].values())
    assert min(min(each) for each in row["longest"].values()) >= 1
    assert "1.000" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["convolutional", "variational", "sigmoid", "autoencoder", "transformer"])
def test_every_problem_has_a_finite_loss_with_gradients(name, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    pixels, labels = torch.rand(1200, 784, generator=generator), torch.randint(10, (1200,), generator=generator)
    monkeypatch.setattr(problems, "digits", lambda: problems.Digits(pixels, pixels, labels, labels, "made up"))
    characters = torch.randint(65, (9000,), generator=generator)
    monkeypatch.setattr(problems, "text", lambda: (characters, characters[:2000]))
    problem = problems.PROBLEMS[name]
    model = problem.model()
    problem.loss(model, problem.batch(generator)).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert problem.measure(model) > 0


def test_rates_rise_stay_and_fall():
    problem = replace(problems.PROBLEMS["autoencoder"], updates=100, warm_up=4)
    assert [problem.rate(update) for update in (0, 4, 49, 75, 99)] == pytest.approx([0.2, 1, 1, 0.5, 0.02])
