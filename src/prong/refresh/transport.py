"""What happens to an optimizer's state when whitened coordinates change, where it holds V and d."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from prong.core.muon import OrthogonalMomentum
from prong.core.whitening import Pair, Transition, transport_gradient, transport_square, transport_velocity
from prong.distributed.sharding import local
from prong.layers import Kind, Site

Transport = Callable[[Tensor, Tensor | None, Transition], Pair]
Update = tuple[Tensor, Tensor]  # a tensor, and the value it is to take

_ADAM: dict[str, Transport] = {
    "exp_avg": transport_gradient,
    "exp_avg_sq": transport_square,
    "max_exp_avg_sq": transport_square,
}
# SGD and RMSprop add up steps already taken, which are velocities; Adam and Muon average gradients.
TRANSPORTS: dict[type[Optimizer], dict[str, Transport]] = {
    torch.optim.SGD: {"momentum_buffer": transport_velocity},
    torch.optim.Adam: _ADAM,
    torch.optim.NAdam: _ADAM,
    torch.optim.RAdam: _ADAM,
    torch.optim.Adagrad: {"sum": transport_square},
    torch.optim.RMSprop: {
        "square_avg": transport_square,
        "momentum_buffer": transport_velocity,
        "grad_avg": transport_gradient,
    },
    torch.optim.Muon: {"momentum_buffer": transport_gradient},
    OrthogonalMomentum: {"momentum_buffer": transport_gradient},
}
# What is done with an optimizer that nobody knows: its averages of gradients are carried over, everything else is kept,
# as "zca" coordinates change little from one refresh to the next.
UNKNOWN: dict[str, Transport] = dict.fromkeys(
    ("exp_avg", "momentum_buffer", "momentum", "exp_avg_slow"), transport_gradient
)


LEAST_SQUARE = 0.1  # of the square of the mean: after a sudden gradient, Adam's own are no larger beside it


def rule_of(optimizer: Optimizer, parameter: Tensor) -> type[Optimizer]:
    """The class of torch's optimizer, or of another, that trains a parameter; of mixed ones, its part."""
    mixed: Callable[[Tensor], type[Optimizer]] | None = getattr(optimizer, "rule_of", None)
    return type(optimizer) if mixed is None else mixed(parameter)


def is_linear(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether steps are linear in the gradient, so that natural gradients are all they need."""
    return issubclass(rule_of(optimizer, parameter), torch.optim.SGD)


def transports_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Transport] | None:
    """How each entry of a parameter's state moves, or None if nobody knows."""
    rule = rule_of(optimizer, parameter)
    return next((moves for kind, moves in TRANSPORTS.items() if issubclass(rule, kind)), None)


def keeps_state(optimizer: Optimizer, layer: Kind, site: Site) -> bool:
    """Whether the state of a site's parameters has a meaning in its next coordinates; else it begins anew.

    State that nobody knows is kept where coordinates change little: in a "zca" basis, once inputs are whitened.
    """
    weight, _ = layer.pair(site)
    if layer.coordinates(site) is None or transports_of(optimizer, weight) is not None:
        return True
    return layer.basis == "zca" and site.whitening is not None


def plan_state(optimizer: Optimizer, layer: Kind, site: Site, transition: Transition) -> list[Update]:
    """The new values of the optimizer's state for V and d, carried over."""
    weight, bias = layer.pair(site)
    updates: list[Update] = []
    if weight not in optimizer.state:
        return updates
    state_V, state_d = optimizer.state[weight], {} if bias is None else optimizer.state.get(bias, {})
    mean: Tensor | None = None  # of gradients
    for key, transport in (transports_of(optimizer, weight) or UNKNOWN).items():
        value = state_V.get(key)
        if isinstance(value, Tensor) and value.numel() == weight.numel():
            of_bias = state_d.get(key)
            of_bias = local(of_bias) if isinstance(of_bias, Tensor) else None
            new = moved(site, local(value).view(local(weight).shape), of_bias, transition, transport)
            if key == "exp_avg":
                mean = new[0][1]
            elif mean is not None and transport is transport_square:
                # Carried over roughly, squares may be far too small beside a mean that was carried over exactly, and a
                # step in a direction that was hardly seen before could be of any length.
                torch.maximum(new[0][1], LEAST_SQUARE * mean.square(), out=new[0][1])
            updates += new
    return updates


_POWERS: dict[Transport, int] = {transport_velocity: 1, transport_gradient: -1, transport_square: -2}


def diagonal_powers(optimizer: Optimizer, V: Tensor) -> list[tuple[Tensor, int]]:
    """V and its state, each with the power of s by which it is multiplied when U becomes diag(1/s) U."""
    state = optimizer.state.get(V, {})
    powers = [(V, 1)]
    for key, transport in (transports_of(optimizer, V) or {}).items():
        value = state.get(key)
        if isinstance(value, Tensor) and value.shape == V.shape:
            powers.append((value, _POWERS[transport]))
    return powers


def reset_state(optimizer: Optimizer, layer: Kind, site: Site) -> None:
    """Forget the state of a site's parameters; optimizers start it again."""
    fused = {id(p) for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    for parameter in layer.pair(site):
        velocity = None if parameter is None else optimizer.state.pop(parameter, {}).get("momentum_buffer")
        if parameter is not None and velocity is not None and id(parameter) in fused:
            # torch's fused SGD takes velocities of all parameters or of none; zeros begin as nothing does.
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(velocity)


def moved(
    site: Site, weight: Tensor, bias: Tensor | None, transition: Transition, transport: Transport
) -> list[Update]:
    """The values of a site's weight and bias, or of what is shaped like them, in new coordinates."""
    precise = [None if x is None else x.to(transition.M.dtype) for x in (weight, bias)]
    assert precise[0] is not None
    if transition.shift is None or bias is None or bias.dim() == 0:
        precise[1] = None
    values = site.unpacked(*transport(*site.packed(precise[0], precise[1]), transition))
    targets = (site.part(weight), site.part(bias))
    return [(t, m) for t, m in zip(targets, values, strict=True) if t is not None and m is not None]
