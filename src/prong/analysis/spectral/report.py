"""What a compression did, layer by layer and in total."""

from __future__ import annotations

from dataclasses import dataclass

from prong.analysis.spectral.allocation import Plan
from prong.model.tables import aligned


@dataclass(frozen=True)
class Layer:
    """One line of a report: sizes before and after, and errors.

    Errors are mean squared distances of the layer's outputs from those of the given network, as shares of
    the variance of these (of their mean square where the layer has no bias).
    """

    name: str
    kind: str  # the type it had
    parameters: tuple[int, int]
    flops: tuple[float, float] | None  # additions and multiplications for one example, of Linear and convolutions
    plan: Plan = "plain"  # see `Option`
    rank: tuple[int, int] | None = None  # and the largest that there can be by its plan
    expected: float = 0.0  # the error on the given network's inputs to this layer, from their statistics
    measured: float = 0.0  # the error within the compressed network, where inputs have changed too
    note: str = ""  # why the layer was left as it is, if it was


@dataclass(frozen=True)
class Report:
    """A line for each layer with parameters of its own, and totals; prints as a table."""

    layers: tuple[Layer, ...]
    parameters: tuple[int, int]  # of the network, before and after; tied ones count once
    output_error: float  # E||f - g||^2 / E||f - E f||^2, f and g what the given and the compressed network return

    @property
    def flops(self) -> tuple[float, float]:
        """Additions and multiplications for one example in Linear and convolutional layers, before and after."""
        counted = [layer.flops for layer in self.layers if layer.flops is not None]
        return sum(before for before, _ in counted), sum(after for _, after in counted)

    @property
    def expected(self) -> float:
        """The sum of the layers' expected errors."""
        return sum(layer.expected for layer in self.layers)

    def __getitem__(self, name: str) -> Layer:
        """The line of a layer."""
        lines = {layer.name: layer for layer in self.layers}
        if name not in lines:
            raise KeyError(f"no line for a layer {name!r}: there are {', '.join(map(repr, lines))}")
        return lines[name]

    def __str__(self) -> str:
        sizes = ("parameters", "after", "flops", "after")
        head = ("layer", "kind", "plan", "rank", *sizes, "expected", "measured", "note")
        lines = [
            (
                layer.name,
                layer.kind,
                layer.plan,
                "" if layer.rank is None else f"{layer.rank[0]}/{layer.rank[1]}",
                *(f"{n:,}" for n in layer.parameters),
                *(("", "") if layer.flops is None else (f"{n:,.0f}" for n in layer.flops)),
                *("" if layer.rank is None else f"{error:.2e}" for error in (layer.expected, layer.measured)),
                layer.note,
            )
            for layer in self.layers
        ]
        totals = (f"{n:,.0f}" for n in (*self.parameters, *self.flops))
        total = ("total", "", "", "", *totals, f"{self.expected:.2e}", f"{self.output_error:.2e}", "measured: outputs")
        return aligned([head, *lines, total], numeric={3, 4, 5, 6, 7, 8, 9})
