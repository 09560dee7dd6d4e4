"""Optimizers in whitened coordinates, each one line instead of torch's own; and `attach`, for any other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from prong.attachment import Attachment, Composite, named, take_over
from prong.core.muon import OrthogonalMomentum
from prong.distributed.workers import Workers, unwrapped
from prong.forms import Space, check_combination, check_sites, take_form_
from prong.model.whiten import (
    check_model,
    fold_,
    nothing_to_whiten,
    warn_of_rest,
    weights_and_biases,
    whitened_layers,
    whitened_sites,
)
from prong.options import (
    Auto,
    Damping,
    Every,
    Form,
    Refresh,
    WhitenOutputs,
    as_form,
    check_damping,
    check_positive,
    check_refresh,
)

Inner = TypeVar("Inner", bound=Optimizer)


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
        damping: as of `attach`, and so are `form` (`prong.Explicit(plus=True)` is PRONG+) and `refresh`.
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
        attached, own = _divided(options, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
        mine, rest = named(model, params), list[Any]()
        if others is not None:
            mine, rest = _parted(mine, weights_and_biases(model))
        super().__init__({torch.optim.SGD: (mine, own), torch.optim.AdamW: (rest, dict(others or {}))})
        attach(model, self, damping=damping, form=form, refresh=refresh, **attached)


class AdamW(Composite):
    """AdamW in whitened coordinates.

        optimizer = prong.AdamW(model, lr=3e-3)        # instead of torch.optim.AdamW(model.parameters(), lr=...)

    The step is `torch.optim.AdamW`'s own, of V and d instead of W and b where layers are whitened. Steps are measured
    as in torch: a learning rate moves the function about as far as there.

    Args:
        model: as for `PRONG`, and so are `damping`, `form`, `refresh` and `params`.
        lr: learning rate.
        betas: of the averages of gradients and of their squares. The latter forget sooner than in torch: coordinates
            change, and squares can be carried over only roughly.
        eps: added to the root of the latter. (What is added to variances of inputs is the `damping`.)
        weight_decay: decoupled decay, of V and d.
        options: further ones of `torch.optim.AdamW`, such as `amsgrad`, and of `attach`, such as `trust`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        damping: Damping = 0.1,
        form: str | Form | Auto = "auto",
        refresh: Refresh | None = None,
        params: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        attached, own = _divided(options, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__({torch.optim.AdamW: (named(model, params), own)})
        attach(model, self, damping=damping, form=form, refresh=refresh, **attached)


class Muon(Composite):
    """Muon in whitened coordinates for hidden matrices and convolution kernels, and AdamW for the rest.

    Muon (Jordan et al. 2024) makes every step of a matrix orthogonal. Kernels are matrices (out, in x taps) to it.
    Weights of layers that can be whitened are its, but for the last layer's; biases and all others are AdamW's.

    Args:
        model: as for `PRONG`, and so are `damping`, `form` and `refresh`.
        lr: Muon's learning rate.
        momentum: of Muon, Nesterov's.
        weight_decay: decoupled decay.
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
        space: Space = "whitened",
        others: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        attached, own = _divided(options, lr=lr, momentum=momentum, weight_decay=weight_decay)
        check_model(model)
        matrices = [p for p in weights_and_biases(model) if p.dim() > 1][:-1]
        mine, rest = _parted(named(model, None), matrices)
        if not mine:
            raise ValueError("Muon needs hidden matrices or kernels, and this model has none; take prong.AdamW")
        adamw = {"lr": 0.1 * lr, "weight_decay": weight_decay, **(others or {})}
        super().__init__({OrthogonalMomentum: (mine, own), torch.optim.AdamW: (rest, adamw)})
        attach(model, self, damping=damping, form=form, refresh=refresh, space=space, **attached)


def attach(
    model: nn.Module,
    optimizer: Inner,
    *,
    damping: Damping = 0.1,
    form: str | Form | Auto = "auto",
    refresh: Refresh | None = None,
    trust: float | None = 0.2,
    space: Space = "whitened",
    outputs: WhitenOutputs | None = None,
    replace: bool = False,
    process_group: ProcessGroup | None = None,
) -> Inner:
    """Let an optimizer that exists step in whitened coordinates from now on; returns it.

        optimizer = prong.attach(model, SOAP(model.parameters(), lr=3e-3))

    Every parameter of a layer that can be whitened is exchanged, during steps, for the one in whitened coordinates. All
    others are trained as before. Before the first refresh nothing is changed.

    The state of torch's own optimizers is carried over exactly at each refresh. Of others, averages of gradients
    (`exp_avg`, `momentum_buffer`) are carried over, and everything else is kept as it is: coordinates are those of
    `Materialised(basis="zca")` then, which change little from one refresh to the next. (At a layer's first refresh they
    change altogether, and such a state begins anew.)

    Args:
        model: the model it trains, or a DistributedDataParallel or compiled one of it. If some of its layers are
            whitened already (`whiten_`), those are used and no others.
        optimizer: any torch.optim.Optimizer, torch's or somebody else's.
        damping: what is added to the variance of each layer's inputs, in units of their mean square; or
            `prong.Absolute(eps)`.
        form: how: "auto", "implicit", "explicit" or "materialised", or one of `prong.Auto(...)`, `prong.Implicit(...)`,
            `prong.Explicit(...)`, `prong.Materialised(...)`. All walk the same path.
        refresh: when whitening is estimated anew, and from which samples: `prong.Every(1000)` (the default, and more
            often at first), `prong.OnDrift(...)` or `prong.Never()`.
        trust: the largest change of a layer's pre-activations that a step may make by prediction, in RMS over data and
            units; of SGD, what the velocity has still to make, too. None: any.
        space: "natural" gives the optimizer natural gradients instead: another method, unless it is SGD.
        outputs: whiten backpropagated gradients too, with `prong.WhitenOutputs(...)`. For SGD.
        replace: take the model over from an optimizer that trains it in whitened coordinates already. One that nobody
            holds any more is replaced anyway.
        process_group: the workers that train the model together; default: DistributedDataParallel's, or all where
            `torch.distributed` is initialised.
    """
    check_model(model)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    check_damping(damping)
    check_positive("trust", trust, optional=True)
    refresh = Every() if refresh is None else refresh
    check_refresh(refresh)
    workers, given, model = Workers.of(model, process_group), model, unwrapped(model)
    take_over(model, replace)
    layers, form = dict(whitened_layers(model)), as_form(form)
    check_combination(model, optimizer, form, list(layers.values()), space, outputs)
    if not layers:
        take_form_(model, optimizer, form, space, outputs)
    try:
        sites = whitened_sites(model)
        if not sites:
            raise ValueError(nothing_to_whiten(model))
        check_sites(optimizer, sites, refresh, outputs)
        Attachment(given, optimizer, sites, damping, refresh, trust, outputs, workers)
    except BaseException:
        if not layers:
            fold_(model)
        raise
    if not layers:
        warn_of_rest(model, sites.values())
    return optimizer


def _divided(options: dict[str, Any], **own: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of `attach`, and those of torch's optimizer."""
    names = attach.__kwdefaults__ or {}
    return {k: v for k, v in options.items() if k in names}, own | {k: v for k, v in options.items() if k not in names}


def _parted(params: list[Any], wanted: Iterable[Tensor]) -> tuple[list[Any], list[Any]]:
    """Those that are wanted, and the rest; groups are parted too, and the rest has no options of theirs."""
    ids = set(map(id, wanted))
    if not params or not isinstance(params[0], dict):
        return [x for x in params if id(x[1]) in ids], [x for x in params if id(x[1]) not in ids]
    parts = [(group, *_parted(group["params"], wanted)) for group in params]
    mine = [{**group, "params": own} for group, own, _ in parts if own]
    return mine, [{"params": rest} for _, _, rest in parts if rest]
