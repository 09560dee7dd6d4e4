"""Taps at plain layers: they show to whoever listens what a layer is called with; and who shares what they gather."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from prong.core.moments import Window
from prong.layers.attention import TappedMultiheadAttention
from prong.layers.site import Site, in_backward


class Sharing:
    """Which sites are fed by one tensor (queries, keys and values as three layers): they share a window.

    The first of them adds what it is fed, and the others follow; those that were fed something else, or nothing, part.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[Tensor] | None = None
        self._leader: Site | None = None
        self._from_the_start = False  # whether the leader's window was empty before
        self._followed: dict[Site, tuple[Window, int]] = {}  # and up to which of its marks

    def joins(self, site: Site, h: Tensor) -> bool:
        """Whether the site's window is one that has counted this tensor already."""
        if in_backward():  # checkpointing runs some forwards again, which count nothing
            return True
        leader = self._leader if self._last is not None and self._last() is h else None
        if leader is None or leader is site:
            leader, self._last, self._leader = None, weakref.ref(h), site
            self._from_the_start = site.window is not None and site.window.empty
        if site.window is None:
            return False
        if leader is not None and leader.window is not None:
            shared, alike = leader.window, leader.layout.features == site.layout.features
            if alike and self._from_the_start and site.window.empty and site not in self._followed:
                site.window = shared
            if site.window is shared and self._followed.get(site) != (shared, shared.marks):
                self._followed[site] = shared, shared.marks
                return True
        self._part(site)
        followers = [(other, marks) for other, (window, marks) in self._followed.items() if window is site.window]
        for other, marks in followers:
            if marks < site.window.marks:
                self._part(other)
        if followers:
            site.window.mark()
        return False

    def settle(self) -> None:
        """After the forwards of an update: part those that have missed the last of them."""
        for site, (window, marks) in list(self._followed.items()):
            if window is not site.window or marks < window.marks:
                self._part(site)

    def _part(self, site: Site) -> None:
        """Give a site a window of its own, with what it has followed; forget one that is closed."""
        if site in self._followed:
            window, marks = self._followed.pop(site)
            if site.window is window:
                site.window = window.parted(since_mark=marks == window.marks)


class Tap:
    """A plain layer's forward pre-hook; in a copy of the model it does nothing."""

    def __init__(self, layer: Any = None, sharing: Sharing | None = None) -> None:
        self.layer, self._sharing = layer, sharing

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Show what the layer is called with to whoever listens."""
        if self.layer is not None and self.layer._kept:
            self.layer.drop_step()  # which has failed
        layer = self.layer
        if layer is not None and (layer.budget is not None or any(site.listening for site in layer.sites)):
            self._look(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # statistics are Python objects
    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.layer is not None and self._sharing is not None
        self.layer.see(args, kwargs, self._sharing)

    def __reduce__(self) -> tuple[type[Tap], tuple[()]]:
        return Tap, ()


def tap_of(module: nn.Module) -> Tap | None:
    """The tap at a module, if it has one."""
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Tap)), None)


def remove_taps_(modules: Iterable[nn.Module]) -> None:
    """Leave these modules as torch made them."""
    for module in modules:
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, Tap):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        if type(module) is TappedMultiheadAttention:
            module.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
            del module.__dict__["tap"]


class OnFailure:
    """The model's forward hook while statistics are gathered; in a copy of the model it does nothing."""

    def __init__(self, owner: Any = None) -> None:
        self._owner = owner

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        """Tell the owner, if this is called because of an exception."""
        failed = output is None and sys.exc_info()[0] is not None  # torch calls it from its `except`
        if failed and self._owner is not None and not in_backward():  # checkpointing stops forwards by exceptions
            self._owner.undo()

    def __reduce__(self) -> tuple[type[OnFailure], tuple[()]]:
        return OnFailure, ()
