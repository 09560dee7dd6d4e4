"""`prong bench blocks`: how far steps with blocks or a cutoff are from exact ones, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

import prong
from prong.analysis.accuracy import step_error
from prong.lab.bench.sheets import Sheet, number, present
from prong.lab.bench.tasks import autoencoder_task
from prong.lab.record import keep, provenance
from prong.lab.terminal import at_least, make_console, progress, writable
from prong.model.estimate import estimate

NAME = "blocks"
EPS = 3e-2


def main(
    sizes: tuple[int, ...] = (256, 64, 1),
    cutoffs: tuple[float, ...] = (1.0,),
    samples: int = 5000,
    eps: float = EPS,
    json: Path | None = None,
) -> None:
    """Compare natural gradients of whitening in blocks, or with a cutoff, with exact ones, on the paper's autoencoder.

    The network is one in mid-training; covariances of its layers' inputs come from digits. The error is that of the
    step in expectation over gradients, measured in the Fisher metric: 0 is exact, 1 as long as the step itself. Gains
    are by how much parts of the step come out too long or too short.

    Args:
        sizes: of blocks, at most; 1 scales every input by itself.
        cutoffs: in units of eps.
        samples: digits.
        eps: damping.
        json: file for the record.
    """
    at_least(1, sizes=sizes)
    at_least(2, samples=samples)
    if eps <= 0 or min(cutoffs, default=0.0) < 0:
        raise SystemExit("--eps is positive, and --cutoffs are not negative")
    writable(json=json)
    console = make_console()
    options: list[dict[str, Any]] = [*({"block": size} for size in sizes), *({"cutoff": c} for c in cutoffs)]
    if not options:
        raise SystemExit("--sizes or --cutoffs need a number")
    try:
        task = autoencoder_task(1)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    model = prong.whiten_(task.make(False))
    moments = estimate(model, torch.split(task.inputs[:samples], 500))
    config = {"sizes": sizes, "cutoffs": cutoffs, "samples": min(samples, len(task.inputs)), "eps": eps}
    record: dict[str, Any] = {"bench": NAME, "config": config, **provenance(), "data": task.data, "layers": []}
    with progress(console, "comparisons", len(moments) * len(options)) as on_step:
        for name, seen in moments.items():
            errors = []
            for option in options:
                errors.append({**option, **asdict(step_error(seen.covariance()[0], eps, **option))})
                on_step()
            record["layers"].append({"layer": name, "inputs": seen.mean.shape[1], "errors": errors})
    keep(json, record)
    present(console, sheets(record), json)


def sheets(record: Mapping[str, Any]) -> list[Sheet]:
    """A table: a row for each layer, a column for each option."""
    layers, config = record["layers"], record["config"]
    names = [_name(error) for error in layers[0]["errors"]]
    rows = [[f"{layer['inputs']:,} inputs", *(_cell(error) for error in layer["errors"])] for layer in layers]
    middle = [median(layer["errors"][n]["relative"] for layer in layers) for n in range(len(names))]
    rows.append(["median", *map(number, middle)])
    note = (
        f"Relative error of the natural gradient; in brackets the largest gain. eps {config['eps']:g}; "
        f"{config['samples']:,} examples of {record['data']}. A block larger than a layer is all of it."
    )
    return [Sheet("steps in blocks, and with a cutoff, beside exact ones", ("layer", *names), rows, note)]


def _name(error: Mapping[str, Any]) -> str:
    if "block" not in error:
        return f"cutoff {error['cutoff']:g}"
    return "diagonal" if error["block"] == 1 else f"blocks of {error['block']:,}"


def _cell(error: Mapping[str, Any]) -> str:
    exact = error["relative"] < 1e-9
    return "0" if exact else f"{error['relative']:.2f} ({error['largest_gain']:.1f})"
