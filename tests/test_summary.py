"""prong.summary: what is whitened, what is not and why, and what it costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import prong
from prong.core.moments import accumulation_dtype
from tests.cases import FORMS, MODELS, SPECS

forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Zoo(nn.Module):
    """A layer of every sort that a summary has something to say about."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.act = nn.ReLU()
        self.left = nn.Linear(6, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.left(self.act(self.norm(self.body(self.embed(tokens))))))


@forms
def test_a_summary_has_a_row_per_layer_with_parameters_and_the_reason_where_it_is_not_whitened(form):
    model = Zoo()
    prong.whiten_(model, form, layers="body")
    rows = {row.name: row for row in prong.summary(model)}
    assert list(rows) == ["embed", "body", "norm", "left", "head"]
    assert [row.whitened for row in rows.values()] == ["no", form, "no", "no", "no"]
    assert [row.kind for row in rows.values()] == ["Embedding", "Linear", "BatchNorm1d", "Linear", "Linear"]
    assert [row.parameters for row in rows.values()] == [28, 30, 12, 28, 28]
    assert "its type is Embedding" in rows["embed"].note
    assert "identity until the first refresh" in rows["body"].note
    assert "whiten_ did not take it" in rows["left"].note
    assert "tied" in rows["head"].note


HELD = {"implicit": (1, 2), "explicit": (2, 1)}  # P, c and c P (not in half precision); U, its inverse and c


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_memory_is_that_of_the_whitening_matrices(form, dtype):
    model = prong.whiten_(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2, bias=False)).to(dtype), form)
    assert [row.memory for row in prong.summary(model)] == [0, 0]
    prong.refresh_(model, torch.randn(20, 5).to(dtype))
    kept = accumulation_dtype(dtype) if form == "explicit" else dtype  # rounding U would change the function
    size = torch.empty(0, dtype=kept).element_size()
    matrices, vectors = HELD[form]
    vectors = 1 if dtype == torch.bfloat16 else vectors
    with_mean, without_mean = (matrices * 25 + vectors * 5) * size, matrices * 9 * size
    assert [row.memory for row in prong.summary(model)] == [with_mean, without_mean]
    assert [row.note for row in prong.summary(model)] == ["", ""]


@forms
def test_memory_of_open_windows_is_counted(form):
    model = nn.Sequential(nn.Linear(5, 3))
    prong.PRONG(model, lr=0.1, form=form)
    for rows, held in ((2, 2), (20, 5)):  # a thin factor first, then the scatter matrix
        model(torch.randn(rows, 5))
        (row,) = prong.summary(model)
        assert row.memory == (5 + held * 5) * 4
        assert "gathering statistics" in row.note


@forms
def test_groups_and_attention_tell_the_sizes_of_their_inputs(form):
    model = nn.ModuleDict(
        {
            "conv": SPECS["conv2d"].build(),
            "same": nn.MultiheadAttention(8, 2),
            "other": nn.MultiheadAttention(8, 2, kdim=4, vdim=6),
        }
    )
    rows = {row.name: row for row in prong.summary(prong.whiten_(model, form))}
    assert rows["conv"].inputs == "2 x 2 groups"
    assert rows["same"].inputs == "8"
    assert rows["other"].inputs == "8/4/6"
    assert rows["same.out_proj"].inputs == "8"
    assert rows["same"].parameters == 3 * 64 + 24


@forms
def test_memory_of_attention_counts_what_its_three_sites_do_not_share(form):
    layer = prong.whiten_(nn.MultiheadAttention(8, 2, batch_first=True), form)
    x, y = torch.randn(2, 6, 4, 8)
    matrices, vectors = HELD[form]
    one = (matrices * 64 + vectors * 8) * 4
    prong.refresh_(layer, [x], forward=lambda m, b: m(b, b, b))
    assert [row.memory for row in prong.summary(layer)] == [one, one]
    prong.refresh_(layer, [x], forward=lambda m, b: m(b, y, y))
    assert [row.memory for row in prong.summary(layer)] == [2 * one, one]


@forms
def test_frozen_layers_and_lazy_ones_and_the_model_itself_are_named(form):
    layer = prong.whiten_(nn.Linear(3, 2), form).requires_grad_(False)
    (row,) = prong.summary(layer)
    assert row.name == "(model)" and "frozen" in row.note
    (lazy,) = prong.summary(nn.LazyLinear(3))
    assert lazy.parameters == 0 and "lazy" in lazy.note


@forms
def test_the_printed_table_contains_the_rows_and_the_totals(form):
    model = prong.whiten_(MODELS["net"].build(), form)
    prong.refresh_(model, MODELS["net"].sample(9))
    summary = prong.summary(model)
    text = str(summary)
    assert text == repr(summary)
    lines = text.splitlines()
    assert lines[0].split() == ["layer", "kind", "whitened", "inputs", "parameters", "whitening", "bytes", "note"]
    assert len(lines) == len(summary) + 4
    for row, line in zip(summary, lines[2:], strict=False):
        for value in (row.name, row.kind, row.whitened, row.inputs, f"{row.parameters:,}", f"{row.memory:,}", row.note):
            assert value in line
    assert f"{sum(row.parameters for row in summary):,}" in lines[-1]
    assert f"{sum(row.memory for row in summary):,}" in lines[-1]
    assert sum(row.parameters for row in summary) == sum(p.numel() for p in model.parameters())
    assert all(line == line.rstrip() for line in lines)


def test_a_model_without_parameters_has_an_empty_table():
    summary = prong.summary(nn.ReLU())
    assert summary == [] and "total" in str(summary)


@forms
def test_a_summary_changes_nothing(form):
    model = prong.whiten_(MODELS["mlp"].build(), form)
    prong.refresh_(model, MODELS["mlp"].sample(9))
    before = [p.clone() for p in model.parameters()]
    assert str(prong.summary(model)) == str(prong.summary(model))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


LOOKS = {
    "summary": lambda model, _: prong.summary(model),
    "state": lambda _, optimizer: optimizer.state_dict(),
    "another precision": lambda model, _: model.double(),
}


@forms
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_what_a_forward_has_added_can_be_taken_back_after_a_look_at_it(form, look):
    model = nn.Sequential(nn.Linear(5, 3))
    optimizer = prong.PRONG(model, lr=0.1, form=form)
    model(torch.randn(4, 5))
    look(model, optimizer)
    optimizer.refresher.undo()
    assert model[0].sites[0].inputs.empty
