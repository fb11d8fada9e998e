"""The draft's optimizer: AdamW, a schedule, clipping, and the average of the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from draft_trainer.config import TrainingConfig
from draft_trainer.drafters import Draft

_BETAS = (0.9, 0.95)
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a constant rate.

    Attributes:
        peak: the rate after warm-up.
        warmup_steps: steps of linear warm-up after every (re)start of the optimizer's moments.
    """

    peak: float
    warmup_steps: int = 0

    def rate(self, since_restart: int) -> float:
        """Return the rate of the next optimizer step, by the steps since the moments' reset."""
        return self.peak * min((since_restart + 1) / (self.warmup_steps + 1), 1.0)


class DraftOptimizer:
    """Updates a draft's float32 weights. All of its state is in named tensors, from the start.

    Args:
        draft: the draft that it updates; float32.
        config: [training].
    """

    def __init__(self, draft: Draft, config: TrainingConfig) -> None:
        self._parameters = dict(draft.named_parameters())
        self._config = config
        self._average = self._copies() if config.weight_averaging else {}
        self.restart()

    def restart(self) -> None:
        """Reset the moments; weights and average stay."""
        config = self._config
        parameters = self._parameters.values()
        self._adam = torch.optim.AdamW(
            [
                {
                    "params": [p for p in parameters if p.ndim >= 2],
                    "weight_decay": config.weight_decay,
                },
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=_BETAS,
            fused=True,
        )
        for p in parameters:
            # What AdamW itself makes at its first step: so every saved state has the same names.
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
            for name, p in self._parameters.items()
            for key in _MOMENTS
        }
        return named | {f"average.{name}": tensor for name, tensor in self._average.items()}

    def gradient_norm(self) -> float:
        """Return the global Euclidean norm; a parameter that backward did not reach gets zeros."""
        gradients = []
        for p in self._parameters.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            gradients.append(p.grad)
        return float(get_total_norm(gradients))

    @torch.no_grad()
    def step(self, rate: float, norm: float) -> None:
        """Clip the gradients, update the weights, and then their average.

        Args:
            rate: learning rate.
            norm: what ``gradient_norm`` returned.
        """
        if norm > self._config.grad_clip:
            total = torch.tensor(norm, dtype=torch.float32)
            clip_grads_with_norm_(self._parameters.values(), self._config.grad_clip, total)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        for name, average in self._average.items():
            average.lerp_(self._parameters[name], 1.0 - self._config.weight_averaging)

    def clear_gradients(self) -> None:
        """Free the gradients."""
        for p in self._parameters.values():
            p.grad = None

    def _copies(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._parameters.items()}
