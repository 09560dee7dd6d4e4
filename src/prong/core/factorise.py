"""From moments and damping to a whitening. Factorisations live only here."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from prong.core.moments import Moments, full_precision, has_bfloat16, is_half
from prong.core.whitening import Whitening, times_inverse
from prong.options import Absolute, Basis, Damping, Storage, check_basis, check_positive

NOT_FINITE = "the second moments are not finite: the inputs are too large to square"
LONG = 4.0  # mean over spread, as lengths, up to which h P - c P is as good: it has so many times the rounding errors
OVERSAMPLING = 8  # more directions than asked for, which the last of those asked for need to be accurate
ITERATIONS = 3


class WhiteningError(ArithmeticError):
    """No rung of the ladder gave a finite whitening."""


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
    """The whitening with U divided by a number, the same for the whole layer, which gives it a usual size.

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
    if not (type(eps) is float and 0 < eps < math.inf):
        check_positive("eps", eps)
    if basis is not None:
        check_basis(basis)
    if moments.count < 2:
        raise ValueError(f"a covariance needs at least 2 samples, got {moments.count:g}. Give more or larger batches.")
    factor = moments.factor
    if factor is not None and not centred:  # the mean is one more direction of the second moment
        factor = torch.cat([factor, math.sqrt(moments.count) * moments.mean.unsqueeze(1)], dim=1)
    thin = factor is not None and _is_thin(factor, basis)
    X = factor / math.sqrt(moments.count) if thin and factor is not None else moments.covariance(centred)
    if factor is not None and basis == "cholesky":  # of low rank: float32 would not do
        X = factor.mT.double() @ factor.double() / moments.count
    if not torch.isfinite(X).all():
        raise FloatingPointError(NOT_FINITE)
    spread = X.square().sum((-2, -1)) if thin else X.diagonal(dim1=-2, dim2=-1).sum(-1)
    c = moments.mean.clone() if centred else None
    if cutoff > 0 and basis is None:
        found = _leading(X.mT @ X if thin else X, eps, cutoff, expected, most)
        if found is not None:
            return _with_product(Whitening(c, eps, P=found[0], tail=found[1]), spread)
    factorise = _low_rank if thin else _eigenbasis if basis in ("pca", "zca") else _cholesky
    ladder = (X.dtype, 1), (torch.float64, 1), (torch.float64, 10), (torch.float64, 100)
    for dtype, damping in ((dtype, times * eps) for dtype, times in ladder):
        try:
            with full_precision(X):
                matrices: dict[str, Any] = factorise(X.to(dtype), damping, basis)
        except (torch.linalg.LinAlgError, OverflowError):  # type: ignore[attr-defined]
            continue
        whitening = Whitening(c, damping, **matrices).map(lambda x: x.to(moments.mean.dtype))
        if whitening.is_finite():
            return _with_product(whitening, spread)
    raise WhiteningError(
        f"no factorisation of the {X.shape[-1]} x {X.shape[-1]} covariance succeeded, even with damping {100 * eps:g}; "
        f"its largest entry is {X.abs().max().item():.3g}, from {moments.count:g} samples"
    )


def _with_product(whitening: Whitening, spread: Tensor) -> Whitening:
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
    identity = torch.eye(lam.shape[-1], dtype=gains.dtype, device=gains.device)
    if not within or not (torch.linalg.matrix_norm(gains - identity, 2) < 0.5).all():
        return whitening
    return replace(whitening, P=P, cP=None if is_half(storage) else whitening.cP)


def _leading(Sigma: Tensor, eps: float, cutoff: float, expected: int, most: int | None) -> tuple[Tensor, float] | None:
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
    return basis != "cholesky" and 0 < rows <= features // (4 if basis is None else 2)


def leading_directions(Sigma: Tensor, above: float, at_most: int, expected: int = 0) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues larger than `above` and their eigenvectors, largest first; None if there are more than `at_most`.

    Subspace iteration with a Rayleigh-Ritz step (Halko, Martinsson and Tropp 2011) on blocks that double until they
    hold what is asked for: in^2 k operations and the eigenproblem of k x k, where all of it costs ten times in^3. The
    first block has room for the number `expected`, if one is. Directions whose eigenvalue is close to `above` may be
    mixed with their neighbours. The start is random, but always the same.

    Shapes: Sigma (groups, in, in); eigenvalues (groups, k), eigenvectors (groups, in, k). Where groups have different
    numbers of them, the missing ones are zero.
    """
    size = Sigma.shape[-1]
    wanted = min(at_most, expected + expected // 8 if expected else max(16, size // 16))
    while True:
        lam, E = leading_subspace(Sigma, min(size, wanted + OVERSAMPLING))
        count = int((lam > above).sum(-1).max())
        if count <= wanted:
            real = lam[:, :count] > above
            return lam[:, :count] * real, E[..., :count] * real.unsqueeze(-2)
        if wanted == at_most:
            return None
        wanted = min(at_most, 2 * wanted)


def leading_subspace(Sigma: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Approximate leading eigenvalues (groups, size), largest first, and their eigenvectors (groups, in, size)."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(Sigma.shape[-1], size, generator=generator, dtype=torch.float64, device=generator.device)
    E = start.to(Sigma).expand(Sigma.shape[0], -1, -1)
    for _ in range(ITERATIONS):
        E = torch.linalg.qr(Sigma @ E).Q
    lam, rotation = torch.linalg.eigh(E.mT @ (Sigma @ E))
    return lam.flip(-1), E @ rotation.flip(-1)


def _cholesky(Sigma: Tensor, eps: float, basis: Basis | None) -> dict[str, Tensor]:
    """P, or U = L^-1 and U^-1 = L, from the Cholesky factor of the damped covariance."""
    damped = Sigma.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(eps)
    L = torch.linalg.cholesky(damped)
    if basis is None:
        return {"P": torch.cholesky_inverse(L), "F": damped}
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
    return {"U": torch.linalg.solve_triangular(L, identity, upper=False), "U_inv": L}


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
