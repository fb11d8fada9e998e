"""vLLM's entry points into Slipstream. Inert unless ``rollout-server`` started the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout_server.runtime import is_active

if TYPE_CHECKING:
    from rollout_server.app import ControlPlaneEndpoint


def register_general() -> None:
    """``vllm.general_plugins``: runs in every vLLM process, engine and workers included.

    Safe to call more than once.

    Raises:
        RefusedError: this vLLM lacks something that losslessness depends on.
    """
    if not is_active():
        return
    import vllm.v1.sample.rejection_sampler as rejection_sampler
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu.spec_decode.eagle import utils as eagle_v2
    from vllm.v1.worker.gpu_worker import Worker

    from rollout_server import engine_core as engine_core_methods
    from rollout_server import vllm_patches as aliasing
    from rollout_server import vllm_patches as cpu_sampler
    from rollout_server import worker as worker_methods
    from rollout_server.vllm_patches import installed_release

    worker_methods.install(Worker)
    engine_core_methods.install(EngineCore)
    aliasing.keep_own_lm_head(SpecDecodeBaseProposer)
    aliasing.keep_own_lm_head_v2(eagle_v2)
    cpu_sampler.install(rejection_sampler, installed_release(), current_platform.is_cpu())


class InertEndpoint:
    """Satisfies vLLM's ``EndpointPlugin`` and does nothing."""

    name = "slipstream"
    required_tasks: Any = ("generate",)

    def attach_router(self, app: Any) -> None:
        """No routes."""

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """No state."""


def make_endpoint_plugin() -> ControlPlaneEndpoint | InertEndpoint:
    """``vllm.endpoint_plugins``: runs in the API server."""
    if not is_active():
        return InertEndpoint()
    from rollout_server.app import ControlPlaneEndpoint

    return ControlPlaneEndpoint()
