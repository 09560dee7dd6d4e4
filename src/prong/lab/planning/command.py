"""`prong plan`: what training would cost on so many workers."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prong.lab.bench.sheets import Sheet, present
from prong.lab.planning.blocking import fitted, in_blocks
from prong.lab.planning.machines import Machine, machine
from prong.lab.planning.prediction import Prediction, Setting, predict
from prong.lab.planning.sheets import kind_sheet, sentences, total_sheet
from prong.lab.planning.subjects import DTYPES, Subject, subject
from prong.lab.planning.tracing import Traced, trace
from prong.lab.record import provenance, write_json
from prong.lab.terminal import at_least, known, make_console, writable


def main(
    model: str,
    workers: int = 1,
    batch: int = 128,
    device: str = "cpu",
    period: int = 1000,
    samples: int = 12_800,
    dtype: str = "float32",
    block: str = "auto",
    budget: float = 2.0,
    json: Path | None = None,
) -> None:
    """Predict time, memory and bytes sent of an update and a refresh, PRONG beside SGD under DDP.

    Nothing is computed and no memory is needed: shapes are looked at, and a cost model says what they take. Its
    formulas, and how well it predicts what was measured, are in docs/scaling.md.

    Args:
        model: autoencoder, cifar10, inception, mlp:WIDTHxDEPTH, transformer:WIDTHxDEPTH[xTOKENS], or module:function
            that returns a model and one example, or its shape if it is of floating-point numbers. Models are made on
            torch's meta device, so they cannot look at values.
        workers: processes or GPUs, among which the batch is divided.
        batch: examples per update, over all workers.
        device: a100 or h100 (data sheets), a record of `prong bench plan`, or cpu: the record results/plan.json here.
        period: updates between refreshes.
        samples: examples per refresh, over all workers.
        dtype: of parameters and products: float32, bfloat16, float16 or float64.
        block: inputs that are whitened together, at most: a number, none for all, or auto for what fits.
        budget: with auto, at most so many times SGD's time, all-in.
        json: file for the record.
    """
    at_least(1, workers=workers, batch=batch, period=period)
    at_least(2, samples=samples)
    known("dtype", [dtype], DTYPES)
    if batch < workers:
        raise SystemExit(f"--batch {batch} is fewer than --workers {workers}: every worker needs an example")
    if block not in ("auto", "none") and not (block.isdecimal() and int(block) > 0):
        raise SystemExit(f"--block is a number of at least 1, none or auto, got {block!r}")
    if budget <= 1:
        raise SystemExit(f"--budget is more than 1, as PRONG costs more than SGD, got {budget:g}")
    writable(json=json)
    what, where = subject(model), machine(device)
    where.rate(dtype)
    setting = Setting(workers, period, samples, dtype)
    traced = look(what, -(-batch // workers), dtype)
    if block == "auto":
        traced = fitted(traced, where, setting, budget)
    elif block != "none":
        traced = in_blocks(traced, int(block))
    prediction = predict(traced, where, setting)
    console = make_console()
    title = f"{model}, batch {batch:,} on {workers:,} {'worker' if workers == 1 else 'workers'}, {where.name}, {dtype}"
    if json is not None:
        write_json(json, as_record(title, prediction, where))
    present(console, sheets(title, prediction, where), json)
    for sentence in sentences(traced, prediction, where):
        console.print(sentence, highlight=False)


def look(what: Subject, examples: int, dtype: str) -> Traced:
    """The shapes of a model and of one worker's minibatch; leaves with one line where there are none."""
    kind = DTYPES[dtype]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which layers are left as they are is no news here
            return trace(what.on_meta(kind), what.inputs(examples, kind))
    except Exception as error:  # of a model that may be the user's
        raise SystemExit(
            f"--model {what.name} does not take a batch of {examples} x {what.example}: {error}"
        ) from error


def sheets(title: str, prediction: Prediction, where: Machine) -> list[Sheet]:
    """The tables."""
    return [total_sheet(title, prediction, where), kind_sheet(prediction)]


def as_record(title: str, prediction: Prediction, where: Machine) -> dict[str, Any]:
    """All of it, with where it comes from."""
    derived = ("sgd", "closed", "open", "refresh", "all_in", "times_sgd")
    return {
        "plan": title,
        **provenance(),
        "machine": asdict(where),
        **asdict(prediction),
        **{name: getattr(prediction, name) for name in derived},
    }
