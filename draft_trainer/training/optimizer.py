"""The draft's optimizer: AdamW or Muon, a schedule, clipping, and the average of the weights.

Source of Muon: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024);
the scale that lets it share AdamW's learning rate is that of "Muon is Scalable for LLM Training"
(arXiv 2502.16982), section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from draft_trainer.config import TrainingConfig
from draft_trainer.drafters import Draft
from slipstream.errors import RefusedError

_BETAS = (0.9, 0.95)
_MOMENTUM = 0.95
_ITERATIONS = 5
# Newton-Schulz polynomial a x + b x^3 + c x^5: steep at 0, so that five iterations bring every
# singular value from the smallest that matter to between 0.7 and 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ADAMW_RMS = 0.2
_OF_TOKENS = {"lm_head", "embed_tokens"}
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a constant rate, or a cosine to a floor over a known number of steps.

    Attributes:
        peak: the rate after warm-up.
        warmup_steps: steps of linear warm-up after every (re)start of the optimizer's moments.
        decay_steps: applied steps, warm-up included, after which the floor is reached; 0 for a
            constant rate, as a moving policy needs.
        floor: the last rate as a share of ``peak``, in [0, 1].
        decay_share: the cosine takes this share of ``decay_steps``, the last; before it the rate is
            constant. In (0, 1].
    """

    peak: float
    warmup_steps: int = 0
    decay_steps: int = 0
    floor: float = 0.1
    decay_share: float = 1.0

    def __post_init__(self) -> None:
        if self.decay_steps and self.decay_steps <= (found := self.warmup_steps):
            expected = f"fewer than the {self.decay_steps} steps of this training"
            raise RefusedError(
                "training.warmup_steps", found, expected, "train longer, or lower it"
            )

    def rate(self, step: int, since_restart: int) -> float:
        """The rate of the next optimizer step.

        Args:
            step: steps applied so far.
            since_restart: those of them since the moments were last reset.
        """
        warmth = min((since_restart + 1) / (self.warmup_steps + 1), 1.0)
        if not self.decay_steps:
            return self.peak * warmth
        begin = max(self.decay_steps * (1.0 - self.decay_share), self.warmup_steps)
        done = (step - begin) / (self.decay_steps - begin)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(max(done, 0.0), 1.0)))
        return self.peak * warmth * (self.floor + (1.0 - self.floor) * cosine)


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
            momentum = self.momentum[name].lerp_(p.grad, 1.0 - _MOMENTUM)
            # Nesterov: the gradient of now once more.
            update = orthogonal(p.grad.lerp(momentum, _MOMENTUM).to(self._compute_dtype))
            # What no token reached, as an expert, would move at the full rate by an old momentum.
            update *= p.grad.any()
            p.mul_(1.0 - rate * self._weight_decay)
            p.add_(update, alpha=-rate * _ADAMW_RMS * max(p.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with its singular values brought near 1.

    Args:
        matrix: [m, n], float32 or bfloat16.

    Returns:
        the same shape and type; near zeros for a norm far below 1e-12.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    # Where squares underflow, the norm is 0: a lesser bound would make the quotient infinite.
    x = x / x.float().norm().clamp(min=1e-12).to(x.dtype)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if tall else x


class DraftOptimizer:
    """Updates a draft's float32 weights. All of its state is in named tensors, from the start.

    "adamw" updates every parameter with AdamW. "muon" updates the matrices between hidden states
    with Muon; lm_head and embeddings, whose rows are tokens and not directions, and vectors stay
    with AdamW.

    Args:
        draft: whose weights it moves; float32.
        config: [training].
    """

    def __init__(self, draft: Draft, config: TrainingConfig) -> None:
        self._parameters = dict(draft.named_parameters())
        self._config = config
        self._average = self._copies() if config.weight_averaging else {}
        self.restart()

    def restart(self) -> None:
        """Fresh moments; weights and average stay."""
        config = self._config
        hidden = {
            name: p
            for name, p in self._parameters.items()
            if config.optimizer == "muon" and p.ndim == 2 and not _OF_TOKENS & {*name.split(".")}
        }
        self._muon = Muon(hidden, config.weight_decay, getattr(torch, config.compute_dtype))
        self._adam_parameters = {n: p for n, p in self._parameters.items() if n not in hidden}
        rest = self._adam_parameters.values()
        self._adam = torch.optim.AdamW(
            [
                {
                    "params": [p for p in rest if p.ndim >= 2],
                    "weight_decay": config.weight_decay,
                },
                {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=_BETAS,
            fused=True,
        )
        for p in rest:
            # As AdamW itself would at its first step: so that every state has the same names.
            self._adam.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
            }

    @property
    def averaged(self) -> dict[str, Tensor]:
        """The weights that are gated and released, by parameter name; not copies."""
        return self._average or {name: p.detach() for name, p in self._parameters.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Moments and average by name; not copies."""
        named = {
            f"optimizer.{name}.{key}": self._adam.state[p][key]
            for name, p in self._adam_parameters.items()
            for key in _MOMENTS
        }
        named |= {f"optimizer.{n}.momentum": tensor for n, tensor in self._muon.momentum.items()}
        return named | {f"average.{name}": tensor for name, tensor in self._average.items()}

    def with_gradients(self) -> list[torch.nn.Parameter]:
        """All parameters, those that backward did not reach with a gradient of zeros."""
        for p in self._parameters.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return list(self._parameters.values())

    def gradient_norm(self) -> float:
        """The global Euclidean norm."""
        return float(get_total_norm([p.grad for p in self.with_gradients() if p.grad is not None]))

    @torch.no_grad()
    def step(self, rate: float, norm: float) -> None:
        """Clip, move the weights, and take them into the average.

        Args:
            rate: learning rate.
            norm: what ``gradient_norm`` returned.
        """
        if norm > self._config.grad_clip:
            total = torch.tensor(norm)
            clip_grads_with_norm_(self._parameters.values(), self._config.grad_clip, total)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._muon.step(rate)
        for name, average in self._average.items():
            average.lerp_(self._parameters[name], 1.0 - self._config.weight_averaging)

    def clear_gradients(self) -> None:
        """Free them."""
        for p in self._parameters.values():
            p.grad = None

    def _copies(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._parameters.items()}
