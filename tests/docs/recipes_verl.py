"""The stand-in for verl 0.9.1 (its v1 trainer): names, parameters and order of calls."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


def log_probs_of(logits: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, next_ids.unsqueeze(-1)).squeeze(-1)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Dispatch:
    ONE_TO_ALL = "one to all"


def register(dispatch_mode: object = None, blocking: bool = True) -> Callable[[Any], Any]:
    return lambda method: method


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> str:
    return mesh_name


class TensorDict(dict[str, Any]):
    """A batch: ``micro_batches``, and data that are no tensors, as ``no_lora_adapter``."""


def get(tensordict: TensorDict, key: str, default: object = None) -> Any:
    return tensordict.get(key, default)


class FSDPEngine:
    def __init__(self, module: nn.Module, temperature: float) -> None:
        self.module, self.temperature = module, temperature

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        return ((name, whole(t)) for name, t in self.module.state_dict().items()), None


class FSDPEngineWithLMHead(FSDPEngine):
    def forward_step(
        self, micro_batch: dict[str, torch.Tensor], loss_function: object, forward_only: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        ids, positions = micro_batch["input_ids"], micro_batch["position_ids"].values()
        if positions.dim() == 2:  # of a policy with images: a row for each section
            positions = positions[0]
        output = self.module(
            input_ids=ids.values()[None],
            attention_mask=None,
            position_ids=positions[None],
            use_cache=False,
        )
        logits = output.logits.squeeze(0) / self.temperature
        found = log_probs_of(logits, ids.values().roll(-1))
        nested = torch.nested.nested_tensor_from_jagged(found, ids.offsets())
        return torch.tensor(1.0), {"model_output": {"log_probs": nested}, "metrics": {}}


class TrainingWorker:
    def __init__(self, engine: FSDPEngineWithLMHead) -> None:
        self.engine = engine

    @torch.no_grad()
    def infer_batch(self, data: TensorDict) -> torch.Tensor:
        data.pop("no_lora_adapter", False)  # the pass itself needs no adapter here
        outputs = [
            self.engine.forward_step(one, loss_function=None, forward_only=True)[1]
            for one in data["micro_batches"]
        ]
        return torch.cat([one["model_output"]["log_probs"].values() for one in outputs])


class CheckpointEngine:
    """Brings weights to verl's own replicas, which wait for them meanwhile."""

    def __init__(self) -> None:
        self.sent: list[int | None] = []

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        assert dict(weights)
        self.sent.append(global_steps)


class ActorRolloutRefWorker:
    def __init__(self, config: SimpleNamespace, role: str) -> None:
        self.config, self.role = config, role
        self.actor: Any = None

    def init_model(self) -> None:
        if "actor" in self.role:
            engine = FSDPEngineWithLMHead(self.config.model(), self.config.rollout.temperature)
            self.actor = TrainingWorker(engine)
            self.checkpoint_engine = CheckpointEngine()

    def compute_log_prob(self, data: TensorDict) -> Any:
        return self.actor.infer_batch(data)

    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> None:
        found = mode if mode != "auto" else self.config.rollout.checkpoint_engine.backend
        assert found != "naive", "wakes the replicas on the trainer's own devices"
        weights, _ = self.actor.engine.get_per_tensor_param()
        await self.checkpoint_engine.send_weights(weights, global_steps=global_steps)


class LLMServerClient:
    def __init__(self, config: SimpleNamespace, load_balancer_handle: object = None) -> None:
        self.config = config

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
    ) -> TokenOutput:
        raise AssertionError("asks a Ray actor, which never has the weights")


@dataclass
class TokenOutput:
    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class PPOTrainerSync:
    """Its last act of ``init`` is the first sync: nobody can call a worker before."""

    trainer_base: Any
    trainer_mode = "sync"

    def __init__(self, config: SimpleNamespace) -> None:
        self.config, self.global_steps = config, 0

    def init(self) -> None:
        worker_class = self.trainer_base.ActorRolloutRefWorker
        self.worker = worker_class(self.config.actor_rollout_ref, role="actor_rollout_ref")
        self.worker.init_model()
        asyncio.run(self.worker.update_weights(global_steps=self.global_steps, mode="naive"))

    def get_llm_client(self) -> LLMServerClient:
        return LLMServerClient(self.config)

    def tag(self, output: TokenOutput) -> tuple[int, int]:
        """What ``trainer_base`` reads of every row's tags for its metrics."""
        found = output.extra_fields
        return int(found["min_global_steps"]), int(found["max_global_steps"])


def parts() -> dict[str, dict[str, object]]:
    """By import name, what the recipe imports; a new trainer, because the recipe changes it."""
    trainer_base = types.ModuleType("trainer_base")
    vars(trainer_base)["ActorRolloutRefWorker"] = ActorRolloutRefWorker
    trainer = type("PPOTrainerSync", (PPOTrainerSync,), {"trainer_base": trainer_base})
    return {
        "verl.single_controller.base.decorator": {
            "Dispatch": Dispatch,
            "register": register,
            "make_nd_compute_dataproto_dispatch_fn": make_nd_compute_dataproto_dispatch_fn,
        },
        "verl.trainer.ppo.v1": {"PPOTrainerSync": trainer, "trainer_base": trainer_base},
        "verl.utils": {"tensordict_utils": SimpleNamespace(get=get)},
        "verl.workers.engine_workers": {"ActorRolloutRefWorker": ActorRolloutRefWorker},
        "verl.workers.rollout.llm_server": {"LLMServerClient": LLMServerClient},
        "verl.workers.rollout.replica": {"TokenOutput": TokenOutput},
    }
