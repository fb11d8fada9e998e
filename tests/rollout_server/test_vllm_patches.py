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


def test_constraints_accept_step_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half fails on a vLLM that accepts it: then the workaround can go."""
    from vllm.v1.sample import rejection_sampler as module

    for name in ("apply_sampling_constraints", "expand_batch_to_tokens"):
        monkeypatch.setattr(module, name, getattr(module, name))
    vllm_patches.repair_sampler(module)
    metadata: Any = types.SimpleNamespace(
        all_greedy=False, temperature=torch.ones(1), top_k=torch.tensor([2]), top_p=None
    )
    none = torch.empty(0, 4), torch.tensor([0])
    with pytest.raises(RuntimeError, match="max"):
        module.apply_sampling_constraints(*none, metadata)
    vllm_patches.accept_steps_without_drafts(module)
    assert module.apply_sampling_constraints(*none, metadata).shape == (0, 4)
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    out = module.apply_sampling_constraints(logits, torch.tensor([1]), metadata)
    assert out.tolist() == [[-torch.inf, -torch.inf, 3.0, 4.0]]


def test_rows_within_prefill_leave_generators_alone() -> None:
    """The first half fails on a vLLM that does not ask a generator for its offset."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "get_offset()" in inspect.getsource(GPUModelRunner._bookkeeping_sync)
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator().get_offset()

    class Runner:
        def __init__(self) -> None:
            generators = {row: torch.Generator() for row in (0, 1, 3)}
            self.input_batch = types.SimpleNamespace(generators=generators)
            mask = torch.tensor([False, True, True, False, True]).numpy()
            self.discard_request_mask = types.SimpleNamespace(np=mask)

        def sample_tokens(self, fails: bool) -> list[int]:
            if fails:
                raise RuntimeError("sampling")
            return sorted(self.input_batch.generators)

    vllm_patches.keep_seeds_over_prefill(Runner)
    runner = Runner()
    kept = dict(runner.input_batch.generators)
    assert runner.sample_tokens(False) == [0, 3]
    assert runner.input_batch.generators == kept
    with pytest.raises(RuntimeError, match="sampling"):
        runner.sample_tokens(True)
    assert runner.input_batch.generators == kept


def test_min_tokens_end_within_drafts() -> None:
    """The first half fails on a vLLM that counts drafted tokens: then the workaround can go."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, MinTokensLogitsProcessor
    from vllm.v1.sample.sampler import Sampler

    drafted = [[7] * count for count in (3, 1, 2, 0, 3)]
    eos, least, output = 2, 5, [7, 7, 7]

    def masked(sampler_class: Any, processor_class: Any, after_drafts: bool) -> list[bool]:
        """Return which rows cannot sample a stop token; the last one has no ``min_tokens``."""
        processor = processor_class(None, torch.device("cpu"), False)
        params = [SamplingParams(min_tokens=least, stop_token_ids=[eos]) for _ in drafted[:-1]]
        added = [(row, each, None, output) for row, each in enumerate(params)]
        processor.update_state(BatchUpdate(len(drafted), [], added, []))
        metadata = types.SimpleNamespace(
            bad_words_token_ids={},
            no_penalties=True,
            output_token_ids=[output] * len(drafted),
            spec_token_ids=drafted,
            allowed_token_ids_mask=None,
            logitsprocs=types.SimpleNamespace(non_argmax_invariant=[processor]),
            thinking_budget_state_holder=None,
        )
        sampler = sampler_class.__new__(sampler_class)
        logits = sampler.apply_logits_processors(torch.zeros(5, 9), metadata, after_drafts)
        found = logits.isinf()
        assert int(found.sum()) == int(found[:, eos].sum())
        assert all(count == least for count, *_ in processor.min_toks.values())
        return found[:, eos].tolist()  # type: ignore[no-any-return]

    ours = type("Ours", (Sampler,), {}), type("OurMask", (MinTokensLogitsProcessor,), {})
    vllm_patches.end_min_tokens_within_drafts(*ours)
    every = [True, True, True, True, False]
    assert masked(Sampler, MinTokensLogitsProcessor, True) == every
    assert masked(*ours, True) == [False, True, False, True, False]
    assert masked(*ours, False) == every


def test_requests_that_end_engine_are_refused() -> None:
    """The first lines fail on a vLLM that has room for them: then the refusal can go."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
    from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState

    for state in (LogitBiasState, BadWordsState):
        assert "raise ValueError" in inspect.getsource(state.add_request)

    class Processor:
        def __init__(self, v2: bool, drafts: bool) -> None:
            self.vllm_config = types.SimpleNamespace(
                use_v2_model_runner=v2, speculative_config=object() if drafts else None
            )

        def process_inputs(self, name: str, params: object) -> object:
            return types.SimpleNamespace(sampling_params=params)

    vllm_patches.refuse_fatal_requests(Processor)
    ids = [*range(2000)]
    words = SamplingParams(bad_words=["a"])
    words._bad_words_token_ids = [ids]
    long: dict[str, SamplingParams] = {
        "allowed_token_ids: found 2000, expected at most 1024": SamplingParams(
            allowed_token_ids=ids
        ),
        "logit_bias: found 2000": SamplingParams(logit_bias=dict.fromkeys(ids, 1.0)),
        "stop_token_ids with min_tokens: found 2000, expected at most 128": SamplingParams(
            stop_token_ids=ids, min_tokens=1
        ),
        "tokens of bad_words: found 2000": words,
    }
    for text, params in long.items():
        assert Processor(v2=False, drafts=True).process_inputs("r", params)
        with pytest.raises(VLLMValidationError, match=text):
            Processor(v2=True, drafts=False).process_inputs("r", params)
    only = SamplingParams(logprob_token_ids=[5])
    assert Processor(v2=True, drafts=False).process_inputs("r", only)
    with pytest.raises(VLLMValidationError, match=r"logprob_token_ids: found 1, .*use logprobs"):
        Processor(v2=False, drafts=True).process_inputs("r", only)
    for params in (SamplingParams(stop_token_ids=ids), SamplingParams(min_tokens=1), None):
        assert Processor(v2=True, drafts=True).process_inputs("r", params)


def test_block_draft_norms_context_by_each_layers_weight() -> None:
    """The first half fails on a vLLM whose CPU kernel does: then the workaround can go."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 5, 3, 8, generator=generator)
    weights = torch.rand(2, 8, generator=generator) + 0.5
    normed = keys * (keys.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    model = types.SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6)
    theirs = DFlashQwen3Model._normalize_context_k(model, keys)
    torch.testing.assert_close(theirs, normed * weights[0])

    class Ours:
        _normalize_context_k = DFlashQwen3Model._normalize_context_k

    vllm_patches.norm_context_by_layer(Ours)
    found = Ours._normalize_context_k(model, keys)  # type: ignore[arg-type]
    torch.testing.assert_close(found, normed * weights[:, None, None])


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
