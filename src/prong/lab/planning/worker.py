"""What each process of `prong bench plan` does: the same things at the same time, and rank 0 writes down how long.

Started by torchrun: `-m prong.lab.planning.worker CONFIG OUT`, both JSON files.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from prong.core.factorise import whiten
from prong.lab.bench.refresh import correlated_rows, gather
from prong.lab.parallel import joined
from prong.lab.planning import costs
from prong.lab.planning.trials import PARTS, WHOLE, Trial
from prong.lab.record import read_json, write_json

BLOCK_SECONDS = 0.02  # what takes less is done several times in a row
EPS = 1e-2
MAP = 12  # pixels per side of the convolutions' maps
SECONDS = 1800.0  # that they wait for each other
TINY = "mlp:8x16"  # so narrow that an update is calls alone


def main(config: Path, out: Path) -> None:
    """Measure what the configuration asks for."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    wanted = read_json(config)
    with joined(SECONDS) as workers:
        rows = [*_products(wanted), *_convolutions(wanted), *_factorisations(wanted), *_memory(wanted)]
        rows += [*_messages(wanted), *_trials([(TINY, 8)], wanted, "calls")]
        rows += _trials([(name, batch) for name, batch in wanted["checks"]], wanted, "check")
        if workers.rank == 0:
            write_json(out, {"rows": rows})
        dist.barrier()


def slowest(work: Callable[[], object], repetitions: int, prepare: Callable[[], object] | None = None) -> list[float]:
    """Seconds of the slowest process, each repetition begun together; the first is not counted."""
    calls, seconds = 1, []
    for repetition in range(-1, repetitions):
        if prepare is not None:
            prepare()
        dist.barrier()
        start = perf_counter()
        for _ in range(calls):
            work()
        took = torch.tensor((perf_counter() - start) / calls, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        if repetition < 0 and prepare is None:
            calls = math.ceil(BLOCK_SECONDS / max(float(took), 1e-6))
        if repetition >= 0:
            seconds.append(float(took))
    return seconds


def _row(part: str, seconds: list[float], **about: Any) -> dict[str, Any]:
    return {"part": part, "workers": dist.get_world_size(), **about, "seconds": seconds}


def _products(wanted: Any) -> list[dict[str, Any]]:
    rows = []
    for width in wanted["widths"]:
        for count in (64, 256):
            x, W, delta = torch.randn(count, width), torch.randn(width, width), torch.randn(count, width)
            work = costs.product(count, width, width, 4)
            block = partial(_layer, x, W, delta)
            seconds = slowest(block, wanted["repetitions"])
            rows.append(_row("product", seconds, flops=3 * work.flops, moved=3 * work.moved))
    return rows


def _layer(x: Tensor, W: Tensor, delta: Tensor) -> object:
    """The three products of a linear layer: its outputs, and the gradients of weights and inputs."""
    return x @ W.mT, delta.mT @ x, delta @ W


def _convolutions(wanted: Any) -> list[dict[str, Any]]:
    rows = []
    for channels in wanted["channels"]:
        x, W = torch.randn(8, channels, MAP, MAP), torch.randn(channels, channels, 3, 3)
        flops, moved = 2.0 * 8 * MAP**2 * 9 * channels**2, 4.0 * (2 * x.numel() + W.numel())
        seconds = slowest(partial(F.conv2d, x, W, padding=1), wanted["repetitions"])
        rows.append(_row("convolution", seconds, flops=flops, moved=moved))
    return rows


def _factorisations(wanted: Any) -> list[dict[str, Any]]:
    rows = []
    for width in wanted["widths"]:
        moments = gather(correlated_rows(2 * width, width, torch.float32), 128)
        seconds = slowest(partial(whiten, moments, EPS), wanted["repetitions"])
        rows.append(_row("factorisation", seconds, width=width))
    return rows


def _memory(wanted: Any) -> list[dict[str, Any]]:
    x, y = torch.zeros(2, wanted["numbers"]).unbind()
    return [_row("memory", slowest(lambda: y.add_(x), wanted["repetitions"]), moved=3.0 * 4 * x.numel())]


def _messages(wanted: Any) -> list[dict[str, Any]]:
    if dist.get_world_size() == 1:
        return []
    rows = []
    for size in wanted["messages"]:
        message = torch.zeros(size // 4)
        reduced = slowest(partial(dist.all_reduce, message), wanted["repetitions"])
        spread = slowest(partial(dist.broadcast, message, 0), wanted["repetitions"])
        rows += [_row("all-reduce", reduced, bytes=size), _row("broadcast", spread, bytes=size)]
    return rows


def _trials(models: list[tuple[str, int]], wanted: Any, part: str) -> list[dict[str, Any]]:
    """Updates and refreshes of real training."""
    rows = []
    for name, batch in models:
        trial = Trial(name, -(-batch // dist.get_world_size()))
        for phase in (*PARTS, *([WHOLE] if name in wanted["whole"] else [])):
            work, prepare, count = trial.phase(phase)
            seconds = [t / count for t in slowest(work, wanted["repetitions"], prepare)]
            rows.append(_row(part, seconds, model=name, batch=batch, phase=phase))
    return rows


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
