"""The draft's optimizer: AdamW, a schedule, clipping, and the average of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from draft_trainer.config import TrainingConfig
from draft_trainer.drafters import Draft
from slipstream.errors import RefusedError

_BETAS = (0.9, 0.95)
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
        """Return the rate of the next optimizer step.

        Args:
            step: steps applied so far.
            since_restart: steps applied since the moments were last reset.
        """
        warmth = min((since_restart + 1) / (self.warmup_steps + 1), 1.0)
        if not self.decay_steps:
            return self.peak * warmth
        begin = max(self.decay_steps * (1.0 - self.decay_share), self.warmup_steps)
        done = (step - begin) / (self.decay_steps - begin)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(max(done, 0.0), 1.0)))
        return self.peak * warmth * (self.floor + (1.0 - self.floor) * cosine)


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
