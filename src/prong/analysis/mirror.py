"""Natural gradient descent as mirror descent, and PRONG's two projections as its maps: the paper's section 3.3.

With a symmetric positive definite A, the potential psi(theta) = 1/2 theta^T A theta has the gradient omega = A theta,
and its convex conjugate psi* the inverse of that. With A = F, mirror descent, omega' = omega - lr grad_theta, is a
natural step. With A = F^1/2, or any A A^T = F, so is gradient descent in the dual space itself, omega' = omega - lr
grad_omega; a whitened layer's coordinates are of this kind (`layer_factor`). See docs/mirror.md.

Shapes: theta, omega and gradients (n,); A and F (n, n).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from prong.core.whitening import Whitening
from prong.options import check_count


def potential(theta: Tensor, A: Tensor) -> Tensor:
    """psi(theta) = 1/2 theta^T A theta."""
    return 0.5 * theta @ to_dual(theta, A)


def conjugate(omega: Tensor, A: Tensor) -> Tensor:
    """psi*(omega) = sup_theta omega^T theta - psi(theta) = 1/2 omega^T A^-1 omega."""
    return 0.5 * omega @ to_primal(omega, A)


def divergence(q: Tensor, p: Tensor, A: Tensor) -> Tensor:
    """The Bregman divergence of psi: psi(q) - psi(p) - (q - p)^T grad psi(p) = 1/2 (q - p)^T A (q - p)."""
    _check(A, q, p)
    return potential(q - p, A)


def to_dual(theta: Tensor, A: Tensor) -> Tensor:
    """The gradient of psi: omega = A theta."""
    _check(A, theta)
    return A @ theta


def to_primal(omega: Tensor, A: Tensor) -> Tensor:
    """The gradient of psi*: theta = A^-1 omega, the inverse of `to_dual`."""
    _check(A, omega)
    L, info = torch.linalg.cholesky_ex(A)
    _check_definite(not info.any())
    theta: Tensor = torch.cholesky_solve(omega.unsqueeze(-1), L).squeeze(-1)
    return theta


def square_root(F: Tensor) -> Tensor:
    """The symmetric positive definite F^1/2; others are refused."""
    _check(F)
    lam, E = torch.linalg.eigh(F)
    _check_definite(bool(lam[0] > 0))
    root: Tensor = (E * lam.sqrt()) @ E.mT
    return root


def natural_step(theta: Tensor, gradient: Tensor, F: Tensor, lr: float) -> Tensor:
    """The natural step theta - lr F^-1 gradient, which both ways below arrive at."""
    _check(F, theta)
    return theta - lr * to_primal(gradient, F)


def mirror_step(theta: Tensor, gradient: Tensor, A: Tensor, lr: float) -> Tensor:
    """One step of mirror descent (the paper's two update equations), with the gradient with respect to theta.

        omega' = grad psi(theta) - lr gradient          theta' = grad psi*(omega')

    It solves  argmin_q  q^T gradient + B_psi(q, theta) / lr,  and is the natural step if A = F.
    """
    _check(A, gradient)
    return to_primal(to_dual(theta, A) - lr * gradient, A)


def dual_gradient(loss: Callable[[Tensor], Tensor], omega: Tensor, A: Tensor) -> Tensor:
    """The gradient of omega -> loss(A^-1 omega), by autograd: A^-1 grad_theta."""
    gradient: Tensor = torch.func.grad(lambda point: loss(to_primal(point, A)))(omega)
    return gradient


def dual_descent(loss: Callable[[Tensor], Tensor], theta: Tensor, F: Tensor, lr: float, steps: int = 1) -> Tensor:
    """Where `steps` gradient steps in the dual space of psi~ = 1/2 theta^T F^1/2 theta lead.

    That is, where natural gradient descent leads whose F is kept for so many steps.
    """
    check_count("steps", steps, 0)
    A = square_root(F)
    omega = to_dual(theta, A)
    for _ in range(steps):
        omega = omega - lr * dual_gradient(loss, omega, A)
    return to_primal(omega, A)


def layer_factor(whitening: Whitening, taps: int = 1) -> Tensor:
    """The matrix A with (V, d) = (W, b) A for the rows (w, b) of a layer's parameters: `to_whitened` in one product.

        A = [ U^-1   c ]        A A^T = F = [ Sigma + eps I + c c^T   c ]
            [  0     1 ]                    [         c^T             1 ]

    F is the second moment of the inputs with a 1 appended, damped in the weights alone (where U is not scaled). Without
    a centre the last row and column are absent. A kernel of several taps has U^-1 for each and the same c against all.

    Shapes: A (groups, taps in + 1, taps in + 1), or (groups, taps in, taps in) without a centre.
    """
    if not isinstance(whitening, Whitening):
        raise TypeError(f"expected a Whitening, which layers have from their first refresh on, got {whitening!r}")
    if whitening.U is None:
        raise ValueError('this whitening has P alone; whiten with form="explicit" or form="materialised"')
    check_count("taps", taps, 1)
    U_inv, c = whitening.inverse(), whitening.c
    blocks = torch.kron(torch.eye(taps).to(U_inv), U_inv.contiguous())
    if c is None:
        return blocks
    A = torch.nn.functional.pad(blocks, (0, 1, 0, 1))
    A[:, :-1, -1], A[:, -1, -1] = c.repeat(1, taps), 1
    return A


def _check_definite(definite: bool) -> None:
    if not definite:
        raise ValueError("the matrix is not positive definite; add damping: F + eps I")


def _check(A: Tensor, *vectors: Tensor) -> None:
    """Refuse what defines no quadratic potential, or vectors of another size."""
    if A.dim() != 2 or A.shape[0] != A.shape[1]:
        raise ValueError(f"expected a square matrix, got shape {tuple(A.shape)}")
    if not torch.isfinite(A).all():
        raise ValueError("the matrix contains NaN or infinite values; look at what it was made from")
    if not torch.allclose(A, A.mT, rtol=1e-5, atol=1e-5 * A.abs().max().item()):
        raise ValueError("A is not symmetric, and A x the gradient of no potential; of a factor use square_root(A A^T)")
    for x in vectors:
        if x.shape != A.shape[:1]:
            raise ValueError(f"expected a vector of {A.shape[0]} entries for this matrix, got shape {tuple(x.shape)}")
