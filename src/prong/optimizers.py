"""PRONG: SGD in whitened coordinates, as a torch optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Joinable, JoinHook

from prong.core.whitening import Storage
from prong.distributed.joining import Shadow
from prong.distributed.sharding import check_unsharded
from prong.distributed.workers import Workers, unwrapped
from prong.gradients.outputs import GradientSource
from prong.gradients.whitening import BALANCE, GradientWhitening, LossScale
from prong.model.estimate import Forward
from prong.model.initialize import Scheme, fan_in_, initialize_
from prong.model.whiten import Form, check_model, fold_, whiten_, whitened_layers
from prong.refresh.apply import OnRefresh, require_whitened
from prong.refresh.refresher import Refresher, Source
from prong.refresh.timing import Period


class PRONG(torch.optim.SGD, Joinable):
    """Projected natural gradient descent (Desjardins et al. 2015).

        optimizer = prong.PRONG(model, lr=1e-3)        # instead of torch.optim.SGD(model.parameters(), lr=...)

    The step is `torch.optim.SGD`'s own; the layers of `model` are whitened (`whiten_`), and re-estimated after updates
    1, 2, 4, ..., `period` and then every `period`-th. Parameters outside whitened layers are trained by plain SGD.
    Before the first refresh this is `torch.optim.SGD`, bit for bit.

    Weight decay adds `weight_decay * parameter` to the gradient as SGD does, after it was made natural. That is L2
    decay in whitened coordinates; as `b = d - W c` is linear in them, decaying (V, d) is decaying (W, b), and both
    forms do `W -= lr wd W, b -= lr wd b`. (They differ if the bias alone is put in a group without decay.)

    Args:
        model: the model to train, or a DistributedDataParallel of it. If some of its layers are whitened already, those
            are used and no others.
        lr: learning rate.
        momentum: heavy-ball momentum; Nesterov's with `nesterov=True`.
        nesterov: see `momentum`.
        weight_decay: see above.
        eps: damping of the covariances; the largest gain in any direction is 1/eps.
        period: updates between refreshes, the paper's T; or "auto": each layer when its inputs have drifted.
        samples: examples per refresh, the paper's N_s.
        form: "implicit" (default) or "explicit" (default with `plus`).
        cutoff: treat directions with a variance below `cutoff * eps` as having none: cheaper updates, nearly the same;
            0 is exact. See `whiten_`.
        storage: the dtype of the matrices; see `whiten_`.
        source: where those examples come from: "window", "ema", or a loader; see `Refresher`.
        lag: factorise in another thread while training goes on, and change coordinates so many updates later.
        early: refresh after updates 1, 2, 4, ... too, before the first period is over; see `Refresher`.
        plus: PRONG+: rescale by the deviation of the whitened activations after every update.
        balance: divide each layer's step by the running mean square of its output gradients: one learning rate
            fits all layers. It needs to know of loss scaling, see `loss_scale`.
        gradient_whitening: whiten backpropagated gradients too: "empirical", or "categorical", "bernoulli",
            "gaussian" for labels drawn from the model.
        on_refresh: "transport" momentum exactly across a refresh, or "reset" it.
        params: parameters or parameter groups as for any torch optimizer; default: all of the model's.
        maximize: ascend instead.
        foreach: torch's multi-tensor implementation.
        fused: torch's implementation in one pass over memory, the fastest where there is one.
        process_group: the workers that train the model together; default: DistributedDataParallel's, or all where
            `torch.distributed` is initialised. See `prong.distributed`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        *,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        eps: float = 1e-2,
        period: Period = 1000,  # T
        samples: int = 12_800,  # N_s
        form: Form | None = None,
        cutoff: float = 0.0,
        storage: Storage | None = None,
        source: Source = "window",
        lag: int = 0,
        early: bool = True,
        plus: bool = False,
        balance: bool = False,
        gradient_whitening: GradientSource | None = None,
        on_refresh: OnRefresh = "transport",
        params: Iterable[Any] | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        check_model(model)
        given, workers, model = model, Workers.of(model, process_group), unwrapped(model)
        for name, flag in {"plus": plus, "balance": balance, "nesterov": nesterov}.items():
            if not isinstance(flag, bool):
                raise TypeError(f"{name} is True or False, got {flag!r}")
        if balance and gradient_whitening is not None:
            raise ValueError("balance is the scalar version of gradient_whitening; choose one of them")
        if balance or gradient_whitening is not None:
            check_unsharded(model, "whitening of gradients", "leave balance and gradient_whitening off")
        self.model, self._given = model, weakref.ref(given)  # DistributedDataParallel is not ours to keep
        whitened = [layer for _, layer in whitened_layers(model)]
        if not whitened:
            whiten_(model, form or ("explicit" if plus else "implicit"), cutoff=cutoff, storage=storage)
        elif cutoff or storage is not None:
            raise ValueError("the model is whitened already: give cutoff and storage to prong.whiten_")
        elif form is not None and any(layer.form != form for layer in whitened):
            raise ValueError(f"the model is whitened already, but not in the {form} form; prong.fold_(model) first")
        try:
            self._names = {id(p): name for name, p in model.named_parameters()}
            super().__init__(
                self._named(list(model.parameters()) if params is None else params),
                lr=lr,
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=weight_decay,
                maximize=maximize,
                foreach=foreach,
                fused=fused,
            )
            Joinable.__init__(self)
            gradients = None
            if balance or gradient_whitening is not None:
                gradients = GradientWhitening(require_whitened(model), gradient_whitening or BALANCE, eps, workers)
            self.refresher = Refresher(
                given,
                self,
                eps=eps,
                period=period,
                samples=samples,
                source=source,
                lag=lag,
                early=early,
                on_refresh=on_refresh,
                plus=plus,
                gradients=gradients,
                process_group=workers.group,
            )
        except BaseException:
            if not whitened:
                fold_(model)
            raise

    def initialize(self, batches: Iterable[Any], *, scheme: Scheme = fan_in_, forward: Forward | None = None) -> None:
        """Whitened initialisation from data (`initialize_`), before the first update. Not function-preserving."""
        if self.refresher.updates > 0:
            raise RuntimeError("initialize draws new weights and comes before the first update")
        group = self.refresher.workers.group
        initialize_(self.model, batches, self.refresher.eps, scheme=scheme, forward=forward, process_group=group)

    @property
    def loss_scale(self) -> LossScale:
        """What the mean loss was multiplied by before `backward`: a number, or a function that tells.

        For `balance` and empirical gradient whitening under a GradScaler or gradient accumulation:
        `optimizer.loss_scale = lambda: scaler.get_scale() / accumulation_steps`.
        """
        return 1.0 if self.refresher.gradients is None else self.refresher.gradients.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: LossScale) -> None:
        if self.refresher.gradients is not None:
            self.refresher.gradients.loss_scale = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, named after the model's where they are its own."""
        super().add_param_group({**param_group, "params": self._with_names(param_group["params"])})

    def state_dict(self) -> dict[str, Any]:
        """SGD's state, with the names of parameters, and the whitening under "prong", until the model is folded."""
        state = super().state_dict()
        return state if self.refresher.folded else {**state, "prong": self.refresher.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue as if never stopped: bit for bit, inside a statistics window too.

        `eps`, `period`, `samples` and `lag` are those saved; other options are this optimizer's own.

        Raises:
            ValueError: a state of another model or optimizer; nothing has been changed then.
        """
        if "prong" not in state_dict:
            raise ValueError("this is not a state of PRONG: it has no whitening in it")
        mine = [group.get("param_names") for group in self.param_groups]
        saved = [group.get("param_names") for group in state_dict["param_groups"]]
        if mine != saved:
            odd = sorted({str(n) for g in [*mine, *saved] for n in g or []} - {str(n) for g in mine for n in g or []})
            raise ValueError(f"this state is of a model with other parameters or groups: {odd or 'grouped otherwise'}")
        self._check_shapes(state_dict)
        self.refresher.check_state_dict(state_dict["prong"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "prong"})
        self.refresher.load_state_dict(state_dict["prong"])

    def join_hook(self, **unused: Any) -> JoinHook:
        """For `torch.distributed.algorithms.Join([model, optimizer])`, where some workers run out of data early."""
        return Shadow(self, self._given())

    @property
    def join_device(self) -> torch.device:
        """Where workers talk."""
        return self.refresher.workers.device

    @property
    def join_process_group(self) -> Any:
        """The workers."""
        return self.refresher.workers.group or dist.group.WORLD

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("PRONG is bound to its model and cannot be copied or pickled; save its state_dict()")

    def _check_shapes(self, state_dict: dict[str, Any]) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            buffer = state_dict["state"].get(index, {}).get("momentum_buffer")
            if buffer is not None and buffer.shape != parameter.shape:
                raise ValueError(
                    f"this state is of another model: momentum of shape {tuple(buffer.shape)} "
                    f"for {self._names.get(id(parameter), 'a parameter')} of shape {tuple(parameter.shape)}"
                )

    def _named(self, params: Iterable[Any]) -> list[Any]:
        params = list(params)
        if params and isinstance(params[0], dict):
            return params  # add_param_group names them
        return self._with_names(params)

    def _with_names(self, params: Any) -> list[tuple[str, Tensor]]:
        params = [params] if isinstance(params, Tensor) else list(params)
        return [
            p if isinstance(p, tuple) else (self._names.setdefault(id(p), f"outside.{len(self._names)}"), p)
            for p in params
        ]
