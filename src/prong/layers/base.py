"""Layers that are whitened themselves, and what their two forms add to torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from prong.core.whitening import to_canonical, to_whitened
from prong.layers.dropping import with_dropped_directions
from prong.layers.natural import Operation, Switch, natural, naturalize
from prong.layers.site import Kind, Site, in_backward, in_transform


class WhitenedLayer(Kind, nn.Module):
    """A torch layer, changed in place by swapping its class, that knows the whitening of its inputs.

    Whitening tensors are plain attributes that follow the layer across devices and dtypes. They are not buffers:
    `state_dict` stays that of the plain layer, and DDP does not broadcast them at every forward.
    """

    switch: Switch

    def effective(self, site: Site) -> tuple[Tensor, Tensor | None]:
        """(W, b) of a site in the plain layer's shapes, to compute with."""
        raise NotImplementedError

    def watch(self, site: Site, z: Tensor, examples_at: int = 0) -> Tensor:
        """The output z; its gradient is shown to who asked for it and, like inputs, it counts."""
        if self.training and site.outputs is not None and z.requires_grad and not self.switch.ordinary:
            z = self._watch(site.outputs, z, site.layout.groups, self.channels_at, examples_at)
        return z

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watch(self, outputs: Any, z: Tensor, *where: int) -> Tensor:
        if in_transform() or (in_backward() and outputs.pending is not None):
            return z  # under vmap there are no values, and labels were drawn in the first forward
        watched: Tensor = outputs.watch(z, *where)
        return watched

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.move()
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy trains on its own: open windows and the optimizer stay with the original.
        sites = tuple(replace(site, window=None, taps=[], outputs=None) for site in self.sites)
        return {**self.__dict__, "sites": sites, "switch": Switch(), "owner": None}


class Implicit(WhitenedLayer):
    """Canonical parameters, the plain forward, natural gradients in the backward."""

    form = "implicit"

    def effective(self, site: Site) -> tuple[Tensor, Tensor | None]:  # noqa: D102
        weight, bias = self.pair(site)
        W, b = site.part(weight), site.part(bias)
        if site.whitening is None or not self.naturally(site):
            return W, b
        return naturalize(W, b, site.whitening, site.layout, self.switch)

    def naturally(self, site: Site) -> bool:
        """Whether gradients are asked for, and are to be natural."""
        return site.whitening is not None and not self.switch.ordinary and torch.is_grad_enabled()

    def natural(self, site: Site, operation: Operation, h: Tensor) -> Tensor:
        """The operation with the site's weight and bias, and natural gradients by way of activation space."""
        weight, bias = self.pair(site)
        assert site.whitening is not None
        return natural(operation, h, site.part(weight), site.part(bias), site.whitening, self.switch)


def trained_name(name: str) -> str:
    """The explicit form's name of a parameter: weight -> V, in_proj_bias -> in_proj_d."""
    return name.replace("weight", "V").replace("bias", "d")


class Explicit(WhitenedLayer):
    """Whitened parameters V, d, trained by any optimizer; U and c are constants of the layer.

    `weight` and `bias` are the canonical W and b, computed and read-only, and so is what `state_dict` holds:
    checkpoints of plain and whitened models are the same, and `load_state_dict` is the way to write them. V and d are
    the plain layer's own Parameter objects with other values.
    """

    form = "explicit"

    def parameter(self, name: str | None) -> Tensor | None:  # noqa: D102
        return None if name is None else getattr(self, trained_name(name))

    def coordinates(self, site: Site) -> tuple[Tensor, Tensor | None]:  # noqa: D102
        return self.pair(site)

    def effective(self, site: Site) -> tuple[Tensor, Tensor | None]:  # noqa: D102
        V, d = self.pair(site)
        if site.whitening is None:
            return site.part(V), site.part(d)
        W, b = site.unpacked(*to_canonical(*site.packed(V, d), site.whitening))
        return W.to(V.dtype), None if b is None else b.to(V.dtype)

    def drops(self, site: Site) -> bool:
        """Whether this forward drops directions."""
        return self.training and site.dropping is not None and site.whitening is not None

    def whitened(self, site: Site, h: Tensor, positions: int = 0) -> Tensor:
        """The inputs U (h - c) with some of their directions dropped, for V and d to compute with."""
        assert site.dropping is not None and site.whitening is not None
        x = with_dropped_directions(h, site.whitening, site.dropping, self.channels_at, positions)
        return x.to(self.pair(site)[0].dtype)

    def canonical(self) -> dict[str, Tensor]:
        """The plain layer's parameters by name."""
        parts: dict[str, list[Tensor]] = {}
        for site in self.sites:
            W, b = self.effective(site)
            parts.setdefault(site.weight, []).append(W)
            if site.bias is not None and b is not None:
                parts.setdefault(site.bias, []).append(b)
        return {name: tensors[0] if len(tensors) == 1 else torch.cat(tensors) for name, tensors in parts.items()}

    @torch.no_grad()
    def set_canonical(self, values: dict[str, Tensor]) -> None:
        """Take new canonical parameters, projected with the current whitening.

        Values that the layer already has are left alone, so that loading a checkpoint is exact to the bit after
        V and d were loaded by the optimizer.
        """
        current = self.canonical()
        if all(torch.equal(current[name].to(x), x) for name, x in values.items()):
            return
        for site in self.sites:
            trained = self.pair(site)
            W, b = site.packed(values[site.weight], None if site.bias is None else values[site.bias])
            if site.whitening is not None:
                W, b = to_whitened(W, b, site.whitening)
            site.write_both(trained, W, b)

    @contextmanager
    def _as_plain(self) -> Iterator[dict[str, nn.Parameter]]:
        """For a while, hold canonical copies under the plain names, so torch's own code saves and loads them."""
        trained = self._parameters
        with torch.no_grad():
            canonical = {name: nn.Parameter(x.detach().clone()) for name, x in self.canonical().items()}
        names = {trained_name(name): name for site in self.sites for name in (site.weight, site.bias) if name}
        self._parameters = {
            names.get(name, name): canonical.get(names.get(name, name), x) for name, x in trained.items()
        }
        try:
            yield canonical
        finally:
            self._parameters = trained

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with self._as_plain():
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            raise RuntimeError(
                "load_state_dict(assign=True) cannot replace the parameters of an explicitly whitened layer; "
                "load with assign=False, or call prong.fold_(model) first"
            )
        errors: list[str] = args[-1]
        before = len(errors)
        with self._as_plain() as canonical:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if len(errors) == before:
            self.set_canonical({name: x.detach() for name, x in canonical.items()})


def canonical_property(name: str) -> property:
    """A read-only attribute that gives the canonical tensor under its plain name."""

    def get(self: Explicit) -> Tensor | None:
        if trained_name(name) in self._parameters:
            return self.canonical().get(name)
        return self._parameters.get(name)

    return property(get, doc=f"The canonical `{name}`, computed from the whitened parameters.")
