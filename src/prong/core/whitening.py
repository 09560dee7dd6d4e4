"""From moments and damping to a whitening. Factorisations live only here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from prong.core.moments import Moments
from prong.core.precision import full_precision, has_bfloat16, is_half
from prong.core.spectrum import OVERSAMPLING, leading_directions, leading_subspace
from prong.options import Absolute, Basis, Damping, Storage

BASES: tuple[Basis, ...] = ("pca", "zca", "cholesky")
NOT_FINITE = "the second moments are not finite: the inputs are too large to square"


class WhiteningError(ArithmeticError):
    """No rung of the ladder gave a finite whitening."""


@dataclass(frozen=True)
class Whitening:
    """A centre c and a matrix U with `U (Sigma + eps I) U^T = I`, or only `P = U^T U`.

    The explicit form of a layer needs `U` and `U_inv`, the implicit one `P = (Sigma + eps I)^-1`; what is not
    needed is None. `c` is None where inputs are not centred. `eps` is the damping that was really used.

    With `tail` > 0, P is given by a thin matrix of leading directions: what stands for it is `tail I - P P^T`.

    `F` is Sigma + eps I, kept beside a dense P, so that steps can be measured.

    `cP` is the product c P where that serves: (h - c) P = h P - c P without a centred copy of h. Rounding errors of h P
    grow with the mean, so it is None where means are long (`LONG`), and in half precision.

    U may be that of the formula divided by a `scale` (`scaled`).

    Shapes: c, cP (groups, in); U, U_inv, P, F (groups, in, in), or P (groups, in, rank) with `tail`.
    """

    c: Tensor | None
    eps: float
    U: Tensor | None = None
    U_inv: Tensor | None = None
    P: Tensor | None = None
    tail: float = 0.0
    cP: Tensor | None = None
    F: Tensor | None = None
    scale: float = 1.0

    def damped(self, X: Tensor) -> Tensor:
        """X (Sigma + eps I) for X (groups, rows, in): from F, or from a thin P."""
        if self.F is not None:
            return torch.bmm(X.to(self.F.dtype), self.F).to(X.dtype)
        assert self.P is not None and self.tail > 0
        Q, eps = self.P.to(X.dtype), 1 / self.tail
        # Columns of Q are q = lam / (eps (lam + eps)) long, squared; Sigma + eps I = eps I + Q diag(lam / q) Q^T.
        ratio = eps**2 / (1 - eps * Q.square().sum(-2, keepdim=True)).clamp(min=torch.finfo(Q.dtype).eps)
        return eps * X + torch.bmm(torch.bmm(X, Q) * ratio, Q.mT)

    def inverse(self) -> Tensor:
        """U^-1: what is kept, or, of a "pca" whitening, whose rows are orthogonal, U^T over their squared lengths."""
        if self.U_inv is not None:
            return self.U_inv
        assert self.U is not None
        return self.U.mT / self.U.square().sum(-1).unsqueeze(-2)

    def map(self, function: Callable[[Tensor], Tensor]) -> Whitening:
        """The same whitening with `function` applied to every tensor."""
        mapped = {name: function(x) for name, x in self.items() if isinstance(x, Tensor)}
        return replace(self, **mapped)  # type: ignore[arg-type]

    def items(self) -> list[tuple[str, Tensor | float | None]]:
        """Names and values."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    def is_finite(self) -> bool:
        """Whether no tensor holds NaN or infinity."""
        return all(bool(torch.isfinite(x).all()) for _, x in self.items() if isinstance(x, Tensor))


def check_eps(eps: float) -> None:
    """Refuse a damping that is not a positive finite number."""
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise TypeError(f"eps is a number, got {type(eps).__name__}")
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(
            f"eps must be positive and finite, got {eps}. "
            "It bounds the step in directions with no variance; 1e-2 is a common choice."
        )


def check_basis(basis: str) -> None:
    """Refuse an unknown basis."""
    if basis not in BASES:
        raise ValueError(f"basis is one of {', '.join(BASES)}, got {basis!r}")


def eps_of(damping: Damping, moments: Moments, channels: int) -> float:
    """The damping in the units of the inputs' second moments: `damping` times their mean, E[h^2] over all channels.

    The raw moment, not the variance: where units hardly vary, as sigmoids at a usual initialisation, the variance is
    tiny, and a damping relative to it lets steps explode.
    """
    eps = damping.eps if isinstance(damping, Absolute) else damping * moments.mean_square(channels)
    if not math.isfinite(eps):
        raise FloatingPointError(NOT_FINITE)
    return eps


def scaled(whitening: Whitening, moments: Moments, channels: int) -> Whitening:
    """The whitening with U divided by a number, the same for the whole layer, which gives it a usual size:

        scale^2 = E[h^2] tr(U U^T) / in

    For optimizers whose steps do not grow with the gradient, such as Adam: an entry of V then moves the function as
    much as an entry of W does where inputs are of unit variance and uncorrelated, so that learning rates mean what they
    are used to. It is free of units, as U is.
    """
    assert whitening.U is not None and whitening.U_inv is not None
    scale = math.sqrt(moments.mean_square(channels) * float(whitening.U.square().sum()) / channels)
    return replace(whitening, U=whitening.U / scale, U_inv=whitening.U_inv * scale, scale=scale)


def whiten(
    moments: Moments,
    eps: float,
    basis: Basis | None = None,
    centred: bool = True,
    cutoff: float = 0.0,
    expected: int = 0,
    most: int | None = None,
) -> Whitening:
    """The whitening of inputs with these moments: U and U^-1 in a basis, or P alone when `basis` is None.

    With `Sigma + eps I = E diag(lam + eps) E^T = L L^T`

        pca        U = diag(lam + eps)^-1/2 E^T      the paper's formula, largest eigenvalue first
        zca        U = E diag(lam + eps)^-1/2 E^T
        cholesky   U = L^-1
        None       P = (Sigma + eps I)^-1

    and every inverse comes from the same factorisation. With a `cutoff`, P is that of a Sigma in which variances below
    `cutoff * eps` are zero, and thin, where that halves the work of using it; no gain grows by much more than
    `1 + cutoff` times. The number of directions that are `expected` to remain makes finding them faster. Where more
    remain than the `most` there may be, the largest are taken and all others damped like the first of those left out.

    On failure the ladder is climbed: the moments' own precision, then float64, then ten and a hundred times the
    damping (`Whitening.eps` tells).

    Raises:
        ValueError: fewer than two rows, or eps not positive.
        FloatingPointError: moments that are not finite.
        WhiteningError: if no rung gave a finite result.
    """
    check_eps(eps)
    if basis is not None:
        check_basis(basis)
    if moments.count < 2:
        raise ValueError(f"a covariance needs at least 2 samples, got {moments.count:g}. Give more or larger batches.")
    factor = moments.factor
    if factor is not None and not centred:  # the mean is one more direction of the second moment
        factor = torch.cat([factor, math.sqrt(moments.count) * moments.mean.unsqueeze(1)], dim=1)
    thin = factor is not None and _is_thin(factor, basis)
    X = factor / math.sqrt(moments.count) if thin and factor is not None else moments.covariance(centred)
    if not torch.isfinite(X).all():
        raise FloatingPointError(NOT_FINITE)
    spread = X.square().sum((-2, -1)) if thin else X.diagonal(dim1=-2, dim2=-1).sum(-1)
    if cutoff > 0 and basis is None:
        found = _leading(X.mT @ X if thin else X, eps, cutoff, expected, most)
        if found is not None:
            Q, tail = found
            return with_product(Whitening(moments.mean.clone() if centred else None, eps, P=Q, tail=tail), spread)
    dense, low_rank = FACTORISATIONS[basis]
    factorise = low_rank if thin else dense
    for dtype, damping in (
        (X.dtype, eps),
        (torch.float64, eps),
        (torch.float64, 10 * eps),
        (torch.float64, 100 * eps),
    ):
        try:
            with full_precision(X):
                matrices: dict[str, Any] = factorise(X.to(dtype), damping, basis)
        except (torch.linalg.LinAlgError, OverflowError):  # type: ignore[attr-defined]
            continue
        c = moments.mean.clone() if centred else None
        whitening = Whitening(c, damping, **matrices).map(lambda x: x.to(X.dtype))
        if whitening.is_finite():
            return with_product(whitening, spread)
    raise WhiteningError(
        f"no factorisation of the {X.shape[-1]} x {X.shape[-1]} covariance succeeded, "
        f"even with damping {100 * eps:g}; its largest entry is {X.abs().max().item():.3g}, "
        f"from {moments.count:g} samples"
    )


def whiten_together(
    several: Sequence[Moments],
    damping: Sequence[float],
    basis: Basis | None = None,
    centred: bool = True,
    cutoff: float = 0.0,
) -> list[Whitening] | None:
    """The whitenings of moments of one size, in one batched factorisation; None where only one by one will do.

    One by one is the way of moments that are few, thin, too few in samples, or of a factorisation that fails.
    """
    if len(several) < 2 or (cutoff > 0 and basis is None):
        return None
    if any(m.count < 2 or (m.factor is not None and _is_thin(m.factor, basis)) for m in several):
        return None
    X = torch.cat([m.covariance(centred) for m in several])
    groups = [m.mean.shape[0] for m in several]
    # A number for each matrix: with covariances divided by it, all are damped by one.
    each = torch.tensor(damping, dtype=X.dtype, device=X.device)
    each = each.repeat_interleave(torch.tensor(groups, device=X.device))[:, None, None]
    dense, _ = FACTORISATIONS[basis]
    try:
        with full_precision(X):
            matrices = dense(X / each, 1.0, basis)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None
    powers = {"U": -0.5, "U_inv": 0.5, "P": -1.0, "F": 1.0}
    matrices = {key: x * each ** powers[key] for key, x in matrices.items()}
    parts = {key: torch.split(x, groups) for key, x in matrices.items()}
    spreads = torch.split(X.diagonal(dim1=-2, dim2=-1).sum(-1), groups)
    whitenings = []
    for i, m in enumerate(several):
        own: dict[str, Any] = {key: part[i].clone() for key, part in parts.items()}
        whitenings.append(with_product(Whitening(m.mean.clone() if centred else None, damping[i], **own), spreads[i]))
    return whitenings if all(w.is_finite() for w in whitenings) else None


LONG = 4.0  # mean over spread, as lengths, up to which h P - c P is as good: it has so many times the rounding errors


def with_product(whitening: Whitening, spread: Tensor) -> Whitening:
    """The whitening with `cP` if it has c and P, and c is not long beside this spread, tr Sigma (groups,)."""
    c, P = whitening.c, whitening.P
    if c is None or P is None or (c.square().sum(-1) > LONG**2 * spread).any():
        return whitening
    return replace(whitening, cP=times_inverse(c.unsqueeze(1), P, whitening.tail).squeeze(1))


def storage_for(storage: Storage | None, weight: Tensor) -> torch.dtype | None:
    """The dtype for the matrices of a weight: "auto" is bfloat16 for float32 where the device has units for it."""
    if storage == "auto":
        return torch.bfloat16 if weight.dtype == torch.float32 and has_bfloat16(weight.device) else None
    return storage


def rounded(whitening: Whitening, moments: Moments, storage: torch.dtype) -> Whitening:
    """The whitening with P in another dtype; as it is where rounding would spoil the steps.

    P has entries of the size 1/eps, whose rounding errors may exceed the small gains 1/(lam + eps) of directions with a
    large variance lam, or turn them negative. So those gains are looked at, in the leading directions.
    """
    if whitening.P is None:
        return whitening
    P = whitening.P.to(storage)
    Sigma = moments.covariance(whitening.c is not None)
    with full_precision(Sigma):
        lam, E = leading_subspace(Sigma, min(32, Sigma.shape[-1]))
        gains = E.mT @ times_inverse(E.mT, P, whitening.tail).mT * (lam + whitening.eps).unsqueeze(-1)
    within = torch.isfinite(P).all() and torch.isfinite(gains).all()
    if within:
        off = torch.linalg.matrix_norm(gains - torch.eye(lam.shape[-1], dtype=gains.dtype, device=gains.device), 2)
        within = (off < 0.5).all()
    if not within:
        return whitening
    return replace(whitening, P=P, cP=None if is_half(storage) else whitening.cP)


def times_inverse(X: Tensor, P: Tensor, tail: float = 0.0) -> Tensor:
    """X (Sigma + eps I)^-1 for X (groups, rows, in), in the precision P is stored in.

    P is that inverse (groups, in, in); or thin (groups, in, rank) where it is `tail I - P P^T`.
    """
    with full_precision(X):
        low = X.to(P.dtype)
        if tail == 0:
            return (low * P if P.shape[-1] == 1 else torch.bmm(low, P)).to(X.dtype)
        if P.dtype == X.dtype:
            return torch.baddbmm(X, torch.bmm(X, P), P.mT, beta=tail, alpha=-1)
        return tail * X - torch.bmm(torch.bmm(low, P), P.mT).to(X.dtype)


def _leading(
    Sigma: Tensor, eps: float, cutoff: float, expected: int, most: int | None
) -> tuple[Tensor, float] | None:
    """The thin Q of (Sigma_k + eps I)^-1 = I / eps - Q Q^T, if rank k is small enough to be worth it; and 1 / eps.

    With `Sigma_k = E diag(lam) E^T` of variances above `cutoff * eps`, Q = E diag(lam / (eps (lam + eps)))^1/2. Of too
    many, the largest, less the first that is left out, by which eps is larger.
    """
    at_most = Sigma.shape[-1] // 4 if most is None else min(most, Sigma.shape[-1])
    with full_precision(Sigma):
        try:
            found = leading_directions(Sigma, cutoff * eps, at_most, expected)
            if found is None and most is not None:
                lam, E = leading_subspace(Sigma, min(at_most + OVERSAMPLING, Sigma.shape[-1]))
                rest = float(lam[:, at_most].clamp(min=0).max()) if lam.shape[-1] > at_most else 0.0
                found, eps = ((lam[:, :at_most] - rest).clamp(min=0), E[..., :at_most]), eps + rest
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return None
        if found is None:
            return None
        lam, E = found
        Q = E * (lam / (eps * (lam + eps))).sqrt().unsqueeze(-2)
    return (Q, 1 / eps) if torch.isfinite(Q).all() else None


def _is_thin(factor: Tensor, basis: Basis | None) -> bool:
    """Whether the factor (groups, rows, in) has so few rows that a low-rank factorisation is the faster one."""
    rows, features = factor.shape[-2:]
    # Measured for 512 to 2048 inputs: faster than a dense Cholesky up to in/4 rows, than a dense eigh up to in/2.
    return 0 < rows <= features // (2 if basis in ("pca", "zca") else 4)


def _cholesky(Sigma: Tensor, eps: float, basis: Basis | None) -> dict[str, Tensor]:
    """P, or U = L^-1 and U^-1 = L, from the Cholesky factor of the damped covariance."""
    damped = Sigma.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(eps)
    L = torch.linalg.cholesky(damped)
    if basis is None:
        return {"P": torch.cholesky_inverse(L), "F": damped}
    return {"U": _triangular_inverse(L), "U_inv": L}


def _eigenbasis(Sigma: Tensor, eps: float, basis: Basis | None) -> dict[str, Tensor]:
    """U and U^-1 from an eigendecomposition, largest eigenvalue first."""
    lam, E = torch.linalg.eigh(Sigma)
    lam, E = lam.flip(-1), E.flip(-1)
    # Rounding leaves eigenvalues of a singular Sigma slightly below zero; the true ones are not.
    root = (lam.clamp(min=0) + eps).sqrt().unsqueeze(-2)
    U_t, U_inv = E / root, E * root
    if basis == "pca":
        return {"U": U_t.mT.contiguous(), "U_inv": U_inv}
    return {"U": U_t @ E.mT, "U_inv": U_inv @ E.mT}


def _low_rank(factor: Tensor, eps: float, basis: Basis | None) -> dict[str, Tensor]:
    """P, or U and U^-1, of `Sigma = factor^T factor` through the Gram matrix (rows, rows).

    With `factor factor^T = Q diag(lam) Q^T` and orthonormal `E = factor^T Q diag(lam)^-1/2`, any function f has
    f(Sigma + eps I) = f(eps) I + E diag(f(lam + eps) - f(eps)) E^T.

    The differences cancel where lam >> eps, hence float64 whatever came in.
    """
    factor = factor.double()
    lam, Q = torch.linalg.eigh(factor @ factor.mT)
    # Directions below rounding are noise; leaving them out treats them as without variance, which they are.
    floor = lam.amax(-1, keepdim=True).clamp(min=0) * lam.shape[-1] * torch.finfo(lam.dtype).eps
    real = lam > floor
    lam = lam.where(real, torch.ones_like(lam))
    E = (factor.mT @ Q) * (real / lam.sqrt()).unsqueeze(-2)

    if basis == "pca":
        # Directions without variance are any orthonormal rest, which a complete QR adds far faster than eigh finds it.
        E = torch.linalg.qr(E.flip(-1), mode="complete").Q
        rest = lam.new_zeros(*lam.shape[:-1], E.shape[-1] - lam.shape[-1])
        root = (torch.cat([(lam * real).flip(-1), rest], dim=-1) + eps).sqrt().unsqueeze(-2)
        return {"U": (E / root).mT.contiguous(), "U_inv": E * root}

    def of_sigma(power: float) -> Tensor:
        base = eps**power
        result: Tensor = (E * ((lam + eps) ** power - base).unsqueeze(-2)) @ E.mT
        result.diagonal(dim1=-2, dim2=-1).add_(base)
        return result

    return {"P": of_sigma(-1.0), "F": of_sigma(1.0)} if basis is None else {"U": of_sigma(-0.5), "U_inv": of_sigma(0.5)}


def _low_rank_cholesky(factor: Tensor, eps: float, basis: Basis | None) -> dict[str, Tensor]:
    """U = L^-1 and U^-1 = L with `L L^T = factor^T factor + eps I`, from triangles of size max(rows, 64).

    Block by block: with J a block of inputs, `<` and `>` those before and after it, and Y = C^-1 factor / sqrt(eps)
    where `C C^T = I + factor_< factor_<^T / eps`, the Schur complement of J is, by Woodbury, eps (I + Y_J^T Y_J), so

        R = chol(I + Y_J^T Y_J)     L_JJ = sqrt(eps) R         L_>J = sqrt(eps) Y_>^T Z^T
        Z = R^-1 Y_J^T              U_JJ = R^-1 / sqrt(eps)    U_J< = -Z Y_< / sqrt(eps)

    and chol(I + Y_J Y_J^T)^-1 takes Y to the next block. No differences are taken, but C is as ill-conditioned as
    Sigma + eps I, hence float64 whatever came in.
    """
    assert basis == "cholesky"
    Y = factor.double() / math.sqrt(eps)
    rows, features = Y.shape[-2:]
    L, U = (Y.new_zeros(*Y.shape[:-2], features, features) for _ in range(2))
    size = max(rows, 64)
    for start in range(0, features, size):
        end = min(start + size, features)
        Y_J = Y[..., start:end]
        R = _cholesky_of_one_plus(Y_J.mT @ Y_J)
        R_inv = _triangular_inverse(R)
        Z = R_inv @ Y_J.mT
        L[..., start:end, start:end] = R
        L[..., end:, start:end] = Y[..., end:].mT @ Z.mT
        U[..., start:end, start:end] = R_inv
        U[..., start:end, :start] = -Z @ Y[..., :start]
        if end < features:
            Y = torch.linalg.solve_triangular(_cholesky_of_one_plus(Y_J @ Y_J.mT), Y, upper=False)
    return {"U": U.div_(math.sqrt(eps)), "U_inv": L.mul_(math.sqrt(eps))}


def _cholesky_of_one_plus(A: Tensor) -> Tensor:
    """Lower-triangular R with R R^T = I + A; A is overwritten."""
    A.diagonal(dim1=-2, dim2=-1).add_(1)
    R: Tensor = torch.linalg.cholesky(A)
    return R


def _triangular_inverse(L: Tensor) -> Tensor:
    """L^-1 of a lower-triangular L."""
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
    inverse: Tensor = torch.linalg.solve_triangular(L, identity, upper=False)
    return inverse


Factorisation = Callable[[Tensor, float, Basis | None], dict[str, Tensor]]
# For every basis: from the covariance (groups, in, in), and from its thin factor (groups, rows, in).
FACTORISATIONS: dict[Basis | None, tuple[Factorisation, Factorisation]] = {
    None: (_cholesky, _low_rank),
    "pca": (_eigenbasis, _low_rank),
    "zca": (_eigenbasis, _low_rank),
    "cholesky": (_cholesky, _low_rank_cholesky),
}
