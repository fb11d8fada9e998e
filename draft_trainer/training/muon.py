"""Muon: momentum whose update is the nearest orthogonal matrix, for the head's hidden matrices.

Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the
scale that lets it share AdamW's learning rate is that of "Muon is Scalable for LLM Training"
(arXiv 2502.16982), section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

MOMENTUM = 0.95
_ITERATIONS = 5
# Newton-Schulz polynomial a x + b x^3 + c x^5: steep at 0, so that five iterations bring every
# singular value from the smallest that matter to between 0.7 and 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ADAMW_RMS = 0.2


class Muon:
    """One momentum per matrix, where AdamW keeps two moments.

    Args:
        parameters: matrices by name, float32.
        weight_decay: decoupled, as AdamW's.
        compute_dtype: what the iteration multiplies in; bfloat16 is enough for it.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        weight_decay: float,
        compute_dtype: torch.dtype,
    ) -> None:
        self._parameters = parameters
        self._weight_decay = weight_decay
        self._compute_dtype = compute_dtype
        self.momentum = {
            name: torch.zeros_like(p, memory_format=torch.preserve_format)
            for name, p in parameters.items()
        }
        """By parameter name, float32; not copies."""

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move every matrix by its gradient.

        Args:
            rate: AdamW's learning rate: an entry moves by ``_ADAMW_RMS * rate`` in the quadratic
                mean, which is about what AdamW's entries do.
        """
        for name, p in self._parameters.items():
            assert p.grad is not None
            momentum = self.momentum[name].lerp_(p.grad, 1.0 - MOMENTUM)
            # Nesterov: the gradient of now once more.
            update = orthogonal(p.grad.lerp(momentum, MOMENTUM).to(self._compute_dtype))
            p.mul_(1.0 - rate * self._weight_decay)
            p.add_(update, alpha=-rate * _ADAMW_RMS * max(p.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with its singular values brought near 1.

    Args:
        matrix: [m, n], float32 or bfloat16.

    Returns:
        the same shape and type; zeros for zeros.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.float().norm().clamp(min=1e-30).to(x.dtype)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if tall else x
