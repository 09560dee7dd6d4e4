"""Saving and resuming at any update continues bit for bit as if never stopped."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import prong
from prong.attachment import attachment_of
from tests.training import (
    FORMS,
    OPTIMIZERS,
    attentive,
    batches,
    canonical,
    convnet,
    mlp,
    refresher_of,
    resume,
    run,
    tensors,
    through_a_file,
)

EXACT = {"rtol": 0.0, "atol": 0.0}
EVERY_8 = prong.Every(8, samples=40)
OPTIONS = {
    **{name: (make.func, make.keywords) for name, make in OPTIMIZERS.items()},
    "ema": (prong.PRONG, {"refresh": prong.Every(8, samples=40, source="ema")}),
    "plus": (prong.PRONG, {"form": prong.Explicit(plus=True)}),
    "empirical": (prong.PRONG, {"outputs": prong.WhitenOutputs("empirical")}),
    "categorical": (prong.PRONG, {"outputs": prong.WhitenOutputs("categorical")}),
    "nesterov, reset": (prong.PRONG, {"nesterov": True, "refresh": prong.Every(8, samples=40, state="reset")}),
    "AdamW, natural": (prong.AdamW, {"space": "natural"}),
    "AdamW, amsgrad, zca": (prong.AdamW, {"amsgrad": True, "form": prong.Materialised("zca")}),
    "drift": (prong.AdamW, {"refresh": prong.OnDrift(samples=40)}),
    **{
        f"{name}, lag": (make.func, make.keywords | {"refresh": prong.Every(8, samples=40, lag=3)})
        for name, make in OPTIMIZERS.items()
    },
}


def made(kind, options, model):
    torch.manual_seed(0)
    return model, kind(model, 0.02, **{"refresh": EVERY_8, **options})


def attached(kind, options, model):
    """An optimizer of torch's, or somebody's."""
    torch.manual_seed(0)
    return model, prong.attach(model, kind(model.parameters()), **options)


@pytest.mark.parametrize(("kind", "options"), OPTIONS.values(), ids=OPTIONS)
def test_resuming_equals_never_having_stopped(kind, options):
    """Windows are open after some of these updates and closed after others; after 8 and 9, a lag is under way."""
    resume(mlp, partial(made, kind, options), batches(mlp(), 17), [0, 1, 3, 5, 8, 9, 13])


@pytest.mark.parametrize(("kind", "options"), OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("model_of", "size"), [(mlp, 2), (convnet, 8)], ids=["thin", "convnet"])
def test_convolutions_resume_and_windows_of_fewer_rows_than_inputs(model_of, size, kind, options):
    resume(model_of, partial(made, kind, options), batches(model_of(), 12, size), [3, 6, 9])


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_in_half_precision_resumes(make):
    half = partial(mlp, dtype=torch.bfloat16)
    resume(half, partial(made, make.func, make.keywords), batches(half(), 17), [3, 5, 9])


ATTENTIONS = {"packed": attentive, "separate": partial(attentive, 4)}
LONG = {"refresh": prong.Every(8, samples=400)}  # five updates of 16 x 5 tokens
PLUS = {"PRONG-plus": partial(prong.PRONG, form=prong.Explicit(plus=True))}


@pytest.mark.parametrize("make", (OPTIMIZERS | PLUS).values(), ids=OPTIMIZERS | PLUS)
@pytest.mark.parametrize("model_of", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_resumes_inside_a_window(model_of, make):
    begin = partial(made, make.func, make.keywords | LONG)
    for saved in resume(model_of, begin, batches(model_of(), 17), [5, 7, 14]).values():
        layers = saved["prong"]["layers"]
        assert layers.keys() == {"attention.q", "attention.k", "attention.v", "attention.out_proj", "head"}
        assert all("whitening" in layer and layer["window"]["count"] > 0 for layer in layers.values())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model_of", [mlp, convnet, *ATTENTIONS.values()], ids=["mlp", "convnet", *ATTENTIONS])
def test_training_with_a_loader_resumes(model_of, form):
    source = batches(model_of(), 4, seed=5)
    options = {"form": form, "refresh": prong.Every(8, samples=48, source=source)}
    states = resume(model_of, partial(made, prong.PRONG, options), batches(model_of(), 12), [0, 1, 3, 8])
    for stop, saved in states.items():
        for layer in saved["prong"]["layers"].values():
            assert ("whitening" in layer) == (stop > 0) and "window" not in layer


class Strange(torch.optim.Optimizer):
    """Of nobody's: an average of gradients, and entries that no one knows."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["exp_avg"] = 0.9 * state.get("exp_avg", 0) + 0.1 * p.grad
                state["seen"] = state.get("seen", 0) + p.grad.square()
                p.sub_(group["lr"] * state["exp_avg"] / (state["seen"].sqrt() + 1e-3))


@pytest.mark.parametrize("refresh", [EVERY_8, prong.Every(8, samples=40, lag=3)], ids=["now", "lag"])
@pytest.mark.parametrize("form", ["auto", "explicit", "materialised"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, Strange])
def test_optimizers_of_others_resume(kind, form, refresh):
    options = {"form": form, "refresh": refresh}
    resume(mlp, partial(attached, kind, options), batches(mlp(), 12), [1, 4, 5, 9])


@pytest.mark.parametrize("kind", [prong.PRONG, prong.AdamW], ids=["PRONG", "AdamW"])
def test_blocks_that_were_chosen_at_the_first_batch_stay_whatever_the_batch_after_a_resume(kind):
    def wide(seed=0):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 80), nn.Tanh(), nn.Linear(80, 4)).double()

    data = batches(wide(), 14, size=4)
    data[9:] = batches(wide(), 5, size=200)
    states = resume(wide, partial(made, kind, {"form": prong.Auto(time=0.2, memory=10.0)}), data, [0, 3, 9])
    key = "rank" if kind is prong.PRONG else "block"  # natural gradients of few directions, or V in blocks
    chosen = {stop: saved["prong"]["layers"]["2"][key] for stop, saved in states.items()}
    assert chosen[0] is None and chosen[3] == chosen[9] and 1 < chosen[3] < 80


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_are_loaded_count_whenever_that_is(form):
    """Before the first forward, between a refresh and a step, after steps, and before the optimizer's own state."""
    data, other = batches(mlp(), 12), mlp(seed=5).state_dict()
    for stop in (0, 3, 8):
        for how in ("plain", "by hand", "saved after", "saved before"):
            model, optimizer = made(prong.PRONG, {"form": form, "momentum": 0.0, "refresh": prong.Never()}, mlp())
            if stop:
                prong.refresh_(model, data[0][0])
            run(model, optimizer, data[:stop])
            if how == "saved before":
                state = through_a_file(optimizer.state_dict())
            model.load_state_dict(other)
            if how == "by hand":
                prong.refresh_(model, data[0][0])
            if how == "saved after":
                state = through_a_file(optimizer.state_dict())
            if how.startswith("saved") and form != "explicit":  # whose parameters are in the optimizer's state
                model, optimizer = made(prong.PRONG, {"form": form, "refresh": prong.Never()}, mlp(seed=7))
                model.load_state_dict(other)
                optimizer.load_state_dict(state)
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            run(model, optimizer, data[stop : stop + 1])
            torch.testing.assert_close(canonical(model), dict(other), rtol=1e-9, atol=1e-9)


def test_settings_of_the_schedule_are_restored_as_learning_rates_are():
    options = {"damping": 0.3, "refresh": prong.Every(8, samples=40, lag=2, growth=None)}
    _, optimizer = made(prong.PRONG, options, mlp())
    other = prong.PRONG(mlp(), 0.5, damping=prong.Absolute(1.0), refresh=prong.Every(3, samples=10))
    other.load_state_dict(optimizer.state_dict())
    refresher = refresher_of(other)
    assert refresher.damping == 0.3 and refresher.timetable.options == options["refresh"]
    assert other.param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("form", FORMS)
def test_a_folded_model_says_that_its_optimizer_cannot_load(form):
    model, optimizer = made(prong.PRONG, {"form": form}, mlp())
    state = optimizer.state_dict()
    prong.fold_(model)
    with pytest.raises(ValueError, match="folded"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_state_is_a_copy_that_later_updates_do_not_change(make):
    data = batches(mlp(), 6)
    model, optimizer = made(make.func, make.keywords, mlp())
    run(model, optimizer, data[:3])
    state = optimizer.state_dict()
    before = through_a_file(state["prong"])
    run(model, optimizer, data[3:])
    torch.testing.assert_close(tensors(state["prong"]), tensors(before), **EXACT)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_state_of_torchs_own_is_a_start_without_whitening(make):
    """From there on it is what it would be if that optimizer were continued, until the first refresh."""
    if make.func is prong.Muon:
        pytest.skip("torch's own has other groups")
    own = {prong.PRONG: partial(torch.optim.SGD, momentum=0.9), prong.AdamW: torch.optim.AdamW}[make.func]
    data, theirs = batches(mlp(), 16), mlp()
    plain = own(theirs.parameters(), lr=0.01)
    run(theirs, plain, data[:4])
    model, optimizer = made(make.func, make.keywords, mlp(seed=3))
    run(model, optimizer, data[:3])  # whitened before, and not any more after
    model.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(through_a_file(plain.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 0.01
    x, _ = data[4]
    same = {"rtol": 1e-9, "atol": 1e-9} if make.keywords["form"] == "explicit" else EXACT  # its weights came by V and d
    torch.testing.assert_close(model(x), theirs(x), **same)
    refresher_of(optimizer).timetable.options = prong.Never()
    run(theirs, plain, data[4:8])
    run(model, optimizer, data[4:8])
    torch.testing.assert_close(canonical(model), canonical(theirs), **same)
    refresher_of(optimizer).refresh([x])
    run(model, optimizer, data[8:])
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_a_state_of_another_model_is_refused_and_changes_nothing(form):
    data = batches(mlp(), 3)
    model, optimizer = made(prong.PRONG, {"form": form}, mlp())
    run(model, optimizer, data)
    before, state = canonical(model), through_a_file(optimizer.state_dict())
    wide = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 4)).double()
    deep = nn.Sequential(*mlp()[:4], nn.Linear(7, 5).double())
    outputs = {"outputs": prong.WhitenOutputs("empirical")}
    others = {
        "another last layer, no momentum to betray it": _trained(deep, form, momentum=0.0),
        "other parameters": prong.PRONG(convnet(), 0.1, form=form).state_dict(),
        "another model": _trained(wide, form),
        "layers": _trained(mlp(), "materialised" if form == "explicit" else "explicit"),
        "drift": _trained(mlp(), form, refresh=prong.OnDrift()),
        "gradient whitening": _trained(mlp(), "implicit" if form == "auto" else form, **outputs)
        if form != "materialised"
        else None,
    }
    for message, other in others.items():
        if other is None:
            continue
        with pytest.raises(ValueError, match=r"parameters|model|form|gradient whitening|training with"):
            optimizer.load_state_dict(other)
        torch.testing.assert_close(canonical(model), before, **EXACT)
        now = optimizer.state_dict()
        torch.testing.assert_close(now["state"], state["state"], **EXACT, msg=message)
        torch.testing.assert_close(tensors(now["prong"]), tensors(state["prong"]), **EXACT, msg=message)


def _trained(model, form, **options):
    optimizer = prong.PRONG(model, 0.02, **{"form": form, "refresh": EVERY_8, **options})
    run(model, optimizer, batches(model, 3))
    return optimizer.state_dict()


PLUS_FORM = {"form": prong.Explicit(plus=True)}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (PLUS_FORM, {"form": "explicit"}),
        ({"form": "explicit"}, PLUS_FORM),
        ({}, {"refresh": prong.Every(8, samples=40, source="ema")}),
        ({"refresh": prong.Every(8, samples=40, source=[torch.randn(8, 6).double()])}, {}),
    ],
)
def test_a_state_of_another_kind_of_training_is_refused(saved, loaded):
    model, optimizer = made(prong.PRONG, saved, mlp())
    run(model, optimizer, batches(model, 3))
    _, target = made(prong.PRONG, loaded, mlp())
    before = tensors(target.state_dict()["prong"])
    with pytest.raises(ValueError, match="of training with"):
        target.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(tensors(target.state_dict()["prong"]), before, **EXACT)
    assert attachment_of(target).refresher.updates == 0
