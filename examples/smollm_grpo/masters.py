"""AdamW on float32 master weights of a policy in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class MasterAdamW(torch.optim.AdamW):
    """AdamW whose weights are float32 copies of a model's, to which it writes them back rounded.

    In bfloat16 alone, a weight that moves by less than 1/256 of itself would not move.

    Args:
        model: the policy; a tied matrix counts once.
        learning_rate: before any schedule.
    """

    def __init__(self, model: torch.nn.Module, learning_rate: float) -> None:
        self._named = dict(model.named_parameters())
        self._masters = {
            name: value.detach().to(torch.float32, copy=True) for name, value in self._named.items()
        }
        super().__init__(
            self._masters.values(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the model's gradients."""
        for value in self._named.values():
            value.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the masters by the model's gradients, and the model by the masters."""
        for name, value in self._named.items():
            # In turn: the gradients of one kind are in memory at a time.
            self._masters[name].grad = None if value.grad is None else value.grad.float()
            value.grad = None
        super().step(closure)
        for name, value in self._named.items():
            self._masters[name].grad = None
            value.copy_(self._masters[name])

    def tensors(self) -> dict[str, Tensor]:
        """Masters and moments by name, to be kept."""
        found: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            found[f"master.{name}"] = master
            for moment, value in self.state[master].items():
                found[f"{moment}.{name}"] = value
        return found

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what ``tensors`` returned. Raises KeyError: a tensor is not there."""
        for name, master in self._masters.items():
            master.copy_(tensors[f"master.{name}"])
            self._named[name].copy_(master)
            kept: dict[str, Any] = {
                moment: tensors[f"{moment}.{name}"].clone()
                for moment in ("step", "exp_avg", "exp_avg_sq")
            }
            self.state[master] = kept
