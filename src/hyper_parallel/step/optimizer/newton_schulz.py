"""The Newton–Schulz iteration that makes a matrix nearly orthogonal (Jordan et al. 2024, "Muon").

    X₀ = G / ‖G‖
    A = Xᵢ Xᵢᵀ,  Xᵢ₊₁ = a Xᵢ + (b A + c A²) Xᵢ        (a, b, c) = (3.4445, −4.7750, 2.0315)

The quintic's coefficients are the reference's, chosen for the steepest slope at 0: after five iterations the
singular values lie between about 0.7 and 1.2, not at 1. It is computed in fp32, where the reference takes
bf16: a matrix gathered from shards then gives the same update on any strategy.
"""

from __future__ import annotations

from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix_MN: Tensor, steps: int) -> Tensor:
    """About U Vᵀ of the singular value decomposition U Σ Vᵀ of [M, N]; fp32 of the same shape. A zero stays zero."""
    a, b, c = COEFFICIENTS
    x: Tensor = matrix_MN.float()
    # The shorter side first: the products are then of the smaller Gram matrix.
    transposed = x.size(0) > x.size(1)
    if transposed:
        x = x.mT
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if transposed else x
