"""Patches for bugs of vLLM: six change what is generated, one what is returned, four let a request
end the engine, one serialises requests, one costs acceptance.

**A shared lm_head.** If the draft's lm_head equals the verifier's when vLLM loads it, which is the
usual initialisation of a draft, vLLM drops the draft's and points it at the verifier's. The next
draft commit then overwrites the VERIFIER, without an error. Here the draft keeps its own.
embed_tokens is different: a draft checkpoint without it is meant to use the verifier's and to
follow policy pushes, so that sharing stays, and a stage that brings it is refused
(``checkpoint.Expected.forbidden``). https://github.com/vllm-project/vllm/pull/28549 brought the
sharing of equal heads (``_maybe_share_lm_head`` in ``v1/spec_decode/llm_base_proposer.py``, and
``_should_share`` in ``v1/worker/gpu/spec_decode/eagle/utils.py`` for Model Runner V2). The guard is
the storage check in ``shared_parameters``, which runs whatever the vLLM version is.

**Sampling constraints of drafted tokens on CPUs.** ``expand_batch_to_tokens`` allocates its output
uninitialised; the CPU kernel behind it fills an int64 copy of that output and throws the copy away.
Temperature, top-k and top-p of every verified draft token are then whatever was in memory; greedy
requests take another path and hide it. https://github.com/vllm-project/vllm/pull/42638 was closed
unmerged; 0.27 to 0.32 have it.

**Experts after a policy push on CPUs.** A CPU's kernel packs the experts' matrices in place when
they are first loaded (``CPUUnquantizedExperts.process_weights_after_loading``), and
``UnquantizedFusedMoEMethod._setup_kernel`` leaves that out at every later load: the kernel then
multiplies with matrices in another order, without an error. 0.32 has it.
https://github.com/vllm-project/vllm/issues/42821 has the same silent failure of a second load on
GPUs, where a reload by layers, which every push here is, converts them again.

**A tied lm_head after a push on CPUs.** vLLM packs an lm_head for a CPU's kernel when it is loaded
(``UnquantizedEmbeddingMethod.process_weights_after_loading``). A tied one has nothing to load: a
push brings the embedding, and the kernel goes on with the head packed before, without an error.
Here a tied head is not packed, and multiplies with the embedding as it is. 0.32 has the fault;
https://github.com/vllm-project/vllm/issues/48312 is about weights that a reload leaves out.

**Stop strings.** One step may accept drafted tokens beyond the one that completes a stop string.
Before 0.32 vLLM cuts the text there, and returns the ids and log-probabilities of these tokens too:
a training job would train on them. https://github.com/vllm-project/vllm/pull/47616 mends it. Below
0.32 a request with ``stop`` is refused where tokens are drafted; ``stop_token_ids`` are not
affected, because the scheduler cuts the tokens at those.

**min_tokens with drafts.** Where a step verifies drafts, V1's sampler masks the stop tokens of the
token after them by the tokens from before the step, so up to as many tokens too long as were
drafted. Where drafts end decides which token is masked, so that output depends on the draft.
https://github.com/vllm-project/vllm/pull/32642 brought it; Model Runner V2 goes by the position.

**top_k without top_p.** V1 applies the sampling constraints of drafts also in a step that verifies
none, a prefill for example: ``apply_top_k_only`` asks for the maximum of no values, an error that
ends the engine. https://github.com/vllm-project/vllm/pull/15478 brought it.

**Seeds on CPUs.** Where a prefill takes several steps, V1 samples a token in each and takes the
random numbers back by the offset of the request's generator. A CPU's generator has none, an error
that ends the engine. https://github.com/vllm-project/vllm/pull/10097 says that this relies on CUDA.

**logprob_token_ids with drafts.** V1's rejection sampler expects the logits of the whole vocabulary
where it gets those of these tokens alone, an error that ends the engine; V2's returns none. Such a
request is refused. https://github.com/vllm-project/vllm/issues/42592, open in 0.33.

**Long lists on Model Runner V2.** It has room for 1,024 allowed_token_ids or logit_bias tokens,
128 stop tokens under min_tokens and 1,024 tokens of bad_words, and raises an error in the engine
where a request has more, which ends it. Such a request is refused.
https://github.com/vllm-project/vllm/pull/55164 is open.

**Mamba-2's convolution after a push on CPUs.** ``MambaMixer2`` reads its weights through
``conv_weights``, a view of ``conv1d.weight``. A CPU's kernel packs that parameter into other memory
(``dispatch_cpu_unquantized_gemm``), which ends the view: a push changes the parameter, and the
model goes on with the convolution of the first load, without an error. 0.29 to 0.33
pack so; https://github.com/vllm-project/vllm/issues/42821 is about the same kind of silence.

**Waiting for the worker on CPUs.** While the engine core waits for its worker it calls
``os.sched_yield`` in a loop, which releases the GIL for too short a time for its threads for input
and output to take it. On few cores they get it only once the engine has nothing to do: requests
that arrive together are served one after the other, and answers wait for the last one.
https://github.com/vllm-project/vllm/pull/29813 (closed unmerged) has the sleep that ends it.

**Keys of a block draft's context on CPUs.** ``_normalize_context_k`` gives one weight per layer to
``rms_norm``, which knows that of GPUs only: a CPU's kernel takes the first layer's for all, without
an error. https://github.com/vllm-project/vllm/pull/46761 brought it, and
https://github.com/vllm-project/vllm/pull/56431 mended it for XPUs alone. 0.32 has it.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

from rollout_server.vllm.versions import older

EMBEDDING = "embed_tokens"

SPINS, PAUSE_SECONDS = 1000, 1e-4
"""The turns of the loop between two sleeps, about a millisecond, and the length of a sleep."""


def install() -> None:
    """Patch the vLLM of this process; not to be called twice.

    Raises RefusedError: the code that samples drafts, or checks requests for them, is unknown.
    """
    import vllm.distributed.device_communicators.shm_broadcast as shm_broadcast
    import vllm.v1.sample.rejection_sampler as rejection_sampler
    from vllm.platforms import current_platform
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.sample.logits_processor import MinTokensLogitsProcessor
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu.spec_decode.eagle import utils
    from vllm.version import __version__ as vllm_version

    if older(vllm_version, "0.32"):
        refuse_stop_strings(SamplingParams, vllm_version)
    refuse_fatal_requests(InputProcessor)
    accept_steps_without_drafts(rejection_sampler)
    end_min_tokens_within_drafts(Sampler, MinTokensLogitsProcessor)
    keep_own_lm_head(SpecDecodeBaseProposer)
    keep_own_lm_head_v2(utils)
    if current_platform.is_cpu():
        from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            UnquantizedEmbeddingMethod,
        )
        from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        norm_context_by_layer(DFlashQwen3Model)
        keep_seeds_over_prefill(GPUModelRunner)
        repair_sampler(rejection_sampler)
        let_threads_run(shm_broadcast)
        pack_experts_again(UnquantizedFusedMoEMethod)
        follow_tied_embedding(ParallelLMHead, UnquantizedEmbeddingMethod)
        keep_convolution(UnquantizedLinearMethod)
    allow_dense_qwen3_next()


def allow_dense_qwen3_next() -> None:
    """Have vLLM load ``served.dense_qwen3_next``'s classes for Qwen3-Next models."""
    from vllm.model_executor.models import ModelRegistry

    for name in ("Qwen3NextForCausalLM", "Qwen3NextMTP"):
        ModelRegistry.register_model(name, f"rollout_server.vllm.served.dense_qwen3_next:{name}")


def keep_own_lm_head(proposer_class: type) -> None:
    """Make the V1 runner's proposer leave an lm_head alone that the checkpoint brought."""
    original: Callable[[Any, nn.Module], None] = proposer_class._maybe_share_lm_head  # type: ignore[attr-defined]

    def maybe_share_lm_head(self: Any, target_language_model: nn.Module) -> None:
        own = self.model.lm_head if getattr(self.model, "has_own_lm_head", False) else None
        original(self, target_language_model)
        if own is not None:
            self.model.lm_head = own

    proposer_class._maybe_share_lm_head = maybe_share_lm_head  # type: ignore[attr-defined]


def keep_own_lm_head_v2(module: ModuleType) -> None:
    """Make Model Runner V2 leave an lm_head alone that the checkpoint brought."""
    original: Callable[..., bool] = module._should_share

    def should_share(model: nn.Module, own: str, draft: Any, target: Any) -> bool:
        if own == "has_own_lm_head" and getattr(model, own, False):
            return False
        return original(model, own, draft, target)

    module._should_share = should_share  # type: ignore[attr-defined]


def refuse_stop_strings(params_class: type, version: str) -> None:
    """Have requests with stop strings refused where tokens are drafted.

    Args:
        params_class: ``SamplingParams``.
        version: vLLM's.
    """
    from vllm.exceptions import VLLMValidationError

    original: Callable[[Any, Any], None] = params_class._validate_spec_decode  # type: ignore[attr-defined]

    def validate_spec_decode(self: Any, speculative_config: Any) -> None:
        original(self, speculative_config)
        if speculative_config is not None and self.stop:
            # vLLM's server answers this one with 400 and its text, and others with 500.
            raise VLLMValidationError(
                f"stop: found strings, expected none: with drafts, vLLM {version} returns tokens "
                "beyond them. Next step: use stop_token_ids, or serve with vLLM 0.32 or newer"
            )

    params_class._validate_spec_decode = validate_spec_decode  # type: ignore[attr-defined]


def refuse_fatal_requests(processor_class: type) -> None:
    """Have requests refused that would end the engine.

    Args:
        processor_class: ``InputProcessor``, which makes the engine's request of a user's.
    """
    from vllm.exceptions import VLLMValidationError

    original: Callable[..., Any] = processor_class.process_inputs  # type: ignore[attr-defined]

    def process_inputs(self: Any, *given: Any, **named: Any) -> Any:
        request = original(self, *given, **named)
        text = _fatal(request.sampling_params, self.vllm_config)
        if text:
            raise VLLMValidationError(text)
        return request

    processor_class.process_inputs = process_inputs  # type: ignore[attr-defined]


def _fatal(params: Any, config: Any) -> str:
    """Return why a request's ``SamplingParams``, None if it has none, would end the engine."""
    if params is None:
        return ""
    if params.logprob_token_ids and config.speculative_config is not None:
        return (
            f"logprob_token_ids: found {len(params.logprob_token_ids)}, expected none with drafts. "
            "Next step: use logprobs"
        )
    if not config.use_v2_model_runner:
        return ""
    from vllm import envs
    from vllm.v1.worker.gpu.sample import logit_bias as limits

    stops = params.all_stop_token_ids if params.min_tokens else ()
    words = params.bad_words_token_ids or ()
    for name, found, most in (
        ("allowed_token_ids", params.allowed_token_ids, limits.MAX_NUM_ALLOWED_TOKEN_IDS),
        ("logit_bias", params.logit_bias, limits.MAX_NUM_LOGIT_BIAS_TOKENS),
        ("stop_token_ids with min_tokens", stops, limits.MAX_NUM_STOP_TOKEN_IDS),
        ("tokens of bad_words", [*itertools.chain(*words)], envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    ):
        if len(found or ()) > most:
            return (
                f"{name}: found {len(found)}, expected at most {most} on Model Runner V2. Next "
                "step: send fewer, or serve with VLLM_USE_V2_MODEL_RUNNER=0"
            )
    return ""


def accept_steps_without_drafts(module: ModuleType) -> None:
    """Have V1's sampling constraints of drafts accept a step that verifies none.

    Args:
        module: ``vllm.v1.sample.rejection_sampler``.
    """
    original: Callable[..., torch.Tensor] = module.apply_sampling_constraints

    def apply_sampling_constraints(logits: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        return original(logits, *rest, **named) if logits.shape[0] else logits

    module.apply_sampling_constraints = apply_sampling_constraints  # type: ignore[attr-defined]


def keep_seeds_over_prefill(runner_class: type) -> None:
    """Have steps that do not end a request's prefill leave its generator alone, on a CPU.

    Args:
        runner_class: ``GPUModelRunner`` of V1, the base class of the one for CPUs.
    """
    original: Callable[..., Any] = runner_class.sample_tokens  # type: ignore[attr-defined]

    def sample_tokens(self: Any, *given: Any, **named: Any) -> Any:
        generators, discarded = self.input_batch.generators, self.discard_request_mask.np
        # The tokens that these rows sample are thrown away: any random numbers will do.
        kept = {row: generator for row, generator in generators.items() if discarded[row]}
        for row in kept:
            del generators[row]
        try:
            return original(self, *given, **named)
        finally:
            generators.update(kept)

    runner_class.sample_tokens = sample_tokens  # type: ignore[attr-defined]


def end_min_tokens_within_drafts(sampler_class: type, processor_class: type) -> None:
    """Have V1 count drafted tokens when it masks stop tokens in the token after them.

    Args:
        sampler_class: ``Sampler``, which samples that token.
        processor_class: ``MinTokensLogitsProcessor``.
    """
    original: Callable[..., torch.Tensor] = sampler_class.apply_logits_processors  # type: ignore[attr-defined]
    mask: Callable[..., torch.Tensor] = processor_class.apply  # type: ignore[attr-defined]
    drafted: list[int] = []

    def apply_logits_processors(
        self: Any, logits: torch.Tensor, sampling_metadata: Any, predict_bonus_token: bool
    ) -> torch.Tensor:
        drafts = sampling_metadata.spec_token_ids if predict_bonus_token else None
        drafted[:] = map(len, drafts or ())
        return original(self, logits, sampling_metadata, predict_bonus_token)

    def apply(self: Any, logits: torch.Tensor) -> torch.Tensor:
        if not (any(drafted) and self.min_toks):
            return mask(self, logits)
        before = self.min_toks
        self.min_toks = {
            row: (least - drafted[row], *rest) for row, (least, *rest) in before.items()
        }
        try:
            # As if the token were a draft of its own: one row for each request.
            return self.apply_with_spec_decode(logits, [1] * len(drafted))  # type: ignore[no-any-return]
        finally:
            self.min_toks = before

    sampler_class.apply_logits_processors = apply_logits_processors  # type: ignore[attr-defined]
    processor_class.apply = apply  # type: ignore[attr-defined]


def storages(module: nn.Module) -> set[int]:
    """The addresses of the memory of all parameters that have any."""
    return {p.untyped_storage().data_ptr() for p in module.parameters() if p.numel()}


def shares_embedding(policy: nn.Module, draft: nn.Module) -> bool:
    """Return whether the draft uses the verifier's embedding module."""
    theirs = {id(module) for module in policy.modules()}
    return any(
        name.rpartition(".")[2] == EMBEDDING and id(module) in theirs
        for name, module in draft.named_modules()
    )


def shared_parameters(policy: nn.Module, draft: nn.Module) -> list[str]:
    """Find draft parameters in the verifier's memory, except for the embedding.

    Compares storages, not values, so two equal tensors in different memory pass.

    Returns:
        Names in the draft, sorted; must be empty.
    """
    theirs = storages(policy)
    return sorted(
        name
        for name, parameter in draft.named_parameters(remove_duplicate=False)
        if parameter.numel()
        and parameter.untyped_storage().data_ptr() in theirs
        and EMBEDDING not in name.split(".")
    )


def ties_lm_head(model: nn.Module) -> bool:
    """Return whether a model's lm_head is its embedding matrix, in the same memory.

    Its config.json does not say: from 0.32 on, vLLM serves an lm_head that the checkpoint stores
    and that differs from the embeddings (``ModelConfig.maybe_untie_word_embeddings``).
    """

    def memory(module: str) -> set[int]:
        return {
            parameter.untyped_storage().data_ptr()
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter.numel() and module in name.split(".")
        }

    return bool(memory("lm_head") & memory(EMBEDDING))


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """Repeat one value per request for each of its tokens.

    Args:
        x: [batch], any dtype.
        cu_num_tokens: [batch], integer, cumulative tokens up to and including each request.
        num_tokens: total, the length of the result.
        replace_from: a value of ``x`` to be replaced.
        replace_to: its replacement.

    Returns:
        [num_tokens], the dtype of ``x``.
    """
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    return torch.repeat_interleave(replaced, counts, output_size=num_tokens)


def repair_sampler(module: ModuleType) -> None:
    """Replace ``expand_batch_to_tokens``, on a CPU: ours is right whether vLLM's is or not.

    Args:
        module: ``vllm.v1.sample.rejection_sampler``, whose function ``vllm_versions`` has checked.
    """
    module.expand_batch_to_tokens = expand_batch_to_tokens  # type: ignore[attr-defined]


def let_threads_run(module: ModuleType) -> None:
    """Have the wait for a message sleep once in a while, on a CPU.

    Args:
        module: ``vllm.distributed.device_communicators.shm_broadcast``; one without
            ``sched_yield`` waits in another way and is left alone.
    """
    spin: Callable[[], None] | None = getattr(module, "sched_yield", None)
    if spin is None:
        return
    turns = itertools.count(1)

    def sched_yield() -> None:
        if next(turns) % SPINS:
            spin()
        else:
            time.sleep(PAUSE_SECONDS)

    module.sched_yield = sched_yield  # type: ignore[attr-defined]


def pack_experts_again(method_class: type) -> None:
    """Have experts packed after every load, on a CPU.

    Args:
        method_class: ``UnquantizedFusedMoEMethod``; one without ``_setup_kernel`` loads in another
            way and is left alone.
    """
    original: Callable[..., None] | None = getattr(method_class, "_setup_kernel", None)
    if original is None:
        return

    def setup_kernel(self: Any, *given: Any, **named: Any) -> None:
        self.moe_kernel = None  # as at the first load
        original(self, *given, **named)

    method_class._setup_kernel = setup_kernel  # type: ignore[attr-defined]


def follow_tied_embedding(head_class: type, method_class: type) -> None:
    """Have a tied lm_head multiply with its embedding's present weights, on a CPU.

    Args:
        head_class: ``ParallelLMHead``.
        method_class: ``UnquantizedEmbeddingMethod``.
    """
    tie: Callable[..., Any] = head_class.tie_weights  # type: ignore[attr-defined]
    process: Callable[..., None] = method_class.process_weights_after_loading  # type: ignore[attr-defined]

    def tie_weights(self: Any, embed_tokens: nn.Module) -> Any:
        self._slipstream_tied = True
        return tie(self, embed_tokens)

    def process_weights_after_loading(self: Any, layer: nn.Module) -> None:
        if getattr(layer, "_slipstream_tied", False):
            # Multiplies with the weights that it is given at each call; a packed head ignores them.
            layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]
        else:
            process(self, layer)

    head_class.tie_weights = tie_weights  # type: ignore[attr-defined]
    method_class.process_weights_after_loading = process_weights_after_loading  # type: ignore[attr-defined]


def keep_convolution(method_class: type) -> None:
    """Have a convolution's memory from before it was packed follow every load, on a CPU.

    Args:
        method_class: ``UnquantizedLinearMethod``; layers that it packs without keeping their plain
            weights are left alone.
    """
    process: Callable[..., None] = method_class.process_weights_after_loading  # type: ignore[attr-defined]
    viewed: weakref.WeakKeyDictionary[nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        before = layer.weight.detach()
        process(self, layer)
        plain = getattr(layer, "_cpu_unpacked_conv_weight", None)
        if plain is not None:
            memory = viewed.setdefault(layer, before)
            memory.copy_(plain.view_as(memory))

    method_class.process_weights_after_loading = process_weights_after_loading  # type: ignore[attr-defined]


def norm_context_by_layer(model_class: type) -> None:
    """Have a block draft norm its context's keys, [L, N, kv_heads, D], layer by layer."""
    if not hasattr(model_class, "_normalize_context_k"):
        return  # A vLLM from before it normed those of all layers at once.

    def normalize(self: Any, keys: torch.Tensor) -> torch.Tensor:
        pairs = zip(keys, self._k_norm_weights, strict=True)
        return torch.stack([rms_norm(k, k.shape[-1:], w, self._rms_norm_eps) for k, w in pairs])

    model_class._normalize_context_k = normalize
