"""The head's optimizer: AdamW or Muon, clipping of its own, and the average of the weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from draft_trainer.eagle3.head import Eagle3Head
from draft_trainer.training.learner_config import LearnerConfig
from draft_trainer.training.muon import Muon

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class HeadOptimizer:
    """Moves a head's float32 weights. Every state of it is a named tensor, from the start.

    "adamw" moves every parameter with AdamW. "muon" moves with Muon the matrices between hidden
    states; lm_head, whose rows are tokens and not directions, and the vectors stay with AdamW.

    Args:
        head: whose weights it moves; float32.
        config: rates, clipping and averaging.
    """

    def __init__(self, head: Eagle3Head, config: LearnerConfig) -> None:
        self._parameters = dict(head.named_parameters())
        self._config = config
        self._average = self._copies() if config.weight_averaging else {}
        self.restart()

    def restart(self) -> None:
        """Fresh moments; weights and average stay."""
        config = self._config
        hidden = {
            name: p
            for name, p in self._parameters.items()
            if config.optimizer == "muon" and p.ndim == 2 and not name.startswith("lm_head.")
        }
        self._muon = Muon(hidden, config.weight_decay, config.compute_dtype)
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
            betas=config.betas,
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
        """The weights that are judged and released, by parameter name; not copies."""
        return self._average or {name: p.detach() for name, p in self._parameters.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Moments and average by name; not copies."""
        named = {
            f"optimizer.{name}.{key}": self._adam.state[p][key]
            for name, p in self._adam_parameters.items()
            for key in MOMENTS
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
            norm: what ``gradient_norm`` said.
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
