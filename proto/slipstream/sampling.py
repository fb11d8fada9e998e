"""A policy's logits and its rollouts' sampling parameters, the same in bridge and trainer.

Logits are computed from final hidden states h:

    y = soft_cap * tanh(scale * (W h + b) / soft_cap)

Each operation is rounded to the dtype of the policy's own logits: the policy computed log Z from
rounded logits, and exact ones with that log Z would not be a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import RefusedError, clean
from slipstream.v1 import draft_trainer_pb2 as pb


@dataclass(frozen=True)
class LogitForm:
    """The function that a policy applies to the output of its lm_head.

    Attributes:
        scale: a factor, > 0.
        soft_cap: 0: none.
    """

    scale: float = 1.0
    soft_cap: float = 0.0

    def __str__(self) -> str:
        """Return the formula of the logits."""
        made = "(h W^T + b)" if self.scale == 1.0 else f"{self.scale:g} (h W^T + b)"
        return f"{self.soft_cap:g} tanh({made} / {self.soft_cap:g})" if self.soft_cap else made

    @classmethod
    def of(cls, spec: pb.PolicySpec) -> LogitForm:
        """Read the form that OpenRun announces."""
        return cls(spec.logit_scale or 1.0, spec.logit_soft_cap)

    def apply(self, logits: Tensor) -> Tensor:
        """Turn lm_head's output into the policy's logits, keeping its shape and dtype."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


MAX_BIASED = 256
"""The most tokens in a ``logit_bias``."""

_LEAST = 1e-6  # of what must be above 0
_RANGES = {
    "top_p": (_LEAST, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (_LEAST, math.inf),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
SAMPLING = (*_RANGES, "top_k", "logit_bias")
"""Names of sampling parameters, vLLM's own."""


def sampling_of(values: Mapping[str, object]) -> pb.SamplingParameters:
    """Check sampling parameters, by vLLM's names; None and absent change nothing.

    Raises:
        RefusedError: an unknown name, or a value that vLLM refuses.
    """
    made = pb.SamplingParameters()
    for name, value in values.items():
        if name not in SAMPLING:
            step = "leave out what does not change the distribution"
            raise RefusedError(f"sampling.{name}", "unknown", f"one of {SAMPLING}", step)
        try:
            if value is not None:
                _set(made, name, value)
        except (TypeError, ValueError, OverflowError) as error:
            found, step = clean(repr(value)), "pass the rollouts' own"
            expected = "a number" if name in _RANGES else "what vLLM takes"
            raise RefusedError(f"sampling.{name}", found, expected, step) from error
    check_sampling(made)
    return made


def _set(made: pb.SamplingParameters, name: str, value: object) -> None:
    if isinstance(value, bool):
        raise TypeError(name)
    if name == "logit_bias":
        for token, bias in dict(value).items():  # type: ignore[call-overload]
            made.logit_bias[int(token)] = float(bias)
    elif name == "top_k":
        # vLLM's -1 and 0 are both all tokens.
        made.top_k = 0 if value == -1 else int(value)  # type: ignore[call-overload]
    else:
        setattr(made, name, value)


def check_sampling(sampling: pb.SamplingParameters, vocab_size: int = 1 << 31) -> None:
    """Raise RefusedError for what vLLM would not have sampled with."""
    for field, value in sampling.ListFields():
        if field.name not in _RANGES:
            continue
        least, most = _RANGES[field.name]
        if not (least <= value <= most and math.isfinite(value)):
            expected = f"a number within [{least:g}, {most:g}]"
            raise RefusedError(f"sampling.{field.name}", value, expected, "send the rollout's")
    bias = sampling.logit_bias
    if len(bias) > MAX_BIASED or not all(
        0 <= token < vocab_size and math.isfinite(value) for token, value in bias.items()
    ):
        expected = f"finite numbers for at most {MAX_BIASED} tokens below {vocab_size}"
        raise RefusedError("sampling.logit_bias", f"{len(bias)} of them", expected, "send those")
