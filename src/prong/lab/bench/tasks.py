"""What is trained while its cost is measured: a model, its loss and its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import prong
from prong.lab.data import load_mnist
from prong.lab.models import CROP, autoencoder, cifar10_net, mlp, transformer_block
from prong.lab.training import minibatches

TOKENS = 64  # per example of the transformer task
WIDTH = 512  # of the transformer block
POOL = 8  # random data: so many minibatches, drawn from again and again
TRAINED = 300  # updates, before the autoencoder's cost is measured
RANDOM = "random numbers of the right shape"


@dataclass(frozen=True)
class Task:
    """A training problem.

    Attributes:
        name: for tables and options.
        make: the model, with or without batch norm.
        loss: from outputs and targets, a mean over examples.
        inputs: all examples.
        targets: theirs.
        data: where the examples come from, for the record.
        rows: samples, as PRONG counts them, in an example: its tokens, where it has several.
        without: methods that do not apply, and why.
    """

    name: str
    make: Callable[[bool], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    targets: Tensor
    data: str
    rows: int = 1
    without: Mapping[str, str] = field(default_factory=dict)

    def batches(self, size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Minibatches of inputs and targets without end."""
        for chosen in minibatches(torch.arange(len(self.inputs)), size, seed):
            yield self.inputs[chosen], self.targets[chosen]

    def describe(self) -> dict[str, Any]:
        """What the record says of it."""
        shape = [int(n) for n in self.inputs.shape[1:]]
        return {"task": self.name, "data": self.data, "input": shape, "rows": self.rows, "without": dict(self.without)}


def autoencoder_task(largest: int) -> Task:
    """The paper's autoencoder on digits.

    Raises:
        FileNotFoundError: PRONG_DATA names a folder without them.
        ValueError: a damaged file, or fewer digits than the largest batch.
    """
    digits = load_mnist()
    if largest > len(digits.train):
        raise ValueError(f"a batch of {largest} is more than the data holds ({digits.source})")
    x = digits.train
    updates = min(TRAINED, len(x) // 128)  # an epoch at most
    weights = _trained(x, updates)

    def make(batch_norm: bool) -> nn.Module:
        model = autoencoder(batch_norm=batch_norm)
        if not batch_norm:  # what a thin P costs depends on the activations, and so on the weights
            model.load_state_dict(weights)
        return model

    return Task("autoencoder", make, _entropy, x, x, f"{digits.source}; weights after {updates} updates of PRONG")


def _trained(x: Tensor, updates: int) -> dict[str, Tensor]:
    """The autoencoder's weights in mid-training."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = autoencoder()
        optimizer = prong.PRONG(model, 1e-3, nesterov=True, refresh=prong.Every(200, samples=5000))
        prong.initialize_(model, torch.split(x[:5000], 500))
        for update, batch in enumerate(islice(minibatches(x, min(128, len(x)), seed=0), updates)):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1.0, (update + 1) / 50)
            optimizer.zero_grad()
            _entropy(model(batch), batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return prong.fold_(model).state_dict()


def cifar10_task(largest: int) -> Task:
    """The paper's CIFAR-10 net."""
    random = torch.Generator().manual_seed(0)
    pictures = torch.randn(POOL * largest, 3, CROP, CROP, generator=random)
    classes = torch.randint(10, (len(pictures),), generator=random)
    without = {"Muon": "torch's takes matrices, and this net has none"}
    return Task("cifar10", cifar10_net, F.cross_entropy, pictures, classes, RANDOM, without=without)


def transformer_task(largest: int) -> Task:
    """One encoder block, learning random outputs by their squared error."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randn(POOL * largest, TOKENS, WIDTH, generator=random)
    targets = torch.randn(tokens.shape, generator=random)
    without = {"batch norm": "a transformer has layer norm in its place"}
    return Task("transformer", lambda _: transformer_block(WIDTH), _squares, tokens, targets, RANDOM, TOKENS, without)


def mlp_task(width: int, depth: int, largest: int) -> Task:
    """A plain MLP, for how costs grow."""
    random = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(POOL * largest, width, generator=random) for _ in range(2))
    return Task("mlp", lambda _: mlp(width, depth), _squares, inputs, targets, RANDOM)


def _entropy(logits: Tensor, x: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets, reduction="sum") / len(outputs)


MAKERS: Mapping[str, Callable[[int], Task]] = {
    "autoencoder": autoencoder_task,
    "cifar10": cifar10_task,
    "transformer": transformer_task,
}
BATCHES: Mapping[str, tuple[int, ...]] = {"autoencoder": (64, 128, 256, 1024), "cifar10": (128,), "transformer": (16,)}
