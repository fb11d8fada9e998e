"""Workaround: per-token temperature, top-k and top-p of drafts are garbage on CPUs.

vLLM's ``expand_batch_to_tokens`` allocates its output uninitialised; the CPU
kernel behind it fills an int64 copy of that output and throws the copy away.
Every sampling constraint of a verified draft token is then whatever was in
memory: at temperature 1 a policy with accuracy 0.76 scored below 0.11, silently.
Greedy requests take another path and hide it.

Upstream: https://github.com/vllm-project/vllm/pull/42638 (closed unmerged).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from slipstream.refusal import RefusedError

KNOWN_BROKEN = ((0, 27), (0, 32))
"""First and last release that were seen to have it, ``(major, minor)`` inclusive."""

Expand = Callable[..., torch.Tensor]


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """One value per request, repeated for each of its tokens.

    Args:
        x: [batch], any dtype.
        cu_num_tokens: [batch], integer, cumulative tokens up to and including each request.
        num_tokens: total, the length of the result.
        replace_from: a value of ``x`` to be replaced.
        replace_to: by this one.

    Returns:
        [num_tokens], the dtype of ``x``.
    """
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    return torch.repeat_interleave(replaced, counts, output_size=num_tokens)


def is_broken(expand: Expand) -> bool:
    """Whether ``expand`` gets a small example wrong.

    Tried with floats that no allocator leaves behind by chance, several times and
    with poisoned memory, because uninitialised memory may hold the right answer.
    """
    values = torch.tensor([0.8125, -1.0, 3.25])
    ends = torch.tensor([2, 5, 6], dtype=torch.int32)
    expected = torch.tensor([0.8125, 0.8125, 1.0, 1.0, 1.0, 3.25])
    for _ in range(4):
        poison = torch.full((6,), 7.5)
        del poison
        if not torch.equal(expand(values, ends, 6, replace_from=-1, replace_to=1), expected):
            return True
    return False


def prepare_kernels() -> None:
    """Load what the function calls on a CPU; vLLM does it later than plug-ins run."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def install(module: ModuleType, release: tuple[int, int], on_cpu: bool) -> bool:
    """Replace the function in vLLM's ``v1.sample.rejection_sampler`` where it is broken.

    A release in ``KNOWN_BROKEN`` is always patched; any other is judged by what
    the function does, so that an unknown version is never left unguarded.

    Args:
        module: ``vllm.v1.sample.rejection_sampler``.
        release: of vLLM.
        on_cpu: whether the platform is the CPU; elsewhere nothing is done.

    Returns:
        Whether it was replaced.

    Raises:
        RefusedError: the function is gone, so nobody knows what samples the drafts.
    """
    if not on_cpu:
        return False
    original = getattr(module, "expand_batch_to_tokens", None)
    if original is None:
        raise RefusedError(
            "vllm.v1.sample.rejection_sampler.expand_batch_to_tokens",
            f"absent in vLLM {release[0]}.{release[1]}",
            "present",
            "use a vLLM release that Slipstream was tested with (0.32)",
        )
    first, last = KNOWN_BROKEN
    if not first <= release <= last:
        prepare_kernels()
    if first <= release <= last or is_broken(original):
        module.expand_batch_to_tokens = expand_batch_to_tokens  # type: ignore[attr-defined]
        return True
    return False
