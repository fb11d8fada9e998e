"""Builds the control plane when vLLM's API server has an engine."""

from __future__ import annotations

import os
from typing import Any

from prometheus_client import REGISTRY
from safetensors.torch import load_file
from vllm.v1.metrics.loggers import StatLoggerBase

from rollout_server.checkpoint import (
    VOCABULARY_MAPS,
    Expected,
    read_layout,
    read_manifest,
    weight_files,
)
from rollout_server.content_store import ContentStore, make_directory
from rollout_server.control import (
    DRAFT,
    POLICY,
    AcceptanceGuard,
    RolloutControl,
    StateMessage,
    Weights,
)
from rollout_server.engine import Description, VllmEngine
from rollout_server.metrics import CommitCounts, Observed, RolloutCollector, negotiate
from rollout_server.reload import WeightSource
from rollout_server.runtime import API, Settings, is_active
from rollout_server.service import (
    ControlServer,
    RolloutService,
    ingest,
    layout_of,
    refuse_shared,
    weights_of,
)
from rollout_server.step_costs import CostWatch, StepCosts
from rollout_server.vllm_patches import EMBEDDING
from slipstream.tensors import spec_of
from slipstream.v1 import tensor_pb2


class ControlPlaneEndpoint:
    """vLLM's ``EndpointPlugin``: a gRPC server beside vLLM's HTTP routes."""

    name = "slipstream"
    required_tasks: Any = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Only ``/metrics``: the control plane has its own port."""
        negotiate(app, REGISTRY)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Start the control plane. An exception here ends the server."""
        if API.settings is None:
            raise RuntimeError("the launcher did not leave its settings in this process")
        API.control_server = await _build(API.settings, engine_client, state, args)


async def _build(settings: Settings, engine_client: Any, state: Any, args: Any) -> ControlServer:
    from vllm.version import __version__ as vllm_version

    engine = VllmEngine(engine_client)
    description = await engine.start()
    refuse_shared(description.shared)
    store = ContentStore(make_directory(settings.stage_bytes), settings.stage_bytes)
    API.closers.append(store.close)
    draft, specs = _ingest_draft(settings, store)
    API.tracker.start(draft.version or 0)
    commits, costs = CommitCounts(), StepCosts()
    control = RolloutControl(
        engine,
        store,
        API.tracker,
        commits,
        draft,
        Weights(POLICY, None, WeightSource(directory=str(settings.model_dir))),
    )
    message = StateMessage(
        control,
        settings.draft_length,
        settings.draft_sample_method,
        str(args.model),
        int(args.port),
    )
    service = RolloutService(
        control,
        engine,
        store,
        API.tracker,
        {
            DRAFT: _expected_draft(specs, description),
            POLICY: Expected(
                POLICY, read_layout(settings.model_dir, "model"), description.served_dtype
            ),
        },
        message,
    )

    def http_started() -> bool:
        return bool(getattr(getattr(state, "server", None), "started", False))

    def announce() -> None:
        # Past sys.stdout: vLLM prefixes every line of it with the process name.
        line = (
            f"rollout-server ready: openai=http://{args.host}:{args.port} "
            f"control={settings.control_host}:{server.port}\n"
        )
        os.write(1, line.encode())

    server = ControlServer(
        service,
        control,
        engine,
        AcceptanceGuard(API.tracker, settings.guard_drafts),
        http_started,
        announce,
        settings.access,
    )
    REGISTRY.register(
        RolloutCollector(
            Observed(
                *(API.tracker, control, store, commits, costs, server.refused_calls),
                settings.access.refusals,
                settings.draft_length,
            ),
            vllm_version,
        )
    )
    await server.start(settings.control_host, settings.control_port)
    probe = control.without_speculation if settings.time_plain_steps else None
    API.cost_watch = CostWatch(engine, API.tracker, costs, probe)
    API.cost_watch.start()
    return server


def _ingest_draft(
    settings: Settings, store: ContentStore
) -> tuple[Weights, list[tensor_pb2.TensorSpec]]:
    """The draft the server was started with, as if it had been staged: going back to
    it later needs neither the network nor its directory."""
    manifest = read_manifest(settings.draft_dir)
    tensors = {
        name: tensor
        for path in weight_files(settings.draft_dir)
        for name, tensor in load_file(path).items()
    }
    specs = [spec_of(name, tensor) for name, tensor in sorted(tensors.items())]
    ingest(tensors, specs, store)
    weights = weights_of(
        DRAFT,
        0 if manifest is None else manifest.draft_version,
        specs,
        store,
        trained_against=manifest.trained_against_policy_version
        if manifest is not None and manifest.HasField("trained_against_policy_version")
        else None,
    )
    return weights, specs


def _expected_draft(specs: list[tensor_pb2.TensorSpec], description: Description) -> Expected:
    layout = {spec.name: layout_of(spec) for spec in specs}
    embedding = f"{EMBEDDING}.weight"
    forbidden = {}
    if description.shares_embedding:
        layout.pop(embedding, None)
        forbidden[embedding] = (
            "stage the draft without it: it is the policy's own embedding here and "
            "follows policy pushes"
        )
    # Only d2t is loaded; t2d is its inverse, for trainers.
    optional = {name: layout.pop(name) for name in ("t2d",) if name in layout}
    return Expected(
        DRAFT,
        layout,
        description.served_dtype,
        optional,
        {spec.name: spec.sha256 for spec in specs if spec.name in VOCABULARY_MAPS},
        forbidden,
    )


class AcceptanceStatLogger(StatLoggerBase):  # type: ignore[misc]
    """Loaded by every vLLM of the environment; does nothing where Slipstream did not start it.

    Args:
        vllm_config: not looked at.
        engine_index: not looked at; the launcher refuses more than one engine.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._tracker = API.tracker if is_active() else None

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """One engine step. Called in the API server's event loop."""
        if self._tracker is None or scheduler_stats is None:
            return
        stats = scheduler_stats.spec_decoding_stats
        if stats is not None:
            self._tracker.record(
                stats.num_drafts,
                stats.num_draft_tokens,
                stats.num_accepted_tokens,
                stats.num_accepted_tokens_per_pos,
            )
        if iteration_stats is not None:
            self._tracker.generated(iteration_stats.num_generation_tokens)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
