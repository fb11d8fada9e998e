"""The workaround for vLLM's expand_batch_to_tokens on CPUs."""

from __future__ import annotations

import types

import pytest
import torch

from rollout_server import vllm_patches as cpu_sampler
from slipstream.errors import RefusedError


def test_repeats_each_request_for_its_tokens() -> None:
    x = torch.tensor([0.7, -1.0, 1.3, 0.9])
    ends = torch.tensor([3, 3, 5, 6], dtype=torch.int32)
    out = cpu_sampler.expand_batch_to_tokens(x, ends, 6, replace_from=-1, replace_to=1)
    assert out.tolist() == pytest.approx([0.7, 0.7, 0.7, 1.3, 1.3, 0.9])
    assert out.dtype == x.dtype
    k = cpu_sampler.expand_batch_to_tokens(torch.tensor([5, 9]), torch.tensor([1, 3]), 3)
    assert k.tolist() == [5, 9, 9]


def test_vllms_own_function_is_broken_on_cpu_and_ours_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails on the first vLLM that has repaired it: then KNOWN_BROKEN ends before it."""
    cpu_sampler.prepare_kernels()
    from vllm.v1.sample import rejection_sampler as module

    assert cpu_sampler.is_broken(module.expand_batch_to_tokens)
    assert not cpu_sampler.is_broken(cpu_sampler.expand_batch_to_tokens)
    logits = torch.ones(3, 4)
    monkeypatch.setattr(module, "expand_batch_to_tokens", module.expand_batch_to_tokens)
    assert cpu_sampler.install(module, (0, 32), on_cpu=True)
    metadata = types.SimpleNamespace(
        all_greedy=False, temperature=torch.tensor([0.5, 2.0]), top_k=None, top_p=None
    )
    out = module.apply_sampling_constraints(logits, torch.tensor([1, 3]), metadata)
    assert out[:, 0].tolist() == [2.0, 0.5, 0.5]


def test_an_unknown_release_is_judged_by_behaviour() -> None:
    broken = types.ModuleType("broken")
    broken.expand_batch_to_tokens = lambda x, ends, n, **_: torch.zeros(n)  # type: ignore[attr-defined]
    assert cpu_sampler.install(broken, (0, 99), on_cpu=True)
    assert broken.expand_batch_to_tokens is cpu_sampler.expand_batch_to_tokens
    repaired = types.ModuleType("repaired")
    mine = lambda *a, **k: cpu_sampler.expand_batch_to_tokens(*a, **k)  # noqa: E731
    repaired.expand_batch_to_tokens = mine  # type: ignore[attr-defined]
    assert not cpu_sampler.install(repaired, (0, 99), on_cpu=True)
    assert repaired.expand_batch_to_tokens is mine
    with pytest.raises(RefusedError, match="expand_batch_to_tokens"):
        cpu_sampler.install(types.ModuleType("gone"), (0, 99), on_cpu=True)


def test_other_platforms_are_left_alone() -> None:
    assert not cpu_sampler.install(types.ModuleType("gpu"), (0, 32), on_cpu=False)
