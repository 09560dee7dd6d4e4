"""Scripts of people who know nothing of whitening: with defaults but the learning rate, none is lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import prong
from prong.model.whiten import whitened_layers
from tests.cases import assert_close
from tests.training import batches, canonical, mlp, run

UPDATES = 16
OURS = (prong.PRONG, prong.AdamW, prong.Muon)
FORMED = [(make, form) for make in OURS for form in ("auto", "explicit")] + [(prong.PRONG, "implicit")]


class Conv1D(nn.Module):
    """The transposed linear layer of transformers, by what it is known."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"


class Characters(nn.Module):
    """Predicts the next of 12 characters, from an embedding and whatever comes between it and a head."""

    def __init__(self, body: nn.Module, width: int = 16, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(12, width), body, nn.Linear(width, 12)
        self.mix = nn.Linear(width, width) if isinstance(body, nn.LSTM) else nn.Identity()
        if tied:
            self.head.weight = self.embedding.weight
            nn.init.normal_(self.head.weight, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        z = self.body(self.embedding(tokens))
        return self.head(self.mix(z[0] if isinstance(z, tuple) else z))


class Autoencoder(nn.Module):
    """A variational one, of 20 pixels that are on or off."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 20))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()), mean, log_variance


def negative_bound(model: nn.Module, x: Tensor) -> Tensor:
    z, mean, log_variance = model(x)
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
    return F.binary_cross_entropy_with_logits(z, x, reduction="sum") + kl


def classified(model: nn.Module, x: Tensor, **options: str) -> Tensor:
    labels = x.flatten(1)[:, :4].sub(x.flatten(1).mean(0)[:4]).div(x.flatten(1).std(0)[:4] + 1e-12).argmax(1)
    return F.cross_entropy(model(x), labels, **options)


def next_character(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def rows(n: int) -> Tensor:
    return torch.randn(n, 6) @ torch.linspace(-1, 1, 36).view(6, 6).sin() + torch.randn(n, 6) + 1


def tokens(n: int) -> Tensor:
    starts, steps = torch.randint(12, (n, 1)), torch.randint(1, 3, (n, 1))
    return (starts + steps * torch.arange(9)) % 12


def pixels(n: int) -> Tensor:
    where = torch.rand(n, 1) * 20
    return ((torch.arange(20) - where).abs() < 3 + 2 * torch.rand(n, 1)).float()


def table(n: int) -> Tensor:
    return rows(n) * torch.logspace(-3, 3, 6)


@dataclass(frozen=True)
class Script:
    """What somebody trains, and how."""

    model: Callable[[], nn.Module]
    sample: Callable[[int], Tensor]
    loss: Callable[[nn.Module, Tensor], Tensor]
    clip: float | None = None
    accumulate: int = 1
    scaled: bool = False
    warns: str | None = None


def net(inputs: int = 6, outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, outputs))


def digits() -> nn.Module:
    convolutions = nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 24), nn.ReLU(), nn.Linear(24, 4))


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def sigmoids() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 12), nn.Sigmoid(), nn.Linear(12, 3), nn.Sigmoid(), nn.Linear(3, 20), nn.Sigmoid()
    )


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().sum(1).mean()


SCRIPTS = {
    "clips": Script(net, rows, classified, clip=1.0),
    "sums": Script(net, rows, lambda model, x: classified(model, x, reduction="sum")),
    "sums and clips": Script(net, rows, lambda model, x: classified(model, x, reduction="sum"), clip=1.0),
    "accumulates": Script(net, rows, classified, accumulate=4),
    "scales": Script(net, rows, classified, scaled=True, clip=1.0),
    "VAE": Script(Autoencoder, pixels, negative_bound),
    "sigmoids": Script(sigmoids, pixels, squared),
    "table": Script(net, table, classified),
    "digits": Script(digits, lambda n: torch.rand(n, 1, 12, 12), classified),
    "transformer": Script(lambda: Characters(transformer()), tokens, next_character),
    "tied": Script(lambda: Characters(transformer(), tied=True), tokens, next_character, warns="'head'.*tied"),
    "LSTM": Script(
        lambda: Characters(nn.LSTM(16, 16, batch_first=True)), tokens, next_character, warns=r"only 17%.*body \(LSTM\)"
    ),
    "Conv1D": Script(
        lambda: Characters(nn.Sequential(Conv1D(32, 16), nn.GELU(), Conv1D(16, 32))), tokens, next_character
    ),
}


def train(script: Script, make: Callable[..., torch.optim.Optimizer], lr: float, updates: int = UPDATES) -> Tensor:
    """The loss of each update, by a loop as anybody writes it."""
    model = script.model()
    if script.warns is None:
        optimizer = make(model, lr)
    else:
        with pytest.warns(UserWarning, match=script.warns):
            optimizer = make(model, lr)
    scaler = torch.amp.GradScaler("cpu", enabled=script.scaled)
    data, losses = [script.sample(48) for _ in range(4)], []
    for update in range(updates):
        optimizer.zero_grad()
        total = 0.0
        for i in range(script.accumulate):
            loss = script.loss(model, data[(update + i) % 4]) / script.accumulate
            scaler.scale(loss).backward()
            total += loss.item()
        if script.clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), script.clip)
        scaler.step(optimizer)
        scaler.update()
        losses.append(total)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return torch.tensor(losses)


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize(
    ("name", "lr"), [*((name, 3e-3) for name in SCRIPTS), *((name, 1e-3) for name in ("VAE", "sigmoids", "table"))]
)
def test_nobodys_script_is_lost(name, lr, make):
    losses = train(SCRIPTS[name], make, lr)
    assert torch.isfinite(losses).all()
    assert losses[-4:].mean() < losses[:4].mean(), "of the same four batches"


@pytest.mark.parametrize("make", [prong.PRONG, prong.AdamW])
def test_a_transposed_linear_layer_walks_the_path_of_a_linear_one(make):
    model = nn.Sequential(Conv1D(5, 6), nn.Tanh(), nn.Linear(5, 4)).double()
    other = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    state = {name: x.mT if name == "0.weight" else x for name, x in canonical(model).items()}
    other.load_state_dict(state)
    data = batches(mlp(), 6)
    for each in (model, other):
        run(each, make(each, 0.02, refresh=prong.Every(3, samples=32)), data)
    assert "0" in dict(whitened_layers(model))
    assert_close(model[0].weight.mT, other[0].weight)
    assert_close(model[2].weight, other[2].weight)


class Hollow(nn.Module):
    """Layers that have no inputs, or no outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.to_nothing, self.from_nothing, self.head = nn.Linear(6, 0), nn.Linear(0, 3), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        nothing = self.to_nothing(x)
        return self.head(torch.cat([x, self.from_nothing(nothing)], -1))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize(("make", "form"), FORMED)
def test_layers_without_inputs_or_outputs_are_left_alone(make, form):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Hollow())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "prong leaves as they are: '2.from_nothing'")  # which has a bias to train
        optimizer = make(model, 1e-2, form=form)
    losses = run(model, optimizer, batches(model, 1) * 10)
    assert losses[-1] < losses[0]
    assert list(dict(whitened_layers(model))) == ["0", "2.head"]


def test_it_is_said_if_less_than_half_of_a_model_is_whitened():
    wide = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8))
    with pytest.warns(UserWarning, match=r"only 15% of this model's parameters .* 0 \(Embedding\)"):
        prong.PRONG(wide)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prong.PRONG(nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8)))
    with pytest.warns(UserWarning, match="of the parameters|of this model's parameters"):
        prong.AdamW(nn.Sequential(nn.GRU(4, 4), nn.Linear(4, 2)))


# Torch's options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
@pytest.mark.parametrize(
    "make", [prong.AdamW, lambda model, **o: prong.attach(model, torch.optim.Adam(model.parameters(), **o))]
)
def test_options_that_do_not_go_with_whitening_are_refused_with_the_reason(make, option):
    model = mlp()
    with pytest.raises(ValueError, match=f"{option}=True does not go with whitened coordinates, which Python"):
        make(model, **{option: True})
    assert not dict(whitened_layers(model))


@pytest.mark.parametrize("form", ["auto", "implicit", "explicit"])
def test_dampening_is_torchs(form):
    """And with it, `lr (1 - dampening) / (1 - momentum)` is how far a gradient goes, which the bound knows."""
    options = {"lr": 0.02, "momentum": 0.8, "dampening": 0.6}
    data, model, plain = batches(mlp(), 4), mlp(), mlp()
    run(model, prong.PRONG(model, **options, form=form, refresh=prong.Never()), data)
    run(plain, torch.optim.SGD(plain.parameters(), **options), data)
    assert_close(canonical(model), canonical(plain))


@pytest.mark.parametrize("fast", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("make", [prong.PRONG, prong.AdamW])
def test_state_that_is_reset_at_refreshes_leaves_that_of_others_alone(make, fast):
    model = Characters(transformer())
    optimizer = make(model, 1e-2, refresh=prong.Every(2, samples=64, state="reset"), **fast)
    data = [tokens(16) for _ in range(2)] * 4
    losses = []
    for batch in data:
        optimizer.zero_grad()
        losses.append(next_character(model, batch))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[1]
    assert optimizer.state[model.embedding.weight]
    assert not any(x is not None and x.any() for x in optimizer.state[model.head.weight].values())


# The bound ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "form"), FORMED)
def test_a_step_changes_pre_activations_by_no_more_than_the_bound(make, form):
    for bound in (0.05, 0.5):
        model, ((x, y),) = mlp(), batches(mlp(), 1, size=60)
        momentum = {"momentum": 0.0} if make is prong.PRONG else {}
        optimizer = make(model, 1e3, form=form, trust=bound, refresh=prong.Every(1, samples=60), **momentum)
        for _ in range(3):
            before = model[0](x).detach()
            run(model, optimizer, [(x, y)])
            change = (model[0](x) - before).square().mean().sqrt()
            assert 0.3 * bound < change <= bound * (1 + 1e-6), "less by what the damping adds"


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize("form", ["auto", "explicit"])
def test_the_bound_knows_no_scale_of_the_loss_and_no_clipping(make, form):
    def trained(scale: float, clip: float | None) -> dict[str, Tensor]:
        model = mlp()
        options = {"others": {"eps": 0.0}} if make is prong.Muon else {"eps": 0.0} if make is prong.AdamW else {}
        optimizer = make(model, 1e3, form=form, refresh=prong.Every(3, samples=32), **options)
        for x, y in batches(mlp(), 6):
            optimizer.zero_grad()
            (scale * F.cross_entropy(model(x), y)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        return canonical(model)

    expected = trained(1.0, None)
    others = [(1e3, None), (1e-3, None)] + ([(1e3, 1.0), (1.0, 0.1)] if make is prong.PRONG else [])
    for (
        scale,
        clip,
    ) in others:  # clipping weighs the gradients in Adam's and Muon's averages otherwise, without a bound too
        assert_close(trained(scale, clip), expected, f"loss times {scale}, clipped at {clip}")


def test_without_a_bound_the_paper_is_the_paper():
    """And what then overflows is told with the layer's name and what to do."""
    model, data = net().double(), batches(mlp(), 30)
    optimizer = prong.PRONG(model, 1e2, trust=None, refresh=prong.Every(2, samples=16))
    with pytest.raises(FloatingPointError, match=r"layer '\d'.*lower lr.*larger damping.*sums over examples"):
        for x, y in data:
            optimizer.zero_grad()
            F.mse_loss(model(x), F.one_hot(y, 4).double()).backward()
            optimizer.step()


@pytest.mark.parametrize("source", ["empirical", "categorical"])
@pytest.mark.parametrize("trust", [None, 0.05])
def test_whitening_of_outputs_does_not_explode_where_their_gradients_vanish(source, trust):
    """A layer norm of two features gives plus and minus one: what comes before it has gradients of about zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 2), nn.LayerNorm(2), nn.Linear(2, 3))
    data = [(torch.randn(32, 7), torch.randint(3, (32,))) for _ in range(4)] * 8
    start = model[0].weight.detach().clone()
    optimizer = prong.PRONG(
        model, 0.01, outputs=prong.WhitenOutputs(source), trust=trust, refresh=prong.Every(4, samples=64)
    )
    losses = run(model, optimizer, data)
    assert all(torch.isfinite(loss) for loss in losses)
    assert sum(losses[-4:]) < sum(losses[:4])
    assert trust is None or (model[0].weight - start).norm() < 10 * start.norm()


@pytest.mark.parametrize("make", [prong.AdamW, prong.Muon])
def test_a_loss_that_is_not_finite_is_told_as_what_it_is(make):
    model, data = mlp(), batches(mlp(), 2)
    optimizer = make(model, 1e-2)
    with pytest.raises(FloatingPointError, match=r"layer '0': .* not finite any more. Look at the loss .* lower lr"):
        run(model, optimizer, data[:1])
        (model(data[1][0]).sum() * float("nan")).backward()
        optimizer.step()
