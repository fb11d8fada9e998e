"""Runs vLLM's Model Runner V2 with asynchronous scheduling on a CPU, as GPUs run it.

vLLM's CPU build has that runner (``vllm/v1/worker/cpu/model_runner.py``) and lacks Triton alone.
Triton's interpreter (``TRITON_INTERPRET=1``) executes the runner's kernels on CPU tensors. This
folder on ``PYTHONPATH`` adds a platform plug-in to vLLM
(https://docs.vllm.ai/en/latest/design/plugin_system.html); ``tests/rollout_server/live.py`` names
the folders and variables.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class AsynchronousCpu(CpuPlatform):
    """vLLM's CPU platform, which turns asynchronous scheduling off, with it on."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """vLLM's own check, then asynchronous scheduling."""
        from vllm.v1.sample.ops import topk_topp_sampler

        super().check_and_update_config(vllm_config)
        # The interpreter cannot run Triton's top-k and top-p.
        topk_topp_sampler.HAS_TRITON = False
        vllm_config.scheduler_config.async_scheduling = True


def activate() -> str:
    """The plug-in: vLLM calls it before it looks for Triton's back ends, of which "cpu" is one."""
    import triton.language as tl
    from triton.backends import backends
    from triton.language.extra import libdevice

    # The interpreter has none of a GPU's mathematical library; the runner calls this alone of it.
    libdevice.log1p = lambda x: tl.log(1.0 + x)
    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
    return f"{__name__}.{AsynchronousCpu.__name__}"
