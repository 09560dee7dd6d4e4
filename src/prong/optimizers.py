"""Optimizers in whitened coordinates, each one line instead of torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from prong.attachment import attach, attachment_of
from prong.core.muon import OrthogonalMomentum
from prong.distributed.joining import Shadow
from prong.distributed.workers import eager_name, unwrapped
from prong.model.whiten import check_model, weights_and_biases
from prong.options import Auto, Damping, Form, Refresh

Named = list[tuple[str, Tensor]]


class Composite(Optimizer, Joinable):
    """Optimizers of torch, each with groups of its own, as one; in whitened coordinates once it is attached.

    Args:
        model: the model.
        parts: the optimizers, and what to make each of: parameters with their names, or groups, and options.
        attached: options of `prong.attach`.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Mapping[type[Optimizer], tuple[list[Any], dict[str, Any]]],
        attached: Mapping[str, Any],
    ) -> None:
        self._parts = {kind.__name__: kind(params, **options) for kind, (params, options) in parts.items() if params}
        self._rules: dict[int, type[Optimizer]] = {}
        groups = [{**group, "rule": rule} for rule, part in self._parts.items() for group in part.param_groups]
        groups = [{**group, "params": _pairs(group)} for group in groups]
        Optimizer.__init__(self, groups, next(iter(self._parts.values())).defaults)
        Joinable.__init__(self)
        attach(model, self, **attached)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Make one update; returns what `closure` does, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            for rule, part in self._parts.items():
                part.param_groups = [group for group in self.param_groups if group["rule"] == rule]
                part.state = self.state
                part.step()
        except BaseException:
            attachment_of(self).abandon()
            raise
        return loss

    def rule_of(self, parameter: Tensor) -> type[Optimizer]:
        """Which optimizer trains a parameter."""
        return self._rules.get(id(parameter), Optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, named as the others are; they are trained by the first of the optimizers."""
        rule = param_group.setdefault("rule", next(iter(self._parts)))
        attachment = self.__dict__.get("_prong")
        if attachment is not None:
            param_group["params"] = _named(attachment.refresher.model, param_group["params"])
        super().add_param_group(param_group)
        self._rules |= dict.fromkeys(map(id, self.param_groups[-1]["params"]), type(self._parts[rule]))

    def join_hook(self, **unused: Any) -> JoinHook:
        """For `torch.distributed.algorithms.Join([model, optimizer])`, where some workers run out of data early."""
        return Shadow(self, attachment_of(self).given, attachment_of(self).refresher)

    @property
    def join_device(self) -> torch.device:
        """Where workers talk."""
        return attachment_of(self).workers.device

    @property
    def join_process_group(self) -> Any:
        """The workers."""
        return attachment_of(self).workers.group or torch.distributed.group.WORLD

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group, own in zip(state["param_groups"], self.param_groups, strict=True):
            group.setdefault("rule", own["rule"])  # of which states of torch's own optimizers know nothing
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"prong.{type(self).__name__} is bound to its model and cannot be copied or pickled; save its state_dict()"
        )


class PRONG(Composite):
    """Projected natural gradient descent (Desjardins et al. 2015): SGD in whitened coordinates.

        optimizer = prong.PRONG(model, lr=1e-2)        # instead of torch.optim.SGD(model.parameters(), lr=...)

    The step is `torch.optim.SGD`'s own, and before the first refresh this is SGD, bit for bit. Weight decay is L2 decay
    in whitened coordinates, which is `W -= lr wd W, b -= lr wd b` on the network's own.

    Args:
        model: the model to train, or a DistributedDataParallel or compiled one of it. If some of its layers are
            whitened already, those are used and no others.
        lr: learning rate.
        momentum: heavy-ball momentum; Nesterov's with `nesterov=True`.
        nesterov: see `momentum`.
        weight_decay: see above.
        damping: what is added to the variance of each layer's inputs, in units of their mean square; or
            `prong.Absolute(eps)`, the paper's.
        form: how; see `attach`. `prong.Explicit(plus=True)` is PRONG+.
        refresh: when, and from which samples; see `attach`. Default: `prong.Every(1000)`, and more often at first.
        others: train what cannot be whitened (embeddings, norms, recurrent cells) by AdamW, with these options, such
            as `{"lr": 1e-3}`; None: by SGD too.
        params: parameters or parameter groups as for any torch optimizer; default: all of the model's.
        options: further ones of `torch.optim.SGD`, such as `maximize`, and of `attach`, such as `trust`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-2,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        damping: Damping = 0.1,
        form: str | Form | Auto = "auto",
        refresh: Refresh | None = None,
        others: Mapping[str, Any] | None = None,
        params: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        attached, own = _divided(options)
        own |= {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        attached |= {"damping": damping, "form": form, "refresh": refresh}
        mine, rest = _named(model, params), []
        if others is not None:
            wanted = set(map(id, weights_and_biases(model)))
            mine, rest = _parted(mine, wanted)
        super().__init__(model, {torch.optim.SGD: (mine, own), torch.optim.AdamW: (rest, dict(others or {}))}, attached)


class AdamW(Composite):
    """AdamW in whitened coordinates.

        optimizer = prong.AdamW(model, lr=3e-3)        # instead of torch.optim.AdamW(model.parameters(), lr=...)

    The step is `torch.optim.AdamW`'s own, of V and d instead of W and b where layers are whitened. Steps are measured
    as in torch: a learning rate moves the function about as far as there.

    Args:
        model: as for `PRONG`.
        lr: learning rate.
        betas: of the averages of gradients and of their squares.
        eps: added to the root of the latter. (What is added to variances of inputs is the `damping`.)
        weight_decay: decoupled decay, of V and d.
        damping: as for `PRONG`.
        form: as for `PRONG`.
        refresh: as for `PRONG`.
        params: as for `PRONG`.
        options: further ones of `torch.optim.AdamW`, such as `amsgrad`, and of `attach`, such as `trust`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        damping: Damping = 0.1,
        form: str | Form | Auto = "auto",
        refresh: Refresh | None = None,
        params: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        attached, own = _divided(options)
        own |= {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        attached |= {"damping": damping, "form": form, "refresh": refresh}
        super().__init__(model, {torch.optim.AdamW: (_named(model, params), own)}, attached)


class Muon(Composite):
    """Muon in whitened coordinates for hidden matrices and convolution kernels, and AdamW for the rest.

    Muon (Jordan et al. 2024) makes every step of a matrix orthogonal. Kernels are matrices (out, in x taps) to it.
    Weights of layers that can be whitened are its, but for the last layer's; biases and all others are AdamW's.

    Args:
        model: as for `PRONG`.
        lr: Muon's learning rate.
        momentum: of Muon, Nesterov's.
        weight_decay: decoupled decay.
        damping: as for `PRONG`.
        form: as for `PRONG`.
        refresh: as for `PRONG`.
        space: "whitened"; or "natural": matrices msgn(G (Sigma + damping)^-1), known as Newton-Muon.
        others: options of AdamW for the rest; its learning rate is a tenth of Muon's where none is given.
        options: further ones of `attach`, such as `trust`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 2e-2,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        damping: Damping = 0.1,
        form: str | Form | Auto = "auto",
        refresh: Refresh | None = None,
        space: str = "whitened",
        others: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        attached, own = _divided(options)
        own |= {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        attached |= {"damping": damping, "form": form, "refresh": refresh, "space": space}
        matrices = [p for p in weights_and_biases(model) if p.dim() > 1][:-1]
        mine, rest = _parted(_named(model, None), set(map(id, matrices)))
        if not mine:
            raise ValueError("Muon needs hidden matrices or kernels, and this model has none; take prong.AdamW")
        adamw = {"lr": 0.1 * lr, "weight_decay": weight_decay, **(others or {})}
        super().__init__(model, {OrthogonalMomentum: (mine, own), torch.optim.AdamW: (rest, adamw)}, attached)


ATTACHED = ("trust", "space", "outputs", "replace", "process_group")


def _divided(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of `attach`, and those of torch's optimizer."""
    attached = {name: options[name] for name in ATTACHED if name in options}
    return attached, {name: value for name, value in options.items() if name not in ATTACHED}


def _named(model: nn.Module, params: Any) -> list[Any]:
    """What torch's optimizers take: parameters or groups of them, with their names in the model."""
    check_model(model)
    names = {id(p): eager_name(name) for name, p in unwrapped(model).named_parameters()}
    given = list(unwrapped(model).parameters()) if params is None else params
    given = [given] if isinstance(given, Tensor) else list(given)
    if given and isinstance(given[0], dict):
        return [{**group, "params": _named(model, group["params"])} for group in given]
    return [p if isinstance(p, tuple) else (names.get(id(p), f"outside.{i}"), p) for i, p in enumerate(given)]


def _pairs(group: dict[str, Any]) -> Named:
    return list(zip(group["param_names"], group["params"], strict=True))


def _parted(params: list[Any], wanted: set[int]) -> tuple[list[Any], list[Any]]:
    """Those that are wanted, by their ids, and the rest; groups are parted too."""
    if params and isinstance(params[0], dict):
        parts = [(group, *_parted(group["params"], wanted)) for group in params]
        return (
            [{**group, "params": mine} for group, mine, _ in parts if mine],
            [{"params": rest} for _, _, rest in parts if rest],
        )
    return [x for x in params if id(x[1]) in wanted], [x for x in params if id(x[1]) not in wanted]
