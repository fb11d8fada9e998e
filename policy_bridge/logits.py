"""The policy's logits as a function of lm_head's output: by its configuration, and verified.

The teacher is computed from final hidden states and lm_head. A policy that changes its logits after
that (a soft cap, a factor) is announced with the change; one whose own logits are not what that
gives is refused, whatever the change is called and wherever the configuration has it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.errors import RefusedError
from slipstream.sampling import LogitForm
from slipstream.v1 import release_pb2

PROBED_ROWS = 16
"""Tokens of a forward pass whose whole rows of logits are compared."""

_SOFT_CAP = re.compile(r"(final_|output_|lm_head_)?logits?_soft_?cap(ping)?")
# Parts of a composed model that use the same words for something else.
_OTHER_PART = re.compile(r"(vision|image|audio|speech|video)[^.]*\.")
# Cohere, Falcon-H1 and Grok multiply; Granite divides, where HyperCLOVA X multiplies.
_FACTORS = {"logit_scale", "lm_head_multiplier", "output_multiplier", "output_multiplier_scale"}
_DIVISORS = {"logits_scaling"}
_MULTIPLIES_ALL = "HyperCLOVAX"

# Relative to the norm of the logits around their mean, beside the rounding of the logits.
_TOLERANCE = 2e-3
# Far more than the log-probs of an inference engine differ from those of a training pass.
_LOGPROB_TOLERANCE = 0.3
_NAMED_WITHIN = 0.01


def unfit(found: object, expected: object, next_step: str, field: str = "model") -> RefusedError:
    """A refusal of the policy's model itself, which no later call can mend."""
    reason = release_pb2.REFUSAL_REASON_MODEL
    return RefusedError(field, found, expected, next_step, reason=reason)


def is_sharded(tensor: torch.Tensor | None) -> bool:
    """Return whether it is a DTensor, of which ranks hold parts (FSDP2, tensor parallelism)."""
    return hasattr(tensor, "full_tensor")


def numbers_of(config: object, path: str = "model.config") -> Iterator[tuple[str, str, float]]:
    """Path, key and value of every number in a model's configuration, however deep it is nested."""
    to_dict = getattr(config, "to_dict", None)
    values = to_dict() if callable(to_dict) else config
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{path}.{key}", str(key), float(value)
        else:
            yield from numbers_of(value, f"{path}.{key}")


def form_of(model: nn.Module, scale: float | None = None, cap: float | None = None) -> LogitForm:
    """Return how ``model`` makes its logits, as its configuration says.

    Args:
        model: the policy without wrappers.
        scale: a factor that is known better; None: as configured.
        cap: a soft cap that is known better, 0 for none; None: as configured.

    Raises:
        RefusedError: a factor or soft cap that cannot be one.
    """
    known = {False: scale, True: cap}
    for path, key, value in numbers_of(getattr(model, "config", None)):
        is_cap = _SOFT_CAP.fullmatch(key) is not None and value != 0
        if _OTHER_PART.search(path) or not (is_cap or key in _FACTORS or key in _DIVISORS):
            continue
        if known[is_cap] is not None:
            continue
        if not math.isfinite(value) or value <= 0:
            step = "set logit_scale or logit_soft_cap in BridgeConfig"
            raise RefusedError(path, value, "a finite number > 0", step)
        if is_cap:
            cap = value if cap is None else cap
        elif scale is None:
            divides = key in _DIVISORS and _MULTIPLIES_ALL not in type(model).__name__
            scale = 1 / value if divides else value
    return LogitForm(1.0 if scale is None else scale, cap or 0.0)


@dataclass(frozen=True)
class ReturnedLogits:
    """Some rows of the logits that a model, or its lm_head, returned.

    Attributes:
        index: int64 [N], into all B * S tokens of the pass.
        rows: [N, V], a copy.
    """

    index: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, output: object, tokens: Sequence[int]) -> ReturnedLogits | None:
        """Copy rows from what either returned for ``tokens`` (B, S); None if it has no logits."""
        first = output[0] if isinstance(output, tuple | list) and output else output
        named = output.get("logits") if isinstance(output, Mapping) else None
        for found in (getattr(output, "logits", None), named, first):
            if not isinstance(found, torch.Tensor) or not found.is_floating_point():
                continue
            if is_sharded(found):
                # Indexed like a tensor it would raise in the policy's pass.
                continue
            if found.dim() == 3 and tuple(found.shape[:2]) == tuple(tokens):
                last, columns = found.shape[:2].numel() - 1, found.shape[1]
                count = min(PROBED_ROWS, last + 1)
                # Made on the device: a copy to it would wait for the work of the policy's stream.
                index = torch.arange(count, device=found.device) * last // max(1, count - 1)
                return cls(index, found.detach()[index // columns, index % columns])
        return None


def check_width(logits: torch.Tensor, vocab_size: int) -> None:
    """Raise RefusedError unless there is a logit for each row of lm_head's weight."""
    if logits.shape[-1] != vocab_size:
        found, expected = f"{logits.shape[-1]} for a token", f"{vocab_size}, the rows of lm_head"
        step = "turn tensor parallelism of lm_head off; a policy that pads it cannot be captured"
        raise unfit(found, expected, step, "model.logits")


def check_logits(
    returned: torch.Tensor,
    before: torch.Tensor,
    form: LogitForm,
    dtype: torch.dtype,
    config: object,
) -> bool:
    """Compare a model's own logits with what the trainer will compute of its states.

    Args:
        returned: [N, V], as the model returned them.
        before: float32 [N, V], lm_head's output.
        form: what the model does to that.
        dtype: of the model's logits.
        config: of the model, to name the likely cause.

    Returns:
        Whether there were finite ones to compare.

    Raises:
        RefusedError: they differ by more than rounding does, or there are more or fewer.
    """
    check_width(returned, before.shape[-1])
    theirs = returned.float()
    finite = theirs.isfinite() & before.isfinite()
    if (rows := finite.all(-1)).any():
        theirs, before = theirs[rows], before[rows]
    else:
        # Tokens that only pad the vocabulary may be masked in every row.
        columns = finite.all(0)
        theirs, before = theirs[:, columns], before[:, columns]
    if not theirs.numel():
        return False
    apart = _distance(form.apply(before.to(dtype)).float(), theirs)
    # A row's mean, which changes no probability, is rounded with it.
    rounding = torch.finfo(dtype).eps * theirs.norm() / _centred(theirs).norm().clamp(min=1e-20)
    tolerance = _TOLERANCE + float(rounding)
    if apart <= tolerance:
        return True
    cause, step = _explain(before, theirs, tolerance, list(numbers_of(config)))
    found = f"logits that differ from it by {apart:.1%} of their norm; {cause}"
    raise unfit(found, str(form), step, "model.logits")


def check_logprobs(given: torch.Tensor, own: torch.Tensor) -> bool:
    """Compare given log-probs [N] with those [N] that follow from the policy's states.

    Returns:
        Whether there were finite ones to compare.

    Raises:
        RefusedError: they differ by more than rounding does.
    """
    differences = (given.float() - own.float()).abs()
    # Not finite: refused for that elsewhere, sample by sample.
    differences = differences[differences.isfinite()]
    if not len(differences):
        return False
    if (apart := float(differences.mean())) > _LOGPROB_TOLERANCE:
        raise unfit(
            f"sampled_logprobs that are {apart:.3g} off those of the captured states on average",
            "log p(x_t | x_<t) at the window's temperature",
            "pass capture the log-probs' temperature; if it is right, the policy changes its "
            "logits after lm_head: set logit_scale or logit_soft_cap in BridgeConfig",
            "model.logits",
        )
    return True


def _centred(rows: torch.Tensor) -> torch.Tensor:
    return rows - rows.mean(-1, keepdim=True)


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Distance of two [N, V] in units of the second's norm; a constant in a row is none."""
    ours, theirs = _centred(ours), _centred(theirs)
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-20))


def _explain(
    before: torch.Tensor,
    theirs: torch.Tensor,
    tolerance: float,
    numbers: Sequence[tuple[str, str, float]],
) -> tuple[str, str]:
    """Say in words what the model does to its logits, and what to do about it."""
    centred = _centred(before)
    factor = float((centred * theirs).sum() / (centred * centred).sum().clamp(min=1e-20))
    if factor > 0 and _distance(before * factor, theirs) <= tolerance:
        exact, name = _configured(factor, numbers)
        return f"they are lm_head's output times {factor:.6g}{name}", _settings(exact, 0)
    highest = before.abs().argmax()
    z, y = abs(float(before.flatten()[highest])), abs(float(theirs.flatten()[highest]))
    low, high = max(y, 1e-6), 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if middle * math.tanh(z / middle) < y else (low, middle)
    if _distance(LogitForm(1.0, high).apply(before), theirs) <= tolerance:
        exact, name = _configured(high, numbers)
        return f"they are soft-capped at {high:.6g}{name}", _settings(1, exact)
    return (
        "the model changes them after lm_head in a way that is neither a factor nor a soft cap",
        "this policy cannot be captured",
    )


def _settings(scale: float, cap: float) -> str:
    return f"set logit_scale={scale:.6g}, logit_soft_cap={cap:.6g} in BridgeConfig"


def _configured(value: float, numbers: Sequence[tuple[str, str, float]]) -> tuple[float, str]:
    """The configured number, or its inverse, that is close to ``value``, and where it stands."""
    for path, _, number in numbers:
        if number > 0 and number != 1.0:
            for exact, words in ((number, path), (1 / number, f"1 / {path}")):
                if abs(value / exact - 1) < _NAMED_WITHIN:
                    return exact, f" ({words})"
    return value, ""
