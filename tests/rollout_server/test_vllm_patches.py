"""The guards for vLLM's bugs; each test fails on a vLLM that has repaired its own."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import pytest
import torch
from torch import nn

from rollout_server.vllm import engine_core, plugins, worker
from rollout_server.vllm import patches as vllm_patches

pytestmark = pytest.mark.contract("lossless")


class Model(nn.Module):
    """The names that vLLM's models have."""

    has_own_lm_head = has_own_embed_tokens = True

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding.from_pretrained(weight.clone())
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.lm_head.weight = nn.Parameter(weight.clone(), requires_grad=False)


def load(proposer_class: type) -> tuple[Model, Model]:
    """Do what vLLM does to a draft and its verifier after loading both."""
    weight = torch.randn(6, 4)
    policy, draft = Model(weight), Model(weight)
    proposer: Any = proposer_class.__new__(proposer_class)
    proposer.model = draft
    proposer.vllm_config = types.SimpleNamespace(speculative_config=None)
    proposer.use_local_argmax_reduction = False
    proposer._maybe_share_lm_head(policy)
    return policy, draft


def test_equal_lm_head_is_shared_by_vllm_not_by_patch() -> None:
    """The first half fails on a vLLM that stopped sharing: then the workaround can go."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    theirs = type("Theirs", (SpecDecodeBaseProposer,), {})
    policy, draft = load(theirs)
    assert draft.lm_head is policy.lm_head
    assert vllm_patches.shared_parameters(policy, draft) == ["lm_head.weight"]

    ours = type("Ours", (SpecDecodeBaseProposer,), {})
    vllm_patches.keep_own_lm_head(ours)
    policy, draft = load(ours)
    assert draft.lm_head is not policy.lm_head
    assert vllm_patches.shared_parameters(policy, draft) == []
    draft.lm_head.weight.fill_(0)
    assert not torch.equal(draft.lm_head.weight, policy.lm_head.weight)


@pytest.mark.parametrize("share", [True, False])
def test_shared_parameters_allows_policy_embedding(share: bool) -> None:
    policy, draft = Model(torch.randn(6, 4)), Model(torch.randn(6, 4))
    if share:
        draft.model.embed_tokens = policy.model.embed_tokens
    assert vllm_patches.shares_embedding(policy, draft) is share
    assert vllm_patches.shared_parameters(policy, draft) == []


def test_shared_parameters_finds_head_tied_to_policy_embedding() -> None:
    """A commit of such a draft would overwrite the policy's embeddings through its lm_head."""
    policy, draft = Model(torch.randn(6, 4)), Model(torch.randn(6, 4))
    draft.model.embed_tokens = policy.model.embed_tokens
    draft.lm_head.weight = policy.model.embed_tokens.weight
    assert vllm_patches.shared_parameters(policy, draft) == ["lm_head.weight"]


def test_ties_lm_head_compares_memory() -> None:
    policy = Model(torch.randn(6, 4))
    assert torch.equal(policy.lm_head.weight, policy.model.embed_tokens.weight)
    assert not vllm_patches.ties_lm_head(policy)
    policy.lm_head.weight = policy.model.embed_tokens.weight
    assert vllm_patches.ties_lm_head(policy)
    policy.lm_head = policy.model.embed_tokens  # the module itself, as in some of vLLM's models
    assert vllm_patches.ties_lm_head(policy)
    # A pipeline's first rank has no lm_head; a packed one leaves no memory behind.
    del policy.lm_head
    assert not vllm_patches.ties_lm_head(policy)
    for empty in (policy.model.embed_tokens, policy):
        empty.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    policy.lm_head = nn.Linear(4, 6, bias=False)
    policy.lm_head.weight = policy.model.embed_tokens.weight
    assert not vllm_patches.ties_lm_head(policy)


def test_expand_batch_to_tokens_repeats_each_request() -> None:
    x = torch.tensor([0.7, -1.0, 1.3, 0.9])
    ends = torch.tensor([3, 3, 5, 6], dtype=torch.int32)
    out = vllm_patches.expand_batch_to_tokens(x, ends, 6, replace_from=-1, replace_to=1)
    assert out.tolist() == pytest.approx([0.7, 0.7, 0.7, 1.3, 1.3, 0.9])
    assert out.dtype == x.dtype
    k = vllm_patches.expand_batch_to_tokens(torch.tensor([5, 9]), torch.tensor([1, 3]), 3)
    assert k.tolist() == [5, 9, 9]


def test_sampler_patch_repairs_temperatures_of_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails on the first vLLM that has repaired it: then ours can go."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler as module

    # vLLM loads what the function calls on a CPU later than plug-ins run.
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    values, ends = torch.tensor([0.8125, -1.0, 3.25]), torch.tensor([2, 5, 6], dtype=torch.int32)
    theirs = []
    for _ in range(4):
        # Uninitialised memory may hold the right answer.
        poison = torch.full((6,), 7.5)
        del poison
        theirs.append(module.expand_batch_to_tokens(values, ends, 6, -1, 1).tolist())
    assert any(found != [0.8125, 0.8125, 1.0, 1.0, 1.0, 3.25] for found in theirs)
    monkeypatch.setattr(module, "expand_batch_to_tokens", module.expand_batch_to_tokens)
    vllm_patches.repair_sampler(module)
    metadata = types.SimpleNamespace(
        all_greedy=False, temperature=torch.tensor([0.5, 2.0]), top_k=None, top_p=None
    )
    logits = torch.ones(3, 4)
    out = module.apply_sampling_constraints(logits, torch.tensor([1, 3]), metadata)
    assert out[:, 0].tolist() == [2.0, 0.5, 0.5]


def test_tied_lm_head_patch_follows_pushed_embedding() -> None:
    """The first half fails on a vLLM whose own follows: then the workaround can go."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    def logits(head_class: Any, method: Any, tied: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """After a push to the embedding, and what they should be."""
        embedding, lm_head = nn.Module(), nn.Module()
        for layer in (embedding, lm_head):
            method.create_weights(layer, 64, [96], 64, 96, torch.float32)
        if tied:
            lm_head.quant_method = method
            head_class.tie_weights(lm_head, embedding)
        for layer in (embedding, lm_head):
            layer.weight.normal_()  # type: ignore[operator,union-attr]
            method.process_weights_after_loading(layer)
        for pushed in (embedding, *([] if tied else [lm_head])):
            pushed.weight.normal_()  # type: ignore[operator,union-attr]
            pushed.weight.data = torch.randn(96, 64)  # a swap exchanges memory
        if not tied:
            method.process_weights_after_loading(lm_head)
        states = torch.randn(3, 64)
        return method.apply(lm_head, states), states @ lm_head.weight.T  # type: ignore[operator,union-attr]

    found, expected = logits(ParallelLMHead, UnquantizedEmbeddingMethod(), tied=True)
    assert not torch.allclose(found, expected, atol=1.0)

    ours = type("Head", (ParallelLMHead,), {}), type("Method", (UnquantizedEmbeddingMethod,), {})
    vllm_patches.follow_tied_embedding(*ours)
    for tied in (True, False):
        torch.testing.assert_close(*logits(ours[0], ours[1](), tied), rtol=1e-4, atol=1e-4)


def test_convolution_patch_follows_second_load() -> None:
    """The first half fails on a vLLM whose own follows: then the workaround can go."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.platforms import current_platform

    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this CPU's kernel does not pack convolutions")
    current_platform.import_kernels()

    def pushed(method: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the model reads after a second load, and what it should read."""
        layer = nn.Module()
        for _ in range(2):
            weight = torch.randn(64, 1, 4, dtype=torch.bfloat16)
            layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
            if not hasattr(layer, "read"):
                layer.read = layer.weight.view(64, 4)
            method.process_weights_after_loading(layer)
        return layer.read, weight.view(64, 4)  # type: ignore[return-value]

    found, expected = pushed(UnquantizedLinearMethod())
    assert not torch.equal(found, expected)
    ours = type("Method", (UnquantizedLinearMethod,), {})
    vllm_patches.keep_convolution(ours)
    found, expected = pushed(ours())
    assert torch.equal(found, expected)


def test_wait_patch_sleeps_between_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half fails on a vLLM that waits in another way: then the workaround can go."""
    from vllm.distributed.device_communicators import shm_broadcast

    source = inspect.getsource(shm_broadcast.SpinCondition.wait)
    assert "sched_yield()" in source and "sleep" not in source

    spins, sleeps = [], []
    module = types.ModuleType("shm_broadcast")
    module.sched_yield = lambda: spins.append(1)  # type: ignore[attr-defined]
    monkeypatch.setattr(vllm_patches.time, "sleep", sleeps.append)
    vllm_patches.let_threads_run(module)
    for _ in range(3 * vllm_patches.SPINS):
        module.sched_yield()
    assert sleeps == 3 * [vllm_patches.PAUSE_SECONDS]
    assert len(spins) == 3 * (vllm_patches.SPINS - 1)
    vllm_patches.let_threads_run(types.ModuleType("another"))


def test_stop_strings_are_refused_with_drafts() -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    # A stand-in: the patched check of the real class would stay in this process.
    class Params:
        stop: tuple[str, ...] = ()

        def _validate_spec_decode(self, speculative_config: object) -> None:
            checked.append(speculative_config)

    checked: list[object] = []
    vllm_patches.refuse_stop_strings(Params, "0.31.0")
    params, drafts = Params(), object()
    params._validate_spec_decode(drafts)
    params.stop = ("7",)
    params._validate_spec_decode(None)
    with pytest.raises(VLLMValidationError, match=r"stop: .*vLLM 0\.31\.0 .*stop_token_ids.*0\.32"):
        params._validate_spec_decode(drafts)
    assert checked == [drafts, None, drafts]

    # What is wrapped is there, is called for each request, and sees one list of strings.
    assert "self._validate_spec_decode(" in inspect.getsource(SamplingParams.verify)
    assert SamplingParams(stop="7").stop == ["7"] and not SamplingParams().stop


def test_patches_apply_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    patched: list[object] = []
    for module in (worker, engine_core, vllm_patches):
        monkeypatch.setattr(module, "install", lambda *given, name=module: patched.append(name))
    monkeypatch.setattr(plugins, "log_with_vllm", lambda: None)
    monkeypatch.setattr(plugins, "_patch_once", functools.cache(plugins._patch_once.__wrapped__))
    monkeypatch.setenv(plugins.MARK, "1")
    for _ in range(2):
        plugins.register_general()
    assert patched == [worker, engine_core, vllm_patches]
