"""Which layers of a plain model can be compressed, and why the others cannot."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from prong.analysis.observation import Listener
from prong.analysis.spectral.probing import Compressible
from prong.layers import OnFailure
from prong.model.whiten import shared_parameters, why_not

OWN_HOOKS = (OnFailure, Listener)  # which do nothing in copies
COMPRESSIBLE: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Reasons = dict[str, str]


def choose(
    model: nn.Module, layers: str | Iterable[str] | None
) -> tuple[dict[str, Compressible], dict[str, Compressible], Reasons]:
    """The layers to compress, all whose operations can be counted, and the reasons of those that are left alone.

    Raises:
        ValueError: a pattern that fits nothing, a layer asked for by name that cannot be compressed, or none that can.
    """
    modules = dict(model.named_modules())
    patterns = ["*"] if layers is None else [layers] if isinstance(layers, str) else list(layers)
    for pattern in patterns:
        if layers is not None and not any(fnmatchcase(name, pattern) for name in modules):
            raise ValueError(f"no layer fits {pattern!r}. Layers: {', '.join(filter(None, modules))}")
    shared = shared_parameters(model)
    chosen: dict[str, Compressible] = {}
    countable: dict[str, Compressible] = {}
    reasons: Reasons = {}
    for name, module in modules.items():
        if not module._parameters or all(p is None for p in module._parameters.values()):
            continue
        reason = _why_not_compressed(name, module, modules, shared)
        if isinstance(module, COMPRESSIBLE) and "weight" in module._parameters and not _lazy(module):
            countable[name] = module  # type: ignore[assignment]
        if reason is not None:
            if layers is not None and name in patterns:
                raise ValueError(f"layer {name!r} cannot be compressed: {reason}")
            reasons[name] = reason
        elif any(fnmatchcase(name, pattern) for pattern in patterns):
            chosen[name] = module
        else:
            reasons[name] = "not asked for"
    if not chosen:
        raise ValueError(
            f"nothing in this {type(model).__name__} can be compressed, only Linear and Conv1d/2d/3d layers: "
            + "; ".join(f"{name or '(model)'}: {reason}" for name, reason in reasons.items())
        )
    return chosen, countable, reasons


def forget_observers_(model: nn.Module) -> None:
    """Remove the hooks of whoever watched the model that this is a copy of, or gathered its statistics."""
    for module in model.modules():
        options = (
            module._forward_hooks_with_kwargs,
            module._forward_hooks_always_called,
            module._forward_pre_hooks_with_kwargs,
        )
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, OWN_HOOKS)]:
                for entries in (hooks, *options):
                    entries.pop(key, None)


def _lazy(module: nn.Module) -> bool:
    return any(isinstance(p, nn.parameter.UninitializedParameter) for p in module._parameters.values())


def _why_not_compressed(name: str, module: nn.Module, modules: dict[str, nn.Module], shared: set[int]) -> str | None:
    """Why a layer is left alone, or None."""
    reason = why_not(module, shared)
    if reason is not None:
        return reason
    if type(module) not in COMPRESSIBLE:
        return f"its type is {type(module).__name__}"
    if getattr(module, "groups", 1) > 1:
        return f"its {module.groups} groups have no maps in common"
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if any(not isinstance(hook, OWN_HOOKS) for hook in hooks):
        return "it has forward hooks, which a replacement would lose"
    if isinstance(modules.get(name.rpartition(".")[0]), nn.TransformerEncoderLayer):
        return "TransformerEncoderLayer reads its weight without calling it"
    return None
