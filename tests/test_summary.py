"""prong.summary: what is whitened, what is not and why, and what it costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import prong
from prong.core.moments import accumulation_dtype
from tests.cases import FORMS, MODELS, SPECS, VIEWS, attached
from tests.training import site_of

forms = pytest.mark.parametrize("form", FORMS)
every_form = pytest.mark.parametrize("form", [*FORMS, *VIEWS])


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
    assert "not asked for" in rows["left"].note
    assert "tied" in rows["head"].note


@every_form
def test_a_summary_tells_in_which_form_an_optimizer_whitens(form):
    model = Zoo()
    with pytest.warns(UserWarning, match="'head'"):
        _optimizer = attached(model, form)
    whitened = "implicit" if form == "auto" else form  # which is the cheapest for SGD
    assert [row.whitened for row in prong.summary(model)] == ["no", whitened, "no", whitened, "no"]
    assert ("chosen at the first batch" in prong.summary(model)[1].note) == (form == "auto")
    model(torch.arange(7))
    assert prong.summary(model)[1].note == "identity until the first refresh"


HELD = {  # matrices, vectors (without c P in half precision), and whether V and d are held beside W and b
    "implicit": (2, 2, 0),  # P and its inverse, by which steps are measured; c and c P
    "explicit": (2, 1, 0),  # U and its inverse; c
    "auto": (1, 2, 0),  # P; c and c P
    "materialised": (1, 1, 1),  # U; c; V and d
}


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_memory_is_that_of_whitening_matrices_and_whitened_parameters(form, dtype):
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2, bias=False)).to(dtype)
    _optimizer = attached(model, form)
    matrices, vectors, own = HELD[form]
    assert [row.memory for row in prong.summary(model)] == [own * 18 * dtype.itemsize, own * 6 * dtype.itemsize]
    prong.refresh_(model, torch.randn(20, 5).to(dtype))
    exact = form in ("explicit", "materialised")  # rounding U would change the function
    size = (accumulation_dtype(dtype) if exact else dtype).itemsize
    vectors = 1 if dtype == torch.bfloat16 else vectors
    with_mean = (matrices * 25 + vectors * 5) * size + own * 18 * dtype.itemsize
    without_mean = matrices * 9 * size + own * 6 * dtype.itemsize
    assert [row.memory for row in prong.summary(model)] == [with_mean, without_mean]
    assert [row.note for row in prong.summary(model)] == ["", ""]


@every_form
def test_memory_of_open_windows_is_counted(form):
    model = nn.Sequential(nn.Linear(5, 3))
    _optimizer = prong.PRONG(model, lr=0.1, form=form)
    *_, own = HELD[form]
    for rows, held in ((2, 2), (20, 5)):  # a thin factor first, then the scatter matrix
        model(torch.randn(rows, 5))
        (row,) = prong.summary(model)
        assert row.memory == (5 + held * 5 + own * 18) * 4
        assert "gathering statistics" in row.note


@every_form
def test_groups_and_attention_tell_the_sizes_of_their_inputs(form):
    model = nn.ModuleDict(
        {
            "conv": SPECS["conv2d"].build(),
            "same": nn.MultiheadAttention(8, 2),
            "other": nn.MultiheadAttention(8, 2, kdim=4, vdim=6),
        }
    )
    _optimizer = attached(model, form)
    rows = {row.name: row for row in prong.summary(model)}
    assert rows["conv"].inputs == "2 x 2 groups"
    assert rows["same"].inputs == "8"
    assert rows["other"].inputs == "8/4/6"
    assert rows["same.out_proj"].inputs == "8"
    assert rows["same"].parameters == 3 * 64 + 24


@every_form
def test_memory_of_attention_counts_what_its_three_sites_do_not_share(form):
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    _optimizer = attached(layer, form)
    x, y = torch.randn(2, 6, 4, 8)
    matrices, vectors, own = HELD[form]
    one, parameters = (matrices * 64 + vectors * 8) * 4, own * (64 + 8) * 4
    prong.refresh_(layer, [x], forward=lambda m, b: m(b, b, b))
    assert [row.memory for row in prong.summary(layer)] == [one + 3 * parameters, one + parameters]
    prong.refresh_(layer, [x], forward=lambda m, b: m(b, y, y))
    assert [row.memory for row in prong.summary(layer)] == [2 * one + 3 * parameters, one + parameters]


@forms
def test_frozen_layers_and_lazy_ones_and_the_model_itself_are_named(form):
    layer = prong.whiten_(nn.Linear(3, 2), form).requires_grad_(False)
    (row,) = prong.summary(layer)
    assert row.name == "(model)" and "frozen" in row.note
    (lazy,) = prong.summary(nn.LazyLinear(3))
    assert lazy.parameters == 0 and "lazy" in lazy.note


@every_form
def test_the_printed_table_contains_the_rows_and_the_totals(form):
    model = MODELS["net"].build()
    _optimizer = attached(model, form)
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


@every_form
def test_a_summary_changes_nothing(form):
    model = MODELS["mlp"].build()
    _optimizer = attached(model, form)
    prong.refresh_(model, MODELS["mlp"].sample(9))
    before = [p.clone() for p in model.parameters()]
    assert str(prong.summary(model)) == str(prong.summary(model))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


LOOKS = {
    "summary": lambda model, _: prong.summary(model),
    "state": lambda _, optimizer: optimizer.state_dict(),
    "another precision": lambda model, _: model.double(),
}


@every_form
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_what_an_update_has_added_is_taken_back_when_it_fails_after_a_look_at_it(form, look):
    model = nn.Sequential(nn.Linear(5, 3))
    optimizer = prong.PRONG(model, lr=0.1, form=form)
    model(torch.randn(4, 5))
    look(model, optimizer)
    assert not site_of(model).window.empty
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(4, 6).to(next(model.parameters())))
    assert site_of(model).window.empty
