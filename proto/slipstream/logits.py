"""Computes a policy's logits from final hidden states, for the bridge and the trainer alike.

    y = soft_cap * tanh(scale * (W h + b) / soft_cap)

Each operation is rounded to the dtype in which the policy has its logits: log Z, which the policy
computed of rounded logits, and a teacher of exact ones are not one distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.v1 import draft_trainer_pb2 as pb


@dataclass(frozen=True)
class LogitForm:
    """What a policy does to the output of its lm_head.

    Attributes:
        scale: a factor, > 0.
        soft_cap: 0: none.
    """

    scale: float = 1.0
    soft_cap: float = 0.0

    def __str__(self) -> str:
        """As a formula of lm_head's output."""
        made = "(h W^T + b)" if self.scale == 1.0 else f"{self.scale:g} (h W^T + b)"
        return f"{self.soft_cap:g} tanh({made} / {self.soft_cap:g})" if self.soft_cap else made

    @classmethod
    def of(cls, spec: pb.PolicySpec) -> LogitForm:
        """As OpenRun announces it."""
        return cls(spec.logit_scale or 1.0, spec.logit_soft_cap)

    def apply(self, logits: Tensor) -> Tensor:
        """The policy's logits of its lm_head's output; any shape and dtype, which stay."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits
