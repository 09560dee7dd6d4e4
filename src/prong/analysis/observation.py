"""Looking at layers' inputs as they pass, whitened or not, without touching anything."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prong.core.moments import Moments
from prong.core.whitening import Whitening
from prong.layers import Kind, Site
from prong.layers.site import Inputs


class Listener:
    """A layer's forward pre-hook: while its observer is `listening`, shows it what the layer is called with.

    In a copy of the model it does nothing.
    """

    def __init__(self, observer: Any = None, name: str = "") -> None:
        self._observer, self._name = observer, name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Show the observer what the module is called with."""
        if self._observer is not None and self._observer.listening:
            self._look(module, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # statistics are Python objects
    def _look(self, *call: Any) -> None:
        self._observer.look(self._name, *call)

    def __reduce__(self) -> tuple[type[Listener], tuple[()]]:
        return Listener, ()


class Seen:
    """Some rows of a site's inputs, evenly spread over all that passed, and the whitening they met.

    Every row that passes draws a number; the rows with the smallest count, whatever calls they come in. Regular spacing
    would favour some positions of maps, or some examples.
    """

    def __init__(self, layer: Kind, site: Site, samples: int) -> None:
        self.layer, self.layout, self.samples = layer, site.layout, samples
        self.whitening: Whitening | None = None
        self.centred = True
        self._empty: Moments = site.new_window(layer.pair(site)[0]).moments
        self.kept = self._empty.mean.new_zeros(site.layout.matrices, 0, site.layout.features)  # in order of passing
        self._numbers, self._generator = torch.zeros(0, dtype=torch.float64), torch.Generator().manual_seed(0)
        self._passed, self._zeros = 0, 0.0

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, inputs: Inputs) -> None:
        """Let rows and padded zeros pass, and keep copies of those that count."""
        known, total = len(self), inputs.rows.shape[1]
        drawn = torch.rand(total, generator=self._generator, dtype=torch.float64)
        numbers = torch.cat([self._numbers, drawn])
        self._passed, self._zeros = self._passed + total, self._zeros + inputs.zeros
        chosen = numbers.topk(min(len(numbers), self.samples), largest=False).indices.sort().values
        old, new = (x.to(inputs.rows.device) for x in (chosen[chosen < known], chosen[chosen >= known] - known))
        self._numbers = numbers[chosen]
        self.kept = torch.cat([self.kept[:, old], inputs.rows[:, new].to(self.kept)], dim=1)

    def moments(self) -> Moments | None:
        """Those of the rows kept, and of padded zeros in proportion; None if they are not finite."""
        moments = self._empty.empty()
        try:
            moments.add(self.kept)
        except FloatingPointError:  # a monitor tells of divergence; to stop is for the training
            return None
        moments.add_zeros(self._zeros * len(self) / self._passed)
        return moments


def tensors_given(layer: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """A tensor for each site of the layer."""
    names = ("query", "key", "value") if len(layer.sites) == 3 else ("input",)
    given = [*args[: len(names)], *(kwargs[name] for name in (*names, "h", "x") if name in kwargs)]
    return [h for h in given if isinstance(h, Tensor)]


def patches(layer: Any, h: Tensor) -> Tensor:
    """What each output position of a convolution sees: (groups, positions, channels of a group, taps)."""
    dims = len(layer.kernel_size)
    h = h if h.dim() == dims + 2 else h.unsqueeze(0)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    h = F.pad(h, layer._reversed_padding_repeated_twice, mode=mode)
    for i, (size, step, dilation) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        h = h.unfold(2 + i, dilation * (size - 1) + 1, step)[..., ::dilation]
    h = h.flatten(2 + dims).movedim(1, -2)  # (examples, *positions, channels, taps)
    return h.reshape(-1, layer.groups, h.shape[-2] // layer.groups, h.shape[-1]).transpose(0, 1)
