"""What happens to an optimizer's state when whitened coordinates change (explicit form)."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from prong.core.coordinates import Pair, Transition, transport_gradient, transport_square, transport_velocity
from prong.layers import Explicit, Site, WhitenedLayer

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
}


def transports_of(optimizer: Optimizer) -> dict[str, Transport] | None:
    """How each entry of the optimizer's state moves, or None if nobody knows."""
    for kind, transports in TRANSPORTS.items():
        if isinstance(optimizer, kind):
            return transports
    return None


def plan_parameters(layer: Explicit, site: Site, transition: Transition) -> list[Update]:
    """The new V and d of a site: the same function in new coordinates."""
    return _moved(site, *layer.pair(site), transition, transport_velocity)


def plan_gradients(layer: Explicit, site: Site, transition: Transition) -> list[Update]:
    """The new gradients of V and d, where there are any."""
    V, d = layer.pair(site)
    if V.grad is None:
        return []
    return _moved(site, V.grad, None if d is None else d.grad, transition, transport_gradient)


def plan_state(optimizer: Optimizer, layer: Explicit, site: Site, transition: Transition) -> list[Update]:
    """The new values of the optimizer's state for V and d, carried over."""
    transports = transports_of(optimizer)
    V, d = layer.pair(site)
    updates: list[Update] = []
    if transports is None or V not in optimizer.state:
        return updates
    state_V, state_d = optimizer.state[V], {} if d is None else optimizer.state.get(d, {})
    for key, transport in transports.items():
        value = state_V.get(key)
        if isinstance(value, Tensor) and value.shape == V.shape:
            updates += _moved(site, value, state_d.get(key), transition, transport)
    return updates


_POWERS: dict[Transport, int] = {transport_velocity: 1, transport_gradient: -1, transport_square: -2}


def diagonal_powers(optimizer: Optimizer, V: Tensor) -> list[tuple[Tensor, int]]:
    """V and its state, each with the power of s by which it is multiplied when U becomes diag(1/s) U."""
    state = optimizer.state.get(V, {})
    powers = [(V, 1)]
    for key, transport in (transports_of(optimizer) or {}).items():
        value = state.get(key)
        if isinstance(value, Tensor) and value.shape == V.shape:
            powers.append((value, _POWERS[transport]))
    return powers


def reset_state(optimizer: Optimizer, layer: WhitenedLayer, site: Site) -> None:
    """Forget the state of a site's parameters; torch's optimizers start it again."""
    for parameter in layer.pair(site):
        if parameter is not None:
            optimizer.state.pop(parameter, None)


def warn_unknown(optimizer: Optimizer) -> None:
    """Say that the state of an optimizer we do not know is reset at each refresh."""
    warnings.warn(
        f"prong does not know how the state of {type(optimizer).__name__} changes with the coordinates: "
        "it is reset at every refresh",
        stacklevel=3,
    )


def _moved(
    site: Site, weight: Tensor, bias: Tensor | None, transition: Transition, transport: Transport
) -> list[Update]:
    precise = [None if x is None else x.to(transition.M.dtype) for x in (weight, bias)]
    assert precise[0] is not None
    moved = site.unpacked(*transport(*site.packed(precise[0], precise[1]), transition))
    targets = (site.part(weight), site.part(bias))
    return [(t, m) for t, m in zip(targets, moved, strict=True) if t is not None and m is not None]
