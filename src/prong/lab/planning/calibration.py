"""`prong bench plan`: the constants of this machine, and how well plans made of them foretell real training."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from prong.lab.bench.sheets import Sheet, number, present
from prong.lab.planning.command import look
from prong.lab.planning.fitting import chosen, fit, took
from prong.lab.planning.machines import Machine, from_record
from prong.lab.planning.prediction import Prediction, Setting, predict
from prong.lab.planning.sheets import milliseconds, size
from prong.lab.planning.subjects import subject
from prong.lab.planning.trials import CLOSED, OPEN, REFRESH, SAMPLES, SGD, WHOLE
from prong.lab.record import provenance, read_json, write_json
from prong.lab.terminal import at_least, make_console, progress, writable

NAME = "plan"
CHECKS = ("autoencoder", "mlp:512x4", "cifar10", "transformer:128x2")
BATCHES = {"autoencoder": 128, "mlp:512x4": 256, "cifar10": 16, "transformer:128x2": 16}
NUMBERS = 1 << 24  # in each of two tensors that are added: more than caches hold
PERIOD = 1000
ALL_IN = "all-in"
PATIENCE = 1800  # seconds, for all that one number of processes has to do


def main(
    processes: tuple[int, ...] = (1, 2, 4),
    widths: tuple[int, ...] = (60, 120, 250, 500, 1000),  # factorisations of powers of two are slower than others
    channels: tuple[int, ...] = (16, 64, 128),
    messages: tuple[int, ...] = (1 << 12, 1 << 16, 1 << 20, 1 << 24),
    checks: tuple[str, ...] = CHECKS,
    batch: int | None = None,
    numbers: int = NUMBERS,
    repetitions: int = 5,
    json: Path | None = None,
) -> None:
    """Measure the constants of `prong plan --device cpu`, and check what they predict.

    Products, convolutions, factorisations and messages are timed by size, on 1, 2 and 4 processes with one thread
    each, and constants fitted to those times. Then real training is timed, which the fit has not seen: its updates and
    refreshes are printed beside their predictions.

    Args:
        processes: how many at once; 1 must be among them.
        widths: of products and factorisations.
        channels: of convolutions.
        messages: bytes.
        checks: models, as `prong plan --model` knows them, that are trained for comparison; several processes are
            compared with one on the first.
        batch: examples per update of these, over all processes, instead of each one's own.
        numbers: that are added to tell how fast memory is.
        repetitions: of every measurement; medians count.
        json: file for the record: configuration, environment, commit, every measurement and the constants.
    """
    at_least(1, processes=processes, widths=widths, channels=channels, repetitions=repetitions, numbers=numbers)
    at_least(4, messages=messages)
    if 1 not in processes:
        raise SystemExit("--processes has to have 1 among them: the others are compared with it")
    if min(len(set(widths)), len(set(channels)), len(set(messages))) < 2:
        raise SystemExit("--widths, --channels and --messages need two sizes each, to tell rates from calls")
    batches = {name: BATCHES.get(name, 64) if batch is None else batch for name in checks}
    for name in checks:
        subject(name, "checks")
        at_least(max(processes), batch=batches[name])
    writable(json=json)
    config = {"processes": processes, "widths": widths, "channels": channels, "messages": messages, "numbers": numbers}
    config |= {
        "checks": list(batches.items()),
        "repetitions": repetitions,
        "samples": SAMPLES,
        "whole": list(checks[:1]),
    }
    record: dict[str, Any] = {"bench": NAME, "config": config, **provenance(), "rows": []}
    record["environment"]["threads"] = 1
    console = make_console()
    with progress(console, "numbers of processes", len(processes)) as on_step:
        for count in processes:
            record["rows"] += measured(config, count)
            on_step()
    record["machine"] = vars(fit(record["rows"], f"{platform.machine()}, one thread per worker", _memory()))
    if json is not None:
        write_json(json, record)
    present(console, sheets(record), json)


def measured(config: Mapping[str, Any], processes: int) -> list[Any]:
    """What so many processes measure, started together on this machine."""
    with TemporaryDirectory() as folder:
        wanted, out = Path(folder) / "config.json", Path(folder) / "rows.json"
        write_json(wanted, config)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += ["-m", "prong.lab.planning.worker", str(wanted), str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as run:
            try:
                _, problems = run.communicate(timeout=PATIENCE)
            except BaseException:
                run.terminate()  # torchrun then ends its processes; killed, it could not
                raise
        if run.returncode != 0:
            raise SystemExit(f"measuring with {processes} processes failed:\n{problems.decode()[-2000:]}")
        rows: list[Any] = read_json(out)["rows"]
        return rows


def _memory() -> float:
    """Bytes that this machine has."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def foretold(prediction: Prediction) -> dict[str, float]:
    """Predicted seconds of what a trial times."""
    return {SGD: prediction.sgd, CLOSED: prediction.closed, OPEN: prediction.open, REFRESH: prediction.refresh}


def comparisons(record: Mapping[str, Any]) -> list[tuple[str, int, str, float, float]]:
    """Model, processes, part, and seconds predicted and measured, of all that the fit has not seen."""
    machine = from_record(record)
    found = []
    known: dict[tuple[str, int], dict[str, float]] = {}
    for row in chosen(record["rows"], "check"):
        model, workers = row["model"], row["workers"]
        if (model, workers) not in known:
            traced = look(subject(model), -(-row["batch"] // workers), "float32")
            setting = Setting(workers, PERIOD, record["config"]["samples"], "float32")
            known[model, workers] = foretold(predict(traced, machine, setting))
        if row["phase"] != WHOLE:
            found.append((model, workers, row["phase"], known[model, workers][row["phase"]], took(row)))
    return found


def sheets(record: Mapping[str, Any]) -> list[Sheet]:
    """The constants, what they foretell beside what was measured, and what several processes gain."""
    compared = [row for row in chosen(record["rows"], "check") if row["model"] in record["config"]["whole"]]
    gain = [_gain(compared, record["config"]["samples"])] if compared else []
    return [_constants(from_record(record), record), _check(record), *gain]


def _constants(machine: Machine, record: Mapping[str, Any]) -> Sheet:
    rows = [
        ["products", f"{number(machine.products['float32'] / 1e9)} Gflop/s"],
        ["convolutions", f"{number(machine.convolutions['float32'] / 1e9)} Gflop/s"],
        [
            "factorisations",
            f"{number(machine.factorisations / 1e9)} Gflop/s and {milliseconds(machine.factor_call)} ms",
        ],
        ["memory", f"{size(machine.memory_rate)}/s"],
        ["messages", f"{size(machine.network_rate)}/s and {milliseconds(machine.latency)} ms"],
        ["a layer", f"{milliseconds(machine.call)} ms"],
        ["more, whitened", f"{milliseconds(machine.whitened_call)} ms"],
        ["more, in a window", f"{milliseconds(machine.statistics_call)} ms"],
        *([f"{n} processes at once", f"{times:.2f} times as long"] for n, times in machine.crowding.items()),
    ]
    note = f"float32, one thread per process. Medians of {record['config']['repetitions']}."
    return Sheet("constants of this machine", ("of", "measured"), rows, note)


def _check(record: Mapping[str, Any]) -> Sheet:
    compared = comparisons(record)
    rows = [
        [model, str(workers), part, milliseconds(predicted), milliseconds(seen), f"{predicted / seen:.2f}"]
        for model, workers, part, predicted, seen in compared
    ]
    note = f"Training that the constants were not fitted to. {error([p / m for *_, p, m in compared])}"
    headings = ("model", "processes", "what", "predicted, ms", "measured, ms", "ratio")
    return Sheet("predicted and measured", headings, rows, note, words=3)


def _gain(measured: Sequence[Mapping[str, Any]], samples: int) -> Sheet:
    """Times of several processes over those of one, for the same minibatch and the same samples."""
    times: dict[int, dict[str, float]] = {}
    for row in measured:
        times.setdefault(row["workers"], {})[row["phase"]] = took(row)
    window = samples / measured[0]["batch"]
    for of in times.values():
        of[ALL_IN] = of[CLOSED] + (window * (of[OPEN] - of[CLOSED]) + of[REFRESH]) / PERIOD
    rows = []
    for workers, of in times.items():
        if workers > 1:
            whole, sgd, ours = (of[part] / times[1][part] for part in (WHOLE, SGD, ALL_IN))
            rows.append([str(workers), f"{whole:.2f}", f"{sgd:.2f}", f"{ours:.2f}", f"{sgd / ours:.2f}"])
    headings = ("processes", WHOLE, "update, SGD", "update, PRONG", "PRONG's throughput, SGD's scaling = 1")
    note = f"Times those of one process, one thread each. An update of PRONG is all-in, at a period of {PERIOD:,}."
    return Sheet(f"{measured[0]['model']}: several processes beside one", headings, rows, note)


def error(ratios: Sequence[float]) -> str:
    """How far off predictions are, in a sentence."""
    if not ratios:
        return "Nothing was checked."
    off = sorted(exp(abs(log(ratio))) for ratio in ratios)
    return f"Off by a factor of {median(off):.2f} in the median, {off[-1]:.2f} at worst."
