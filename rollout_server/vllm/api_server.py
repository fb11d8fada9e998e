"""Additions to vLLM's API server: the control plane, and a stat logger that feeds it."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from rollout_server.control.acceptance_counts import AcceptanceGuard, AcceptanceTracker
from rollout_server.control.changes import Description
from rollout_server.control.control import DRAFT, POLICY, Committed, RolloutControl, Weights
from rollout_server.control.draft_folder import (
    Expected,
    check_finite,
    is_lm_head,
    quantization,
    read_config,
    read_manifest,
)
from rollout_server.control.draft_length import LengthChooser, LengthControl, calibrate
from rollout_server.control.metrics import CommitCounts, Observed, RolloutCollector
from rollout_server.control.policy_spans import PolicyVersions
from rollout_server.control.service import ControlServer, RolloutService, expected_of, refuse_shared
from rollout_server.control.shared import SharedRegistry
from rollout_server.control.stages import StageStore, WeightSource, make_directory
from rollout_server.control.step_costs import CostWatch, StepCosts
from rollout_server.vllm.engine import VllmEngine
from rollout_server.vllm.patches import EMBEDDING
from rollout_server.vllm.plugins import API, Settings, is_active
from rollout_server.vllm.served import SERVED, Served
from rollout_server.vllm.versions import DRAFT_LENGTHS_V2, Sources, installed_source
from slipstream.checkpoints import (
    NOT_LOADED,
    VOCABULARY_MAPS,
    Layout,
    TensorLayout,
    load_tensors,
    read_layout,
)
from slipstream.client import join_address
from slipstream.errors import RefusedError
from slipstream.tensors import spec_of
from slipstream.v1 import rollout_server_pb2 as pb

logger = logging.getLogger(__name__)


class ControlPlaneEndpoint:
    """vLLM's ``EndpointPlugin``: a gRPC server beside vLLM's HTTP routes."""

    name = "slipstream"
    required_tasks: Any = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Add a header of completions; the control plane has its own port."""
        app.add_middleware(PolicyVersions, spans=API.tracker.spans)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Start the control plane. An exception here ends the server."""
        if API.settings is None:
            raise RuntimeError("the launcher did not leave its settings in this process")
        await _start(API.settings, VllmEngine(engine_client), state, args)


async def _start(settings: Settings, engine: VllmEngine, state: Any, args: Any) -> None:
    from vllm.version import __version__ as vllm_version

    store = StageStore(make_directory(settings.stage_bytes), settings.stage_bytes)
    API.closers.append(store.close)
    commits, costs = CommitCounts(), StepCosts()
    runner = (await engine.describe()).runner
    logger.info("vLLM %s, Model Runner %s", vllm_version, runner)
    check_speculation(settings, engine)
    chooser = None
    config = engine.client.vllm_config
    refuse_short_draft(runner, config)
    most = config.scheduler_config.max_num_seqs
    if settings.speculation == "auto":
        refuse_fixed_lengths(runner, Sources(installed_source), vllm_version)
        chooser = LengthChooser(settings.draft_length, most)
        await calibrate(engine, _load(engine.client), chooser)
    elif getattr(config.speculative_config, "num_speculative_tokens_per_batch_size", None):
        # The launcher's schedule only names the lengths that graphs are captured for.
        await engine.set_draft_lengths([settings.draft_length] * (most + 1))
    control, service = await control_plane(
        engine,
        store,
        settings,
        read_layout(settings.model_dir),
        API.tracker,
        commits.committed,
    )
    API.closers += [service.workers.close, service.shared.close]

    def http_started() -> bool:
        return bool(getattr(getattr(state, "server", None), "started", False))

    def announce() -> None:
        # Not by sys.stdout: vLLM prefixes every line of it with the process name.
        line = (
            f"rollout-server ready: openai=http://{join_address(args.host, args.port)} "
            f"control={join_address(settings.control_host, server.port)}\n"
        )
        # A pipe that nobody reads any more, or a log on a full disk, is no reason to end.
        with suppress(OSError):
            os.write(1, line.encode())

    guard = AcceptanceGuard(API.tracker, settings.guard_drafts)
    server = ControlServer(service, control, guard, http_started, announce, settings.access)
    REGISTRY.register(
        RolloutCollector(
            Observed(
                *(API.tracker, control, store, commits, costs, settings.access.refusals),
                *(settings.draft_length, chooser),
            ),
            vllm_version,
        )
    )
    await server.start(settings.control_host, settings.control_port)
    API.control_server = server
    if settings.speculation == "off":
        await control.set_speculation(False)
    probe = control.without_speculation if settings.time_plain_steps else None
    measured = None
    if chooser is not None:
        measured = LengthControl(chooser, API.tracker, control.set_draft_lengths).update
        # By what the gate expects of the draft: the first requests do not pay for a bad one.
        await measured({})
    API.cost_watch = CostWatch(
        *(engine.step_sums, API.tracker, costs, probe, measured, engine.cores)
    )
    API.cost_watch.start()


def check_speculation(settings: Settings, engine: VllmEngine) -> None:
    """Refuse options that turn drafting off where that is not possible. Raises RefusedError."""
    off = settings.speculation == "off"
    if engine.always_drafts and (off or settings.time_plain_steps):
        option, found = ("--speculation", "off") if off else ("--time-plain-steps", "given")
        expected = "drafts in every step, with experts on data-parallel ranks"
        next_step = "leave it out, or serve without --data-parallel-size"
        raise RefusedError(option, found, expected, next_step)


def refuse_fixed_lengths(runner: str, sources: Sources, vllm_version: str) -> None:
    """Refuse to choose draft lengths on a runner that always drafts the longest.

    Raises RefusedError: Model Runner V2 of this vLLM does not know what the scheduler plans.
    """
    if runner == "V2" and sources.lacks(DRAFT_LENGTHS_V2):
        raise RefusedError(
            "--speculation",
            f"auto, on Model Runner V2 of vLLM {vllm_version}",
            "a vLLM whose Model Runner V2 drafts as many tokens as are planned (0.32 or newer)",
            "use --speculation fixed, or set VLLM_USE_V2_MODEL_RUNNER=0",
        )


def refuse_short_draft(runner: str, config: Any) -> None:
    """Refuse a draft whose sequences are shorter than the policy's.

    On Model Runner V1 one sequence beyond the draft's length ends the drafts of its whole batch,
    and vLLM counts them as rejected (``_input_fits_in_drafter``,
    https://github.com/vllm-project/vllm/pull/34757 and
    https://github.com/vllm-project/vllm/pull/54054): a good draft would seem to have none accepted.
    On V2 vLLM makes the rotary table of most drafts as long as the policy's. Of the others 0.32
    reads beyond their tables, and 0.33 shortens the policy, which ends rollouts early.

    Args:
        runner: "V1" or "V2".
        config: vLLM's.

    Raises:
        RefusedError: naming both lengths.
    """
    speculative, policy = config.speculative_config, config.model_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return
    lengthened = getattr(speculative, "draft_shares_target_positions", None)  # from 0.33 on
    if runner == "V2" and (lengthened() if lengthened else speculative.method == "eagle3"):
        return
    asked = policy.original_max_model_len
    fits_memory = asked == -1
    expected = policy.max_model_len if fits_memory else policy.get_and_verify_max_len(asked)
    if draft.max_model_len >= expected:
        return
    found, next_step = draft.max_model_len, "leave max_model_len out of --draft-config"
    if speculative.max_model_len is None:
        other = f"raise max_position_embeddings in the draft's config.json to {expected}"
        next_step = f"serve with --max-model-len {found}, or {other}"
    text = f"at least {expected}, the policy's, on Model Runner {runner}"
    raise RefusedError("max_model_len of the draft", found, text, next_step)


def _load(client: Any) -> Callable[[int, int, int], Awaitable[None]]:
    """Return a function that runs N requests in vLLM's engine for so many steps, each of which
    gives a request at most so many tokens."""
    from vllm import SamplingParams

    async def run(requests: int, steps: int, tokens: int) -> None:
        # The first token comes with the prompt.
        sampling = SamplingParams(max_tokens=1 + steps * tokens, ignore_eos=True)

        async def one() -> None:
            prompt = {"prompt_token_ids": [1 + number for number in range(8)]}
            name = f"slipstream-calibration-{uuid.uuid4()}"
            # vLLM aborts a request whose generator is closed.
            async with aclosing(client.generate(prompt, sampling, name)) as answers:
                seen = 0
                async for _ in answers:
                    seen += 1
                    if seen > steps:
                        break

        await asyncio.gather(*(one() for _ in range(requests)))

    return run


async def control_plane(
    engine: VllmEngine,
    store: StageStore,
    settings: Settings,
    policy_layout: Layout,
    tracker: AcceptanceTracker,
    committed: Committed,
) -> tuple[RolloutControl, RolloutService]:
    """Make state and gRPC service over a running engine, with the first draft in the store.

    Raises RefusedError: draft and verifier share memory, or a checkpoint cannot be used.
    """
    served = SERVED[settings.draft_kind]
    description = await engine.describe()
    refuse_shared(description, served)
    draft = Weights(DRAFT, 0, WeightSource())
    if settings.draft_dir is not None:
        policys = _of_the_policy(description, served, read_layout(settings.draft_dir))
        draft = _stage_first_draft(settings.draft_dir, store, DRAFT in description.tied, policys)
    tracker.start(draft.version or 0, draft.expected)
    policy = Weights(POLICY, None, WeightSource(directory=str(settings.model_dir)))
    constants = pb.ServerState(
        num_speculative_tokens=settings.draft_length,
        draft_sample_method=settings.draft_sample_method,
        draft_kind=served.name,
    )
    control = RolloutControl(engine, store, tracker, committed, draft, policy, constants)
    config = read_config(settings.model_dir, "MODEL")
    expected = {
        DRAFT: _expected_draft(draft, description, served),
        POLICY: replace(
            _expected_policy(policy_layout, description, served, config),
            quantized=quantization(config, policy_layout),
        ),
    }
    shared = SharedRegistry(settings.shared_registry)
    return control, RolloutService(control, expected, served, shared)


def _stage_first_draft(
    draft_dir: Path, store: StageStore, tied: bool, policys: Collection[str]
) -> Weights:
    """The draft the server was started with, as if it had been staged: going back to it later needs
    neither the network nor its directory.

    Args:
        draft_dir: its checkpoint.
        store: that gets its tensors.
        tied: whether its lm_head is its embeddings in the workers' memory: a stage comes without.
        policys: ``_of_the_policy``: to load them again would write into the policy.

    Raises:
        RefusedError: it does not fit into the store, or has values that are not finite.
    """
    manifest = read_manifest(draft_dir)
    tensors = {n: t for n, t in load_tensors(draft_dir).items() if n not in policys}
    _tied(tensors, tied)
    version, against = 0, None
    expected: tuple[float, ...] = ()
    if manifest is not None:
        version = manifest.draft_version
        expected = expected_of(manifest.gate.candidate_acceptance_per_position)
        if manifest.HasField("trained_against_policy_version"):
            against = manifest.trained_against_policy_version
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    folder = store.new_folder()
    weights = Weights.of(DRAFT, version, specs, folder, trained_against=against, expected=expected)
    contents = {staged.key: tensors[staged.name] for staged in weights.source.tensors}
    with store.receiving(folder, contents):
        for staged in weights.source.tensors:
            check_finite(staged.name, tensors[staged.name])
        for key, tensor in contents.items():
            store.write(folder, key, tensor)
    return weights


def _expected_policy(
    layout: Layout, description: Description, served: Served, config: Mapping[str, Any]
) -> Expected:
    """Expect all of the checkpoint but what a training loop lacks: its MTP head, old buffers.

    These are optional: the policy's model in vLLM does not load them.
    """
    head = {name: tensor for name, tensor in layout.items() if SERVED["mtp"].has(name, config)}
    policy = {name: tensor for name, tensor in layout.items() if name not in head}
    optional = {name: policy.pop(name) for name in [*policy] if name.endswith(NOT_LOADED)}
    forbidden: dict[str, str] = {}
    if served.name == "mtp":
        forbidden = dict.fromkeys(head, "stage it as a draft: it is one here")
    else:
        optional |= head
    tied = _tied(policy, POLICY in description.tied)
    return Expected(
        POLICY, policy, description.served_dtype, optional, forbidden=forbidden, tied=tied
    )


def _of_the_policy(
    description: Description, served: Served, names: Collection[str]
) -> dict[str, str]:
    """The names of a draft's tensors that are the policy's own in the workers' memory, and the
    module of each; ``names`` are those of the draft's tensors."""
    # A draft with a vocabulary of its own has its own lm_head, too.
    own = "lm_head" if VOCABULARY_MAPS[0] in names else ""
    return {
        f"{module}.weight": module
        for module in served.follows_policy
        if module != own and (module != EMBEDDING or description.shares_embedding)
    }


def _expected_draft(draft: Weights, description: Description, served: Served) -> Expected:
    tensors = draft.source.tensors
    layout = {tensor.name: TensorLayout(tensor.key.dtype, tensor.shape) for tensor in tensors}
    forbidden = {}
    for name, module in _of_the_policy(description, served, layout).items():
        layout.pop(name, None)
        forbidden[name] = (
            f"stage the draft without it: it is the policy's own {module} here and follows policy "
            "pushes"
        )
    # Only d2t is loaded; t2d is its inverse, for trainers.
    optional = {name: layout.pop(name) for name in ("t2d",) if name in layout}
    fixed = {t.name: bytes.fromhex(t.key.sha256) for t in tensors if t.name in VOCABULARY_MAPS}
    tied = _tied(layout, DRAFT in description.tied)
    return Expected(DRAFT, layout, description.served_dtype, optional, fixed, forbidden, tied)


def _tied(tensors: dict[str, Any], one_matrix: bool) -> str:
    """Return the name of the embeddings if lm_head is that matrix, and drop lm_head's own name.

    Args:
        tensors: of a checkpoint, which may have the matrix under one name or both.
        one_matrix: whether it is one in the workers' memory.

    Returns:
        Empty where lm_head is a matrix of its own.
    """
    heads = [name for name in tensors if is_lm_head(name)]
    embeddings = [name for name in tensors if name.split(".")[-2:] == [EMBEDDING, "weight"]]
    if len(embeddings) != 1 or (heads and not one_matrix):
        return ""
    for name in heads:
        del tensors[name]
    return embeddings[0]


def __getattr__(name: str) -> Any:
    """``AcceptanceStatLogger``, the ``vllm.stat_logger_plugins`` entry point.

    Made when vLLM asks for it, because its base class is vLLM's: the control plane also runs over
    engines in memory, without vLLM. Inert where ``rollout-server`` did not start the process.
    """
    if name != "AcceptanceStatLogger":
        raise AttributeError(name)
    from vllm.v1.metrics.loggers import StatLoggerBase

    class AcceptanceStatLogger(StatLoggerBase):  # type: ignore[misc]
        """Hands each engine step's speculative counts to the tracker."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._tracker = API.tracker if is_active() else None
            self._engine = engine_index

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, *rest: Any, **named: Any
        ) -> None:
            """Record one engine step. Called in the API server's event loop."""
            if self._tracker is None or scheduler_stats is None:
                return
            stats = scheduler_stats.spec_decoding_stats
            if stats is not None:
                self._tracker.record(
                    stats.num_drafts,
                    stats.num_draft_tokens,
                    stats.num_accepted_tokens,
                    stats.num_accepted_tokens_per_pos,
                    self._engine,
                    # Not every vLLM has this name.
                    getattr(stats, "num_draft_tokens_per_pos", None),
                )
            if iteration_stats is not None:
                self._tracker.generated(iteration_stats.num_generation_tokens)

        def log_engine_initialized(self) -> None:
            """Log nothing; vLLM requires the method."""

    globals()[name] = AcceptanceStatLogger
    return AcceptanceStatLogger
