"""Fisher matrices by loops over examples and labels: slow and obvious."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import prong
from tests.training import batches, convnet, mlp

DISTRIBUTIONS = ("categorical", "bernoulli", "gaussian")


class Segmenter(nn.Module):
    """A class for every position: outputs (examples, classes, height, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
        self.last = nn.Conv2d(3, 3, 2, dilation=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x[..., :4, :4]).tanh())


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any operation returned."""

    entries = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.entries = max(self.entries, x.numel())
        return result


def segmenter() -> nn.Module:
    torch.manual_seed(0)
    return Segmenter().double()


BUILDERS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "convnet": convnet, "segmenter": segmenter}


def data_for(model: nn.Module, examples: int = 6) -> Tensor:
    ((x, _),) = batches(model, 1, examples)
    return x


FORMS = ("implicit", "explicit", "natural", "materialised")


def whitened(model: nn.Module, x: Tensor, form: str, basis: Any = "pca", eps: float = 1e-2) -> nn.Module:
    """A whitened copy, refreshed on the data: by `whiten_`, or plain and in the hands of an optimizer."""
    model = copy.deepcopy(model)
    if form in ("implicit", "explicit"):
        prong.whiten_(model, prong.Implicit() if form == "implicit" else prong.Explicit(basis))
        return prong.refresh_(model, x, prong.Absolute(eps))
    options = prong.Auto(time=1e9, memory=1e9) if form == "natural" else prong.Materialised(basis)
    optimizer = prong.PRONG(model, 0.1, form=options, refresh=prong.Never())
    prong.refresh_(model, x, prong.Absolute(eps))
    assert isinstance(optimizer, torch.optim.Optimizer)  # which lives until here
    return model


def losses(output: Tensor, distribution: str) -> Iterator[tuple[float, Tensor]]:
    """For one example's output: probabilities of labels and their -log p(y), position by position.

    A Gaussian has infinitely many labels; mean - 1 and mean + 1, equally likely, have the same score's second moment.
    """
    if distribution == "categorical":
        positions = output.reshape(output.shape[0], -1)
        for t in range(positions.shape[1]):
            z = positions[:, t].unsqueeze(0)
            for y, p in enumerate(z.softmax(1)[0].tolist()):
                yield p, F.cross_entropy(z, torch.tensor([y]))
        return
    for z in output.reshape(-1):
        if distribution == "bernoulli":
            for y in (0.0, 1.0):
                p = z.sigmoid().item()
                yield p if y else 1 - p, F.binary_cross_entropy_with_logits(z, torch.tensor(y).to(z))
        else:
            for y in (z.item() - 1, z.item() + 1):
                yield 0.5, 0.5 * (z - y) ** 2


def looped(model: nn.Module, x: Tensor, distribution: str) -> Tensor:
    """1/N sum_n sum_y p(y) g g^T in the parameters that the model itself has, by autograd."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(1, dtype=x.dtype)
    for example in x:
        output = model(example.unsqueeze(0))[0]
        for p, loss in losses(output, distribution):
            g = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            flat = torch.cat(
                [(torch.zeros_like(q) if a is None else a).reshape(-1) for a, q in zip(g, parameters, strict=True)]
            )
            total = total + p * torch.outer(flat, flat)
    return total / len(x)
