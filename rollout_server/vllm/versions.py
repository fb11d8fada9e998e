"""vLLM versions: imports that differ between them, and the names that the plug-ins need.

The launcher checks all of it before anything is loaded: it refuses a version outside ``KNOWN``, and
a name that the plug-ins patch and that is missing, which would be an AttributeError in a worker
half a minute later. Names are looked up in vLLM's source (``ast``), so that nothing is imported for
it, attributes that only instances have are seen, and the same check runs over wheels of other
versions (``docs/make_vllm_versions.py``, which keeps the table in docs/operations.md).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.errors import RefusedError


class Tested(NamedTuple):
    """A vLLM that served and swapped drafts in the tests, on a CPU.

    Attributes:
        version: without the patch level.
        runner: "V1" or "V2", its model runner; V2 by Triton's interpreter.
        scheduling: "synchronous" or "asynchronous".
    """

    version: str
    runner: str
    scheduling: str


TESTED = (
    Tested("0.29", "V1", "synchronous"),
    Tested("0.29", "V2", "asynchronous"),
    Tested("0.30", "V2", "asynchronous"),
    Tested("0.31", "V1", "synchronous"),
    Tested("0.31", "V2", "asynchronous"),
    Tested("0.32", "V1", "synchronous"),
    Tested("0.32", "V2", "asynchronous"),
    # It has no CPU build: tested with the kernels of 0.32's.
    Tested("0.33", "V1", "synchronous"),
)
_TESTED_VERSIONS = tuple(dict.fromkeys(tested.version for tested in TESTED))

KNOWN = ("0.29", "0.30", "0.31", "0.32", "0.33")
"""The versions whose source has every name below with these parameters."""

OPTION = "--untested-vllm"

_CLI = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
PLACES = {
    "make_arg_parser": _CLI,
    "validate_parsed_serve_args": _CLI,
    "cli_env_setup": (
        "vllm.entrypoints.common.startup",
        "vllm.entrypoints.serve.utils.api_utils",
    ),
}
"""Functions that moved, and where they are, newest first."""

ReadSource = Callable[[str], str | None]
"""The source of a module ("vllm.config.vllm"); None where there is no such module."""


@dataclass(frozen=True)
class Hook:
    """A name of vLLM's that is patched or called.

    Attributes:
        module: where it is imported from.
        name: a function, a class, or an attribute of one ("Worker.sleep"), inherited ones and
            those of instances included.
        parameters: of a function, in order; None where they do not matter. Further ones must be
            optional, unless the last is "...".
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None


def _hooks(module: str, owner: str, *names: str) -> tuple[Hook, ...]:
    return tuple(Hook(module, f"{owner}.{name}") for name in names)


_WORKER = "vllm.v1.worker.gpu_worker"
_CORE = "vllm.v1.engine.core"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
_MIN_TOKENS = "vllm.v1.sample.logits_processor.builtin"
_RELOAD = "vllm.model_executor.model_loader.reload"

HOOKS: tuple[Hook, ...] = (
    Hook("vllm.entrypoints.launchers.api_server.entry", "setup_server", ("args", "reuse_port")),
    Hook(
        "vllm.entrypoints.launchers.api_server.entry",
        "run_server_worker",
        ("listen_address", "sock", "args"),
    ),
    Hook("vllm.utils.argparse_utils", "FlexibleArgumentParser"),
    Hook("vllm.utils.system_utils", "decorate_logs"),
    Hook("vllm.utils.system_utils", "kill_process_tree", ("pid",)),
    Hook("vllm.v1.engine.exceptions", "EngineDeadError"),
    Hook(
        "vllm.v1.engine.core_client",
        "AsyncMPClient._call_utility_async",
        ("self", "method", "engine"),
    ),
    Hook("vllm.v1.engine.core_client", "MPClient.core_engines"),
    Hook("vllm.v1.engine.async_llm", "AsyncLLM.pause_generation"),
    Hook("vllm.v1.engine.async_llm", "AsyncLLM.resume_generation", ("self",)),
    Hook("vllm.v1.engine.async_llm", "AsyncLLM.is_paused", ("self",)),
    Hook("vllm.v1.metrics.loggers", "StatLoggerBase.record"),
    *_hooks(
        "vllm.v1.spec_decode.metrics",
        "SpecDecodingStats",
        *("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"),
    ),
    # The engine core: engine_core.py.
    *_hooks(
        _CORE,
        "EngineCore",
        *("scheduler", "batch_queue", "request_block_hasher", "check_for_draft_tokens"),
        "async_scheduling",
    ),
    Hook(_CORE, "EngineCore.collective_rpc", ("self", "method", "timeout", "args")),
    Hook(_SCHEDULER, "Scheduler.make_spec_decoding_stats"),
    Hook(_SCHEDULER, "Scheduler.schedule"),
    Hook(_SCHEDULER, "Scheduler.add_request", ("self", "request")),
    Hook(_SCHEDULER, "Scheduler.update_from_output", ("self", "scheduler_output", "...")),
    *_hooks(
        _SCHEDULER,
        "Scheduler",
        *("dynamic_sd_lookup", "num_spec_tokens", "max_num_running_reqs", "running"),
        *("has_requests", "requests", "kv_cache_config", "block_size", "connector"),
        "encoder_cache_manager",
    ),
    Hook(
        "vllm.v1.core.encoder_cache_manager",
        "EncoderCacheManager.can_allocate",
        ("self", "request", "input_id", "encoder_compute_budget", "num_embeds_to_schedule"),
    ),
    *_hooks(
        "vllm.v1.core.encoder_cache_manager", "EncoderCacheManager", "num_freeable_slots", "freed"
    ),
    Hook(_SCHEDULER, "Scheduler.set_pause_state", ("self", "pause_state")),
    *_hooks(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        *("num_spec_tokens_to_schedule", "scheduled_spec_decode_tokens", "num_scheduled_tokens"),
        *("total_num_scheduled_tokens", "scheduled_new_reqs"),
    ),
    *_hooks("vllm.v1.request", "Request", "cache_salt", "spec_token_ids", "block_hashes"),
    *_hooks("vllm.v1.request", "Request", "request_id", "num_output_tokens"),
    *_hooks("vllm.v1.request", "Request", "num_computed_tokens", "skip_reading_prefix_cache"),
    Hook("vllm.v1.request", "Request.update_block_hashes", ("self",)),
    Hook("vllm.v1.core.sched.interface", "PauseState.PAUSED_ALL"),
    # Names of requests: policy_spans.py.
    Hook("vllm.v1.engine.parallel_sampling", "ParentRequest.get_child_info", ("self", "index")),
    Hook("vllm.v1.engine.input_processor", "InputProcessor.assign_request_id", ("request",)),
    Hook("vllm.config.model", "ModelConfig.is_moe"),
    # Lengths: app.py.
    Hook("vllm.config.model", "ModelConfig.original_max_model_len"),
    Hook("vllm.config.model", "ModelConfig.get_and_verify_max_len", ("self", "max_model_len")),
    # Workers: worker.py.
    *_hooks(_WORKER, "Worker", "get_model", "get_draft_model", "model_runner", "requested_memory"),
    Hook(_WORKER, "Worker.determine_available_memory", ("self",)),
    Hook(_WORKER, "Worker.start_weight_update", ("self",)),
    Hook(_WORKER, "Worker.update_weights", ("self", "update_info")),
    Hook(_WORKER, "Worker.finish_weight_update", ("self",)),
    *_hooks("vllm.config.parallel", "ParallelConfig", "data_parallel_index", "world_size"),
    *_hooks(_WORKER, "Worker", "weight_transfer_engine", "_weight_update_active", "rank"),
    *_hooks(
        "vllm.distributed.weight_transfer.base",
        "WeightTransferEngine",
        *("parse_update_info", "reset_weight_update_target"),
    ),
    Hook(_WORKER, "Worker.sleep", ("self", "level")),
    Hook(_WORKER, "Worker.wake_up", ("self", "tags")),
    Hook(_RUNNER_V1, "GPUModelRunner.execute_model", ("self", "scheduler_output")),
    Hook(
        _RUNNER_V1,
        "GPUModelRunner.propose_draft_token_ids",
        ("self", "scheduler_output", "sampled_token_ids", "..."),
    ),
    *_hooks(
        _RUNNER_V1,
        "GPUModelRunner",
        *("drafter", "use_async_scheduling", "speculative_config", "discard_request_mask"),
        *("_draft_probs", "_draft_prob_req_ids", "valid_sampled_token_count_event"),
        *("_copy_valid_sampled_token_count", "reset_lora_state", "encoder_cache"),
    ),
    Hook(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer.prepare_next_token_ids_padded",
        ("self", "sampled_token_ids", "requests", "gpu_input_batch", "discard_request_mask"),
    ),
    *_hooks(_RUNNER_V2, "GPUModelRunner", "speculator", "get_draft_model", "reset_lora_state"),
    Hook(_RUNNER_V2, "GPUModelRunner.encoder_cache"),
    Hook("vllm.v1.worker.gpu.mm.encoder_cache", "EncoderCache.encoder_outputs"),
    Hook(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator.propose",
        ("self", "input_batch", "..."),
    ),
    *_hooks(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator",
        *("num_speculative_steps", "model"),
    ),
    # Loading: swap.py, reload.py.
    Hook(f"{_RELOAD}.layerwise", "initialize_layerwise_reload", ("model",)),
    Hook(f"{_RELOAD}.layerwise", "finalize_layerwise_reload"),
    Hook(f"{_RELOAD}.layerwise", "finalize_layerwise_processing", ("model", "model_config")),
    Hook(f"{_RELOAD}.layerwise", "get_layerwise_info", ("layer",)),
    Hook(f"{_RELOAD}.layerwise", "_place_kernel_tensors", ("layer", "info")),
    Hook(f"{_RELOAD}.layerwise", "LOADING_LAYERS"),
    Hook(f"{_RELOAD}.meta", "to_meta_tensor", ("tensor",)),
    Hook(f"{_RELOAD}.sanitize", "layer_ref_sentinel"),
    *_hooks(
        f"{_RELOAD}.types",
        "LayerReloadingInfo",
        *("restore_metadata", "restore_device", "kernel_tensors", "can_load", "reset"),
        "loaded_weights",
    ),
    Hook(
        "vllm.model_executor.layers.quantization.base_config",
        "QuantizeMethodBase.process_weights_after_loading",
        ("self", "layer"),
    ),
    # The guards: vllm_patches.py.
    Hook(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer._maybe_share_lm_head",
        ("self", "target_language_model"),
    ),
    Hook(
        "vllm.v1.worker.gpu.spec_decode.eagle.utils",
        "_should_share",
        ("eagle", "flag", "draft", "target"),
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "expand_batch_to_tokens",
        ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    ),
    Hook("vllm.v1.sample.rejection_sampler", "apply_sampling_constraints"),
    Hook(
        "vllm.v1.sample.sampler",
        "Sampler.apply_logits_processors",
        ("self", "logits", "sampling_metadata", "predict_bonus_token"),
    ),
    Hook("vllm.v1.sample.metadata", "SamplingMetadata.spec_token_ids"),
    *_hooks(_MIN_TOKENS, "MinTokensLogitsProcessor", "min_toks", "apply"),
    Hook(
        _MIN_TOKENS,
        "MinTokensLogitsProcessor.apply_with_spec_decode",
        ("self", "logits", "num_draft_tokens"),
    ),
    *_hooks(_RUNNER_V1, "GPUModelRunner", "sample_tokens", "input_batch"),
    Hook("vllm.v1.worker.gpu_input_batch", "InputBatch.generators"),
    Hook("vllm.v1.engine.input_processor", "InputProcessor.process_inputs"),
    Hook("vllm.config.vllm", "VllmConfig.use_v2_model_runner"),
    *(
        Hook("vllm.v1.worker.gpu.sample.logit_bias", f"MAX_NUM_{name}")
        for name in ("ALLOWED_TOKEN_IDS", "LOGIT_BIAS_TOKENS", "STOP_TOKEN_IDS")
    ),
    *_hooks("vllm.sampling_params", "SamplingParams", "logprob_token_ids", "all_stop_token_ids"),
    Hook(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "ParallelLMHead.tie_weights",
        ("self", "embed_tokens"),
    ),
    Hook(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "UnquantizedEmbeddingMethod.process_weights_after_loading",
        ("self", "layer"),
    ),
    Hook(
        "vllm.model_executor.layers.linear",
        "UnquantizedLinearMethod.process_weights_after_loading",
        ("self", "layer"),
    ),
)

DRAFT_LENGTHS_V2 = Hook(_RUNNER_V2, "ExecuteModelState.num_spec_tokens_to_schedule")
"""The field by which Model Runner V2 knows how many tokens the scheduler plans; without it, all are
always verified.

Its speculator for draft models (``StandaloneARSpeculator``) always drafts the most, and the runner
drops those that are not planned: a shorter length saves verification alone."""

logger = logging.getLogger(__name__)


def check_version(version: str, untested: bool) -> None:
    """Refuse a vLLM outside ``KNOWN``, warn about one outside ``TESTED``.

    Raises RefusedError: unless ``untested``.
    """
    release = ".".join(version.split(".")[:2])
    if release not in KNOWN:
        if not untested:
            raise RefusedError(
                "vLLM",
                version,
                f"{KNOWN[0]} to {KNOWN[-1]} (tested: {', '.join(_TESTED_VERSIONS)})",
                f"install one of these, or try this one with {OPTION}",
            )
        logger.warning("vLLM %s is outside the range %s to %s", version, KNOWN[0], KNOWN[-1])
    elif release not in _TESTED_VERSIONS:
        tested = ", ".join(_TESTED_VERSIONS)
        logger.warning(
            "vLLM %s has every name that is needed, but is not tested; tested: %s", version, tested
        )


def older(version: str, release: str) -> bool:
    """Return whether a version comes before a release ("0.32"); False if it is not a number."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and [*map(int, found.groups())] < [*map(int, release.split("."))]


def check_hooks(version: str, read: ReadSource | None = None) -> None:
    """Refuse a vLLM that lacks a name which the plug-ins need.

    Raises RefusedError: naming each of them.
    """
    lacking = missing(Sources(read or installed_source))
    if lacking:
        raise RefusedError(
            f"vLLM {version}",
            "; ".join(lacking),
            "every name that Slipstream patches or calls",
            f"use a vLLM release that Slipstream was tested with ({', '.join(_TESTED_VERSIONS)})",
        )


def load(name: str) -> Any:
    """Import a function of ``PLACES`` from where this vLLM has it.

    Raises RefusedError: it is at none of them.
    """
    for module in PLACES[name]:
        if installed_source(module) is not None:
            return getattr(importlib.import_module(module), name)
    expected = f"in {' or '.join(PLACES[name])}"
    raise RefusedError(
        f"vLLM's {name}", "absent", expected, f"use vLLM {', '.join(_TESTED_VERSIONS)}"
    )


def configure_logging(args: Any) -> None:
    """Configure logging as vLLM's own server does; before 0.31 it had no options for that."""
    configure = getattr(importlib.import_module("vllm.logger"), "configure_logging_from_args", None)
    if configure is not None:
        configure(args)


def installed_source(module: str) -> str | None:
    """Read a module's source in this environment's vLLM, without importing it."""
    package = importlib.util.find_spec("vllm")
    for root in (package and package.submodule_search_locations) or ():
        path = Path(root).joinpath(*module.split(".")[1:])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.read_text(encoding="utf-8")
    return None


class Sources:
    """A look-up of names in the source of one vLLM."""

    def __init__(self, read: ReadSource) -> None:
        self._read = read
        self.module = lru_cache(maxsize=None)(self._parse)

    def _parse(self, name: str) -> ast.Module | None:
        text = self._read(name)
        return None if text is None else ast.parse(text)

    def find(self, module: str, name: str) -> ast.AST | None:
        """Find the binding of ``name``, through imports and base classes; None if there is none."""
        tree = self.module(module)
        if tree is None:
            return None
        owner, _, attribute = name.partition(".")
        found, defined_in = self._module_binding(tree, module, owner)
        if found is None or not attribute:
            return found
        return self._attribute(found, defined_in, attribute)

    def lacks(self, hook: Hook) -> str:
        """Return why a hook cannot be used; empty if it can."""
        found = self.find(hook.module, hook.name)
        where = f"{hook.module}.{hook.name}"
        if found is None:
            return f"{where} is absent"
        if hook.parameters is None:
            return ""
        if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            return f"{where} is not a function"
        others = hook.parameters[-1:] == ("...",)
        expected, have = hook.parameters[: -1 if others else None], found.args
        names = [a.arg for a in (*have.posonlyargs, *have.args, *have.kwonlyargs)]
        required = [a.arg for a in have.args[: len(have.args) - len(have.defaults)]]
        required += [
            a.arg for a, d in zip(have.kwonlyargs, have.kw_defaults, strict=True) if d is None
        ]
        fits = others or not set(required) - set(expected)
        if tuple(names[: len(expected)]) != expected or not fits:
            return f"{where} takes {tuple(names)}, not {expected}"
        return ""

    def _module_binding(
        self, tree: ast.Module, module: str, name: str
    ) -> tuple[ast.AST | None, str]:
        """The binding of a module's name, and the module that defines it."""
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    parent = ".".join(module.split(".")[: -node.level]) + "." if node.level else ""
                    origin = f"{parent}{node.module}"
                    source = self.module(origin)
                    found = (
                        self._module_binding(source, origin, alias.name) if source else (None, "")
                    )
                    if found[0] is not None:
                        return found
        for node in _statements(tree.body):
            if name in _bound_names(node):
                return node, module
        return None, module

    def _attribute(self, owner: ast.AST, module: str, name: str) -> ast.AST | None:
        if not isinstance(owner, ast.ClassDef):
            return None
        for node in _statements(owner.body):
            if name in _bound_names(node):
                return node
        for inner in ast.walk(owner):
            # Attributes that methods set: self.name = ..., self.name: type = ...
            if isinstance(inner, ast.Attribute) and inner.attr == name:
                of_self = isinstance(inner.value, ast.Name) and inner.value.id == "self"
                if of_self and isinstance(inner.ctx, ast.Store):
                    return inner
        for base in owner.bases:
            named = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(named, ast.Name):
                tree = self.module(module)
                found, defined_in = (
                    self._module_binding(tree, module, named.id) if tree else (None, "")
                )
                inherited = found and self._attribute(found, defined_in, name)
                if inherited:
                    return inherited
        return None


def missing(sources: Sources) -> list[str]:
    """List what the plug-ins need and this source lacks."""
    lacking = [sources.lacks(hook) for hook in HOOKS]
    for name, places in PLACES.items():
        if all(sources.find(place, name) is None for place in places):
            lacking.append(f"{name} is in none of {', '.join(places)}")
    return [text for text in lacking if text]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, those under if, try and with included."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, inner, []))


def _bound_names(node: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}
