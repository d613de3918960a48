"""Statistics of the inputs of a linear layer: the Hessian of its squared output error, and its Cholesky factor.

With calibration inputs X `[tokens, K]` the error of weights Q in place of W is

    |X (W - Q)^T|^2 = tr (W - Q) H (W - Q)^T,   H = X^T X.

GPTQ needs H = U U^T with U upper triangular: then the error is the squared length of (W - Q) U, whose column c depends
on columns 0..c of Q only, so the codes can be chosen one column after the other (that is Babai's nearest plane
algorithm, Chen et al. 2025, arXiv 2507.18553; it gives GPTQ's own codes with no inverse of H).

Asymmetric: the inputs X come from the model as quantized so far, while the output to reproduce is that of the
full-precision model, X_ref W^T (GPTAQ, Li et al. 2025, arXiv 2504.02692). Completing the square, the best real weights
are W + W D H^-1 with the drift D = (X_ref - X)^T X, and the error from there is as above.

Memory: one K x K fp32 matrix, two when asymmetric; products are exact and sums are fp32 for 16-bit inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_STRIP = 512  # rows or columns moved at a time when a matrix is permuted in place
_ROUNDING = 4  # least damping in units of eps * K: the largest eigenvalue may be K means, and rounds by eps of itself


@dataclass(frozen=True, kw_only=True)
class Factor:
    """H[order][:, order] + damping = U U^T, U = unit * diagonal (its columns scaled), in the order of quantization."""

    unit: Tensor  # [K, K] fp32 upper triangular, diagonal 1
    diagonal: Tensor  # [K] fp32
    order: Tensor | None  # [K] int64: the k-th column to quantize; None is the natural order
    drift: Tensor | None  # [K, K] fp32, natural order

    def target(self, weight: Tensor, asymmetry: float = 1.0) -> Tensor:
        """The weights to approximate, `[K, N]` fp32 in the order of quantization.

        `asymmetry` scales the correction for inputs that drifted from the full-precision model's (0: none).
        """
        columns = self.ordered(weight.float().t())
        if self.drift is None or asymmetry == 0:
            return columns
        shift = self.ordered((weight.float() @ self.drift).t()).mul_(asymmetry)
        solved = torch.linalg.solve_triangular(self.unit, shift, upper=True, unitriangular=True)
        solved.div_(self.diagonal.square()[:, None])
        return columns + torch.linalg.solve_triangular(self.unit.t(), solved, upper=False, unitriangular=True)

    def matrix(self) -> Tensor:
        """`[K, K]` fp32, in the order of quantization: the Hessian with its damping."""
        upper = (self.unit * self.diagonal).triu_()
        return upper @ upper.t()

    def ordered(self, columns: Tensor) -> Tensor:
        """A contiguous copy of `[K, ...]` in the order of quantization."""
        return columns.contiguous() if self.order is None else columns[self.order]


class Hessian:
    """Sums over calibration tokens: x^T x, |x| and, when asymmetric, reference^T x."""

    def __init__(self, in_features: int, *, device: torch.device | str = "cpu", asymmetric: bool = False) -> None:
        self.in_features = in_features
        self.tokens = 0
        self._matrix: Tensor | None = torch.zeros((in_features, in_features), device=device)
        self._cross = torch.zeros_like(self.matrix) if asymmetric else None
        self._abs = torch.zeros(in_features, device=device)

    @property
    def matrix(self) -> Tensor:
        """`[K, K]` fp32, until `factor` has taken it."""
        if self._matrix is None:
            raise ValueError("the Hessian was consumed by factor(): collect another one")
        return self._matrix

    @property
    def mean_abs(self) -> Tensor:
        """`[K]`: mean magnitude of each input channel."""
        return self._abs / max(1, self.tokens)

    def add(self, x: Tensor, reference: Tensor | None = None) -> None:
        """Take in tokens `[..., K]`; when asymmetric with the full-precision model's inputs of the same tokens."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"activations have {x.shape[-1]} channels, expected {self.in_features}")
        if (reference is None) != (self._cross is None):
            raise ValueError("reference activations belong to an asymmetric Hessian, and to no other")
        x = x.detach().reshape(-1, self.in_features)
        self.tokens += x.shape[0]
        self._abs += x.abs().sum(0, dtype=torch.float32)
        _add_product(self.matrix, x, x)
        if reference is not None and self._cross is not None:
            reference = reference.detach().reshape(-1, reference.shape[-1])
            if reference.shape != x.shape:
                raise ValueError(f"reference activations are {list(reference.shape)}, expected {list(x.shape)}")
            _add_product(self._cross, reference.to(x.dtype), x)

    def merge(self, other: Hessian) -> None:
        """Take in all that another one, not asymmetric, has seen."""
        self.matrix.add_(other.matrix)
        self._abs += other._abs
        self.tokens += other.tokens

    def factor(self, *, damping: float = 0.01, act_order: bool = False) -> Factor:
        """The Cholesky factor, in the matrix's own memory: the Hessian is spent.

        `damping` times the mean of the diagonal is added to the diagonal; channels that no token excited have
        nothing else there, and so are rounded to nearest. Act-order: channels with the largest diagonal first. Raises
        ValueError for NaN or infinite activations, and when no damping makes the matrix positive definite.
        """
        if not 0 < damping < 1:
            raise ValueError(f"damping is {damping}, expected more than 0 and less than 1")
        matrix, cross = self.matrix, self._cross
        diagonal = matrix.diagonal().clone()
        if not torch.isfinite(diagonal).all():
            raise ValueError("activations hold NaN or infinite values, expected finite ones")
        drift = None if cross is None else cross.sub_(matrix)  # exact to a few 1e-6 of the sums
        self._matrix = self._cross = None
        order = torch.argsort(diagonal, descending=True, stable=True) if act_order else None
        forward = torch.arange(self.in_features, device=matrix.device) if order is None else order
        backward = forward.flip(0)
        permute_(matrix, backward)
        rounding = _ROUNDING * torch.finfo(torch.float32).eps * self.in_features
        matrix.diagonal().add_(max(damping, rounding) * (float(diagonal.mean()) or 1.0))
        _cholesky_(matrix, damping)
        permute_(matrix, torch.arange(self.in_features - 1, -1, -1, device=matrix.device))
        lengths = matrix.diagonal().clone()
        matrix.div_(lengths)
        return Factor(unit=matrix, diagonal=lengths, order=order, drift=drift)


def permute_(matrix: Tensor, order: Tensor) -> None:
    """`matrix[order][:, order]` in place, strip by strip."""
    for at in range(0, matrix.shape[1], _STRIP):
        strip = matrix[:, at : at + _STRIP]
        strip.copy_(strip[order])
    for at in range(0, matrix.shape[0], _STRIP):
        strip = matrix[at : at + _STRIP]
        strip.copy_(strip[:, order])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T right: products of 16-bit values are exact in fp32, where they are summed."""
    if left.is_cuda and left.dtype in (torch.float16, torch.bfloat16):
        total += torch.mm(left.t(), right, out_dtype=torch.float32)
    else:
        total.addmm_(left.float().t(), right.float())


def _cholesky_(matrix: Tensor, damping: float) -> None:
    """The lower factor of the symmetric `matrix`, in its place.

    LAPACK's matrices are columns after columns: only the transposed view, whose upper factor this is, needs no copy.
    """
    info = torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(matrix.mT, upper=True, out=(matrix.mT, info))
    if int(info):
        raise ValueError(f"damping is {damping}: the Hessian of these activations has no Cholesky factor, use more")
