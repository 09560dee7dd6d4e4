"""Small problems as other people's scripts have them: a model, minibatches, a loss, and nothing tuned."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prong.lab.data import Digits, load_mnist
from prong.lab.datasets.shelf import data_folder
from prong.lab.models import autoencoder

Batch = tuple[Tensor, ...]
EVALUATED = 1000  # examples, or sequences


@dataclass(frozen=True)
class Problem:
    """What is trained, on what.

    Attributes:
        model: makes one, by the global random numbers.
        batch: draws a minibatch.
        held: a fixed set of examples to measure on, in parts.
        loss: of a model on a batch.
        error: what is measured, where it is not the loss.
        updates: of a run.
        warm_up: over so many updates the rate rises.
        anneals: whether the rate falls to zero over the last half.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    held: Callable[[], list[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    error: Callable[[nn.Module, Batch], Tensor] | None = None
    updates: int = 300
    warm_up: int = 0
    anneals: bool = False

    def rate(self, update: int) -> float:
        """By what the learning rate is multiplied at an update."""
        rising = min(1.0, (update + 1) / (self.warm_up + 1))
        return rising * min(1.0, 2 * (1 - update / self.updates)) if self.anneals else rising

    @torch.no_grad()
    def measure(self, model: nn.Module) -> float:
        """The error, averaged over what is held; NaN where it is not finite."""
        model.eval()
        errors = [float((self.error or self.loss)(model, batch)) for batch in self.held()]
        model.train()
        mean = sum(errors) / len(errors)
        return mean if math.isfinite(mean) else math.nan


class Block(nn.Module):
    """Attention and an MLP, each behind a LayerNorm and beside a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x (batch, tokens, width)."""
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        out: Tensor = x + self.mlp(self.before_mlp(x))
        return out


class Transformer(nn.Module):
    """Predicts the next character; weights as GPT-2's at its start."""

    def __init__(self, width: int = 128, depth: int = 4, context: int = 64, characters: int = 65) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, width // 32) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                last = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * depth) if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens: Tensor) -> Tensor:
        """Shapes: tokens (batch, length); logits (batch, length, characters)."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Convolutional(nn.Sequential):
    """The network of PyTorch's MNIST example, with its 9,216 inputs to 128 units."""

    def __init__(self) -> None:
        convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
        head = [nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)]
        super().__init__(*convolutions, *head)


class Variational(nn.Module):
    """The variational autoencoder of PyTorch's examples: 784-400-20-400-784."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(784, 400), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(400, 20), nn.Linear(400, 20)
        self.decode = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, mean and logarithm of the variance of the code."""
        h = self.encode(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        return self.decode(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()), mean, log_variance


def bound(model: nn.Module, batch: Batch) -> Tensor:
    """The negative evidence bound, summed over examples as in that example."""
    (x,) = batch
    logits, mean, log_variance = model(x)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
    summed: Tensor = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") + divergence
    return summed


def reconstruction(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy, summed over pixels and averaged over examples."""
    (x,) = batch
    entropy: Tensor = F.binary_cross_entropy_with_logits(model(x), x, reduction="sum") / len(x)
    return entropy


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """Squared error, summed over pixels and averaged over examples."""
    (x,) = batch
    error: Tensor = (model(x).sigmoid() - x).square().sum() / len(x)
    return error


def next_character(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the next character."""
    (tokens,) = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def classification(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of labels."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def regression(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error."""
    x, y = batch
    return F.mse_loss(model(x), y)


@cache
def digits() -> Digits:
    """MNIST."""
    return load_mnist()


def images(size: int) -> Callable[[torch.Generator], Batch]:
    """Minibatches of digits."""
    return lambda generator: (digits().train[torch.randint(len(digits().train), (size,), generator=generator)],)


def labelled(generator: torch.Generator) -> Batch:
    """64 digits with their labels."""
    chosen = torch.randint(len(digits().train), (64,), generator=generator)
    return digits().train[chosen].view(-1, 1, 28, 28), digits().train_labels[chosen]


def some_images() -> list[Batch]:
    """Digits of the training set, as what is watched is optimisation."""
    return [(digits().train[:EVALUATED],)]


@cache
def text() -> tuple[Tensor, Tensor]:
    """Tiny Shakespeare as numbers of characters: nine tenths to train on, and the last.

    Raises:
        FileNotFoundError: it is not there.
    """
    path = data_folder() / "tinyshakespeare" / "input.txt"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: put the text of tiny Shakespeare there, or name a folder with it")
    content = path.read_text()
    numbers = {character: i for i, character in enumerate(sorted(set(content)))}
    everything = torch.tensor([numbers[character] for character in content])
    return everything[: len(everything) * 9 // 10], everything[len(everything) * 9 // 10 :]


def passages(sequences: int, length: int) -> Callable[[torch.Generator], Batch]:
    """Minibatches of passages, each with the character after it."""

    def draw(generator: torch.Generator) -> Batch:
        starts = torch.randint(len(text()[0]) - length - 1, (sequences,), generator=generator)
        return (text()[0][starts[:, None] + torch.arange(length + 1)],)

    return draw


def unseen(sequences: int, length: int) -> Callable[[], list[Batch]]:
    """Passages of the text that is not trained on, spread over it."""

    def passages() -> list[Batch]:
        held = text()[1]
        starts = torch.arange(sequences) * ((len(held) - length - 1) // sequences)
        return [(part,) for part in torch.split(held[starts[:, None] + torch.arange(length + 1)], 64)]

    return passages


COLUMNS = 12


@cache
def table() -> Batch:
    """5,000 rows of 12 columns whose scales differ by 10^6, and a smooth function of them with noise."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(5000, COLUMNS, generator=generator) @ torch.randn(COLUMNS, COLUMNS, generator=generator)
    first, second = (torch.randn(COLUMNS, generator=generator) / COLUMNS for _ in range(2))
    y = (hidden @ first).sin() + 0.5 * (hidden @ second).square() + 0.1 * torch.randn(5000, generator=generator)
    return (hidden + 1) * torch.logspace(-3, 3, COLUMNS), y.unsqueeze(1)


def some_rows(generator: torch.Generator) -> Batch:
    """128 rows of the table."""
    chosen = torch.randint(4000, (128,), generator=generator)
    return table()[0][chosen], table()[1][chosen]


def mlp() -> nn.Module:
    """Two hidden layers, for the table."""
    return nn.Sequential(nn.Linear(COLUMNS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


PROBLEMS: Mapping[str, Problem] = {
    "transformer": Problem(Transformer, passages(32, 64), unseen(256, 64), next_character, updates=400, anneals=True),
    "transformer-256": Problem(
        lambda: Transformer(256, 6, 128), passages(64, 128), unseen(256, 128), next_character, updates=400, anneals=True
    ),
    "autoencoder": Problem(
        autoencoder, images(128), some_images, reconstruction, squared_error, updates=600, warm_up=50, anneals=True
    ),
    "convolutional": Problem(
        Convolutional,
        labelled,
        lambda: [(digits().train[:EVALUATED].view(-1, 1, 28, 28), digits().train_labels[:EVALUATED])],
        classification,
    ),
    "variational": Problem(Variational, images(128), some_images, bound),
    "sigmoid": Problem(lambda: autoencoder(code_activation=True), images(128), some_images, reconstruction),
    "table": Problem(mlp, some_rows, lambda: [(table()[0][:EVALUATED], table()[1][:EVALUATED])], regression),
}
