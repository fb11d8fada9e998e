"""The draft's optimizer: AdamW or Muon, a schedule, clipping, and the average of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from draft_trainer.config import TrainingConfig
from draft_trainer.drafters import Draft

_BETAS = (0.9, 0.95)
_MOMENTUM = "momentum_buffer"
_BY_ADAMW = (
    *("embed_tokens.weight", "lm_head.weight", "markov_w1.weight", "markov_w2.weight"),
    "confidence_head.proj.weight",
)
"""The ends of the names of matrices that are not between layers: their rows are tokens, or it is
the one row of an output. Muon is for the others."""


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
        between = [
            p
            for name, p in self._parameters.items()
            if config.optimizer == "muon" and p.ndim == 2 and not name.endswith(_BY_ADAMW)
        ]
        chosen = {id(p) for p in between}
        rows = [p for p in parameters if p.ndim >= 2 and id(p) not in chosen]
        vectors = [p for p in parameters if p.ndim < 2]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [
                    {"params": rows, "weight_decay": config.weight_decay},
                    {"params": vectors, "weight_decay": 0.0},
                ],
                lr=config.learning_rate,
                betas=_BETAS,
                fused=True,
            )
        ]
        if between:
            self._optimizers.append(
                torch.optim.Muon(
                    between,
                    lr=config.learning_rate,
                    weight_decay=config.weight_decay,
                    # Updates of AdamW's size, so that one learning rate suits both.
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        # What each makes itself at its first step: so every saved state has the same names.
        self._moments: dict[str, dict[str, Tensor]] = {}
        for name, p in self._parameters.items():
            zeros = partial(torch.zeros_like, p, memory_format=torch.preserve_format)
            if id(p) in chosen:
                moments = {_MOMENTUM: zeros()}
            else:
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                moments = {"step": step, "exp_avg": zeros(), "exp_avg_sq": zeros()}
            self._optimizers[id(p) in chosen].state[p] = self._moments[name] = moments

    @property
    def averaged(self) -> dict[str, Tensor]:
        """The weights that are gated and released, by parameter name; not copies."""
        return self._average or {name: p.detach() for name, p in self._parameters.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Moments and average by name; not copies."""
        named = {
            f"optimizer.{name}.{key}": tensor
            for name, moments in self._moments.items()
            for key, tensor in moments.items()
        }
        return named | {f"average.{name}": tensor for name, tensor in self._average.items()}

    def gradient_norm(self) -> float:
        """Return the global Euclidean norm. A parameter that backward did not reach gets zeros, but
        for Muon's: its updates are of one size, so a matrix without a token, as an expert's, would
        move by old momentum at the full rate."""
        for name, p in self._parameters.items():
            if p.grad is None and _MOMENTUM not in self._moments[name]:
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
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
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        for name, average in self._average.items():
            average.lerp_(self._parameters[name], 1.0 - self._config.weight_averaging)

    def clear_gradients(self) -> None:
        """Free the gradients."""
        for p in self._parameters.values():
            p.grad = None

    def _copies(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._parameters.items()}
