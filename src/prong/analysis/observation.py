"""Looking at layers' inputs as they pass, whitened or not, without touching anything."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prong.core.moments import Moments
from prong.core.whitening import Whitening
from prong.layers import Kind, Site
from prong.layers.site import Inputs

MIXERS = (2654435769, 2246822507, 3266489909)


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
    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._observer.look(self._name, module, args, kwargs)

    def __reduce__(self) -> tuple[type[Listener], tuple[()]]:
        return Listener, ()


class Seen:
    """Some rows of a site's inputs, evenly spread over all that passed, and the whitening they met.

    Row i of all that passed has a key, the bits of i mixed. The rows with the smallest keys count, which are the same
    whatever calls they come in. Regular spacing would favour some positions of maps, or some examples.
    """

    def __init__(self, layer: Kind, site: Site, samples: int) -> None:
        self.layer, self.layout, self.samples = layer, site.layout, samples
        self.whitening: Whitening | None = None
        self.centred = True
        self._empty: Moments = site.new_window(layer.pair(site)[0]).moments
        self._keys = torch.zeros(0, dtype=torch.int64)
        self.kept: Tensor | None = None  # (groups, rows, in), in the order in which they passed
        self._passed, self._zeros = 0, 0.0

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, inputs: Inputs) -> None:
        """Let rows and padded zeros pass, and keep copies of those that count."""
        known, total = len(self._keys), inputs.rows.shape[1]
        keys = torch.cat([self._keys, _mixed(torch.arange(self._passed, self._passed + total))])
        self._passed, self._zeros = self._passed + total, self._zeros + inputs.zeros
        chosen = keys.topk(min(len(keys), self.samples), largest=False).indices.sort().values
        rows = inputs.rows.index_select(1, (chosen[chosen >= known] - known).to(inputs.rows.device))
        if self.kept is not None:
            rows = torch.cat([self.kept.index_select(1, chosen[chosen < known].to(rows.device)), rows], dim=1)
        self._keys, self.kept = keys[chosen], rows

    def moments(self) -> Moments | None:
        """Those of the rows kept, and of padded zeros in proportion; None if they are not finite."""
        assert self.kept is not None
        moments = self._empty.empty()
        try:
            moments.add(self.kept)
        except FloatingPointError:  # a monitor tells of divergence; to stop is for the training
            return None
        moments.add_zeros(self._zeros * len(self) / self._passed)
        return moments


def _mixed(numbers: Tensor) -> Tensor:
    """Numbers below 2^32 in an order without pattern; different ones stay different."""
    for factor in MIXERS:  # odd, so that each step can be undone
        numbers = (numbers ^ (numbers >> 16)) * factor % 2**32
    return numbers ^ (numbers >> 16)


def fitting(names: Iterable[str], layers: str | Iterable[str] | None, what: str) -> list[str]:
    """Those of the names that patterns fit; None takes all."""
    names = list(names)
    patterns = ["*"] if layers is None else [layers] if isinstance(layers, str) else list(layers)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"no {what} fits {pattern!r}. There are: {', '.join(filter(None, names)) or 'none'}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


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
    for i in range(dims):
        reach = layer.dilation[i] * (layer.kernel_size[i] - 1) + 1
        h = h.unfold(2 + i, reach, layer.stride[i])[..., :: layer.dilation[i]]
    h = h.flatten(2 + dims).movedim(1, -2)  # (examples, *positions, channels, taps)
    return h.reshape(-1, layer.groups, h.shape[-2] // layer.groups, h.shape[-1]).transpose(0, 1)
