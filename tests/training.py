"""Small models and loops that several test files train."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import prong
from prong.attachment import attachment_of
from prong.layers import Site
from prong.model.whiten import whitened_sites
from prong.refresh.refresher import Refresher

DOUBLE = torch.float64
FORMS = ("auto", "implicit", "explicit", "materialised")
KINDS = {"PRONG": prong.PRONG, "AdamW": prong.AdamW, "Muon": prong.Muon}
OPTIMIZERS = {  # natural gradients, which make an implicit layer, are for SGD
    f"{name}-{form}": partial(kind, form=form)
    for name, kind in KINDS.items()
    for form in FORMS
    if name == "PRONG" or form != "implicit"
}


def refresher_of(optimizer: torch.optim.Optimizer) -> Refresher:
    return attachment_of(optimizer).refresher


def site_of(model: nn.Module, name: str = "0") -> Site:
    return whitened_sites(model)[name][1]


def mlp(bias: bool = True, dtype: torch.dtype = DOUBLE, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 9, bias=bias), nn.Tanh(), nn.Linear(9, 7, bias=bias), nn.Tanh(), nn.Linear(7, 4, bias=bias)
    ).to(dtype)


def convnet(dtype: torch.dtype = DOUBLE, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, stride=2, groups=2, padding="valid"),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 4),
    ).to(dtype)


class Attentive(nn.Module):
    """Attention whose queries, keys and values are three different things, and a linear head."""

    def __init__(self, key_size: int | None) -> None:
        super().__init__()
        self.key_size = key_size
        self.attention = nn.MultiheadAttention(6, 2, kdim=key_size, batch_first=True)
        self.head = nn.Linear(6, 4)

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return x, x[..., : self.key_size].tanh(), x.sin() + 0.5 * x

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.attention(*self.inputs(x))[0]).mean(1))


def attentive(key_size: int | None = None, dtype: torch.dtype = DOUBLE, seed: int = 0) -> Attentive:
    """With `key_size`, the projections are separate parameters; without, one packed one."""
    torch.manual_seed(seed)
    return Attentive(key_size).to(dtype)


def batches(model: nn.Module, count: int, size: int = 16, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Inputs with correlated, shifted features, and labels."""
    generator = torch.Generator().manual_seed(seed)
    parameter = next(model.parameters())
    images = any(isinstance(m, nn.Conv2d) for m in model.modules())
    shape = (2, 6, 6) if images else (5, 6) if isinstance(model, Attentive) else (6,)
    mixing = torch.randn(shape[-1], shape[-1], generator=generator, dtype=DOUBLE)
    made = []
    for _ in range(count):
        x = torch.randn(size, *shape, generator=generator, dtype=DOUBLE) @ mixing + 1
        made.append((x.to(parameter.dtype), torch.randint(4, (size,), generator=generator)))
    return made


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> Iterator[Tensor]:
    """One update per batch; yields the losses."""
    for x, y in data:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        yield value.detach()


def run(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return list(train(model, optimizer, data))


def canonical(model: nn.Module) -> dict[str, Tensor]:
    """The plain parameters, whatever the form."""
    return {name: x.clone() for name, x in model.state_dict().items()}


def tensors(state):
    """A nested state without its strings, which torch.testing does not compare."""
    if isinstance(state, dict):
        return {key: tensors(value) for key, value in state.items() if not isinstance(value, str) and value is not None}
    return state


def through_a_file(state: Any) -> Any:
    """A state as it is loaded from where it was saved."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def resume(
    model_of: Callable[..., nn.Module],
    begin: Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]],
    data: list[tuple[Tensor, Tensor]],
    stops: list[int],
) -> dict[int, Any]:
    """Train with and without stops, end alike; the optimizer's states at the stops.

    `begin(model)` gives the model and its optimizer, which are loaded in this order or in the other.
    """
    model, optimizer = begin(model_of())
    run(model, optimizer, data)
    saved = {}
    looked_at = begin(model_of())
    for number, pair in enumerate(data):
        if number in stops:
            prong.summary(looked_at[0])
            saved[number] = [through_a_file(part.state_dict()) for part in looked_at]
        run(*looked_at, [pair])
    torch.testing.assert_close(canonical(looked_at[0]), canonical(model), rtol=0, atol=0, msg="looking changes nothing")
    for stop, states in saved.items():
        other = begin(model_of(seed=99))
        torch.manual_seed(7)
        for part, state in list(zip(other, states, strict=True))[:: -1 if stop % 2 else 1]:
            part.load_state_dict(state)
        run(*other, data[stop:])
        told = lambda text, stop=stop: f"stopped after {stop}: {text}"  # noqa: E731
        torch.testing.assert_close(canonical(other[0]), canonical(model), rtol=0, atol=0, msg=told)
        for part in ("state", "prong"):
            mine, whole = (tensors(x.state_dict()[part]) for x in (other[1], optimizer))
            torch.testing.assert_close(mine, whole, rtol=0, atol=0, msg=told)
    return {stop: state for stop, (_, state) in saved.items()}
