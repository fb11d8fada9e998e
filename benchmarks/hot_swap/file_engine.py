"""The peer's half inside vLLM's worker: a weight-transfer back end that reads a checkpoint.

vLLM's own back ends need NCCL or CUDA IPC. This one does what they do once the bytes have
arrived: layer-wise reload begun, weights loaded, reload finished, in vLLM's three calls. It
reads a local file, so that nothing but the swap itself is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from benchmarks.hot_swap import PEER_BACKEND


@dataclass
class InitInfo:
    """Nothing to agree on."""


@dataclass
class UpdateInfo:
    """The place of the weights: a safetensors file of this host."""

    path: str


class FileEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """See the module."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do."""

    @torch.no_grad()
    def start_weight_update(self) -> None:
        """Parameters go to the meta device until ``finish_weight_update``."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Update as the base class does, without waiting for an accelerator that is not there."""
        self.receive_weights(self.parse_update_info(update_info))

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the file into the model."""
        self.model.load_weights(load_file(update_info.path).items())  # type: ignore[operator]

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """The new weights are live after this."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to give back."""


class WorkerExtension:
    """Named on the command line so that vLLM imports this module in its worker."""


if PEER_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(PEER_BACKEND, FileEngine)
