"""`prong list`: what can be run, and how long it would take here."""

from __future__ import annotations

from time import perf_counter

import torch
from rich.table import Table

from prong.lab.experiments.catalogue import CATALOGUE
from prong.lab.terminal import make_console

SIZE = 1000
SHARE = 0.35  # of the speed of large products that training reached when the experiments were recorded


def main() -> None:
    """List the experiments: the figure of the paper, the claim it tests, and how long it takes here, roughly."""
    console, speed = make_console(), teraflops_per_second() * SHARE
    table = Table(caption="Time: of the command without options, guessed from the speed of matrix products here.")
    table.add_column("experiment", no_wrap=True)
    for heading in ("figure of the paper", "claim", "time here"):
        table.add_column(heading, overflow="fold")
    for entry in CATALOGUE:
        table.add_row(f"[bold]{entry.name}[/bold]", entry.figure, entry.claim, duration(entry.teraflops / speed))
        table.add_section()
    console.print(table)
    console.print("Run one: prong run NAME; a small version first: prong run NAME --quick", highlight=False)


def teraflops_per_second(repetitions: int = 5) -> float:
    """10^12 floating-point operations per second, in products of matrices."""
    a, b = torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE)
    times = []
    for _ in range(repetitions):
        start = perf_counter()
        torch.mm(a, b)
        times.append(perf_counter() - start)
    return 2 * SIZE**3 / min(times) / 1e12


def duration(seconds: float) -> str:
    """Time in words: `about 20 min`."""
    if seconds < 90:
        return "about a minute"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min"
    return f"about {seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"about {seconds / 86400:,.0f} days"
