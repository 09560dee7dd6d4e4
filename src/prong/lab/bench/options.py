"""`prong bench options`: what PRONG's options do to learning, each beside the same training without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import prong
from prong.lab.bench.sheets import NONE, Sheet, number, present
from prong.lab.contestants import Problem, data_folder
from prong.lab.methods import MOMENTUM
from prong.lab.models import autoencoder
from prong.lab.pool import one_thread
from prong.lab.record import ForeignRecordError, InUseError, claimed, resume, write_json
from prong.lab.terminal import at_least, each_once, known, make_console, positive, progress, writable
from prong.lab.training import DIVERGENCES, Plan, Run, Training, train
from prong.model.whiten import whitened_sites

NAME = "options"
PLAIN = "as it is"
COMMON: Mapping[str, Any] = {"momentum": MOMENTUM, "nesterov": True, "balance": True, "period": 200, "samples": 5000}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {},
    "cutoff=1": {"cutoff": 1.0},
    "storage=bfloat16": {"storage": torch.bfloat16},
    "cutoff=1, storage=bfloat16": {"cutoff": 1.0, "storage": torch.bfloat16},
    "form=explicit": {"form": "explicit"},
    "lag=10": {"lag": 10},
    "on_refresh=reset": {"on_refresh": "reset"},
    "source=ema": {"source": "ema"},
    "period=20": {"period": 20},
    "period=1000": {"period": 1000},
    "period=auto": {"period": "auto"},
    "balance=False": {"balance": False},
}


def main(
    options: tuple[str, ...] = tuple(OPTIONS),
    updates: int = 1000,
    seeds: tuple[int, ...] = (0, 3, 4),
    lr: float = 1.34e-3,
    eps: float = 1.86e-2,
    json: Path = Path("runs/options/options.json"),
) -> None:
    """Train the paper's autoencoder with one option of PRONG changed at a time, and compare what is learnt.

    What everything is compared with is balanced PRONG, period 200, 5,000 samples, from a whitened initialisation; the
    default settings are those that the demo's search chose for it. With one thread, so that runs can be repeated to the
    bit. A run that was stopped goes on from its record.

    Args:
        options: names as in the table.
        updates: of every run; the learning rate falls over the second half.
        seeds: of weights and of the order of the data.
        lr: learning rate.
        eps: damping.
        json: the record: configuration, environment, commit and every run.
    """
    at_least(1, updates=updates)
    known("options", options, OPTIONS)
    each_once(options=options, seeds=seeds)
    at_least(0, seeds=seeds)
    positive(lr=lr, eps=eps)
    writable(json=json)
    problem, console = Problem(autoencoder, data_folder()), make_console()
    config: dict[str, Any] = {"options": options, "updates": updates, "seeds": seeds, "lr": lr, "eps": eps}
    try:
        config["data"] = problem.digits().source
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    try:
        with claimed(json), one_thread():
            record = {"bench": NAME, **resume(json, {**config, **COMMON})}
            runs = record.setdefault("runs", {name: {} for name in options})
            with progress(console, "runs", len(options) * len(seeds)) as on_step:
                for seed, name in product(seeds, options):
                    if str(seed) not in runs[name]:
                        runs[name][str(seed)] = run(problem, OPTIONS[name], Plan(updates, seed), lr, eps)
                        write_json(json, record)
                    on_step()
    except (ForeignRecordError, InUseError) as error:
        raise SystemExit(str(error)) from error
    present(console, sheets(record), json)


def run(problem: Problem, options: Mapping[str, Any], plan: Plan, lr: float, eps: float) -> dict[str, Any]:
    """One run as JSON has it: its rows, and how often a layer was given a new whitening."""
    torch.manual_seed(plan.seed)
    model = problem.build(batch_norm=False)
    start = perf_counter()
    optimizer = prong.PRONG(model, lr, eps=eps, **{**COMMON, **options})
    try:
        optimizer.initialize(problem.initial_batches())
    except DIVERGENCES as error:
        return {**asdict(Run([], f"diverged at its initialisation: {error}")), "refreshes": 0}
    count = _Refreshes(model)
    made = train(Training(problem, model, optimizer, plan, perf_counter() - start), count)
    return {**asdict(made), "refreshes": count.total}


class _Refreshes:
    """Counts the sites that have another whitening than after the update before."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.total = 0
        self._sites = [site for _, site in whitened_sites(model).values()]
        self._last = [site.whitening for site in self._sites]

    def __call__(self, update: int) -> None:
        now = [site.whitening for site in self._sites]
        self.total += sum(a is not b for a, b in zip(now, self._last, strict=True))
        self._last = now


def sheets(record: Mapping[str, Any]) -> list[Sheet]:
    """One table: every option, with the last errors of all seeds."""
    plain = _errors(record, PLAIN) if PLAIN in record["runs"] else {}
    rows = []
    for name, runs in record["runs"].items():
        errors = _errors(record, name)
        failed = [f"seed {seed}: {r['failure']}" for seed, r in runs.items() if r["failure"]]
        ratios = [errors[seed] / plain[seed] for seed in errors if seed in plain]
        tests = [r["rows"][-1]["test_error"] for r in runs.values() if r["failure"] is None]
        rows.append(
            [
                name,
                " / ".join(number(error) for error in errors.values()) or NONE,
                f"{median(ratios):.2f}" if ratios else NONE,
                number(median(tests)) if tests else NONE,
                number(median(r["refreshes"] for r in runs.values())),
                "; ".join(failed) or NONE,
            ]
        )
    config = record["config"]
    headings = ("option", "train error", "times as it is", "test error", "layers refreshed", "failures")
    note = (
        f"After {config['updates']:,} updates, lr {config['lr']:g}, eps {config['eps']:g}; train errors of seeds "
        f"{', '.join(map(str, config['seeds']))}, medians of the rest. Layers refreshed: how often any of the eight "
        f"layers got a new whitening. Data: {config['data']}."
    )
    return [Sheet("Balanced PRONG with one option changed", headings, rows, note)]


def _errors(record: Mapping[str, Any], name: str) -> dict[str, float]:
    return {s: r["rows"][-1]["train_error"] for s, r in record["runs"][name].items() if r["failure"] is None}
