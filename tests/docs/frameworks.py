"""Stand-ins for frameworks that cannot be run here: the names and parameters that the recipes of
docs/recipes.md use, and what those meet there (sharded weights, packed rows, log-probs of the
next token, logits that are divided by the temperature in place).

tests/adapters/test_hook_points.py has the parameters of the frameworks themselves;
``test_recipes.py`` compares the stand-ins with them.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from tests.docs import recipes_verl
from tests.docs.recipes_verl import log_probs_of, whole

VLLM_IDLE_SECONDS = 5  # VLLM_HTTP_TIMEOUT_KEEP_ALIVE: then vLLM closes an idle connection


def positions_of(attention_mask: torch.Tensor) -> torch.Tensor:
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


# --- TRL's asynchronous trainer; its fused lm_head is TRL's own.


class AsyncGRPOTrainer:
    def __init__(
        self,
        model: nn.Module,
        temperature: float,
        rollout_worker: object = None,
        weight_transfer: object = None,
        is_main_process: bool = True,
    ) -> None:
        self.model, self.temperature = model, temperature
        self.args = SimpleNamespace(top_p=0.9, top_k=0, min_p=None, repetition_penalty=1.0)
        self.waits: list[int] = []
        self.accelerator = SimpleNamespace(
            is_main_process=is_main_process, wait_for_everyone=lambda: self.waits.append(1)
        )
        self.rollout_worker = rollout_worker
        self.weight_transfer = weight_transfer if is_main_process else None

    def compute_loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs = model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            shift_labels=inputs["shift_labels"],
            fused_lm_head=True,
        )
        return -(outputs.log_probs * (inputs["shift_labels"] != -100)).sum()

    def training_step(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], num_items_in_batch: int
    ) -> torch.Tensor:
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()

    def _sync_weight(self) -> None:
        """``_sync_weight_merged``; what an adapter adds is in the weights while they are sent."""
        transfer: Any = self.weight_transfer
        if transfer is not None:
            transfer.pause()
        self.accelerator.wait_for_everyone()
        weight = next(self.model.parameters()).detach()
        weight.mul_(2)
        if transfer is not None:
            transfer.send_weights((name, t.detach()) for name, t in self.model.named_parameters())
        weight.div_(2)
        self.accelerator.wait_for_everyone()
        if transfer is not None:
            transfer.resume()


# --- SkyRL


@dataclass
class Experience:
    sequences: torch.Tensor
    attention_mask: torch.Tensor
    loss_mask: torch.Tensor


class HFModelWrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        sequences: torch.Tensor,
        num_actions: int,
        attention_mask: torch.Tensor,
        temperature: float = 1.0,
        return_output: bool = False,
    ) -> Any:
        positions = positions_of(attention_mask)
        output = self.model(sequences, attention_mask=attention_mask, position_ids=positions)
        output["logits"].div_(temperature)
        found = log_probs_of(output["logits"], sequences.roll(-1, 1))[:, -num_actions - 1 : -1]
        return (found, output) if return_output else found


class PolicyWorkerBase:
    def __init__(self, model: nn.Module, temperature: float) -> None:
        self.model = HFModelWrapper(model)
        self.cfg = SimpleNamespace(algorithm=SimpleNamespace(temperature=temperature))

    async def init_weight_sync_state(
        self, inference_engine_client: object, inference_engine_cfg: object
    ) -> None:
        raise AssertionError("joins an NCCL group with SkyRL's own servers")

    def forward_backward(
        self,
        data: Sequence[Experience],
        loss_fn: str | None = None,
        loss_fn_config: dict[str, Any] | None = None,
    ) -> list[dict[str, float]]:
        return [
            self._forward_backward_micro(
                experience, 1 / len(data), loss_fn=loss_fn, loss_fn_config=loss_fn_config
            )
            for experience in data
        ]

    def _forward_backward_micro(
        self,
        experience: Experience,
        microbatch_weight: float,
        loss_fn: str | None = None,
        loss_fn_config: dict[str, Any] | None = None,
    ) -> dict[str, float]:
        log_probs, _ = self.model(
            experience.sequences,
            experience.loss_mask.shape[1],
            attention_mask=experience.attention_mask,
            temperature=self.cfg.algorithm.temperature,
            return_output=True,
        )
        loss = -(log_probs * experience.loss_mask).sum() * microbatch_weight
        loss.backward()
        return {"loss": float(loss.detach())}


class FSDPWeightExtractor:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def extract_weights(self, dtype: torch.dtype) -> Iterator[SimpleNamespace]:
        for name, tensor in self.model.state_dict().items():
            yield SimpleNamespace(names=[name], tensors=[whole(tensor).to(dtype)])


class FSDPPolicyWorkerBase(PolicyWorkerBase):
    async def broadcast_to_inference_engines(
        self, inference_engine_client: object, inference_engine_cfg: object, model_id: str = ""
    ) -> None:
        raise AssertionError("the recipe replaces this")


# --- OpenRLHF


class Actor(nn.Module):
    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = nn.Module(), temperature  # DeepSpeed's engine
        self.model.module = model

    def forward(
        self, sequences: torch.Tensor, action_mask: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        positions = positions_of(attention_mask)
        output = self.model.module(sequences, attention_mask=attention_mask, position_ids=positions)
        output["logits"] = output["logits"].to(torch.float32)
        if self.temperature != 1.0:
            output["logits"].div_(self.temperature)
        found = log_probs_of(output["logits"], sequences.roll(-1, 1))[:, :-1]
        return found[:, -action_mask.shape[1] :] * action_mask


class PolicyModelActor:
    def init_model_from_pretrained(
        self,
        strategy: SimpleNamespace,
        pretrain: Callable[[], nn.Module],
        max_steps: int | None = None,
        vllm_engines: list[Any] | None = None,
    ) -> None:
        assert vllm_engines is None, "rank 0 waits until all engines have joined its process group"
        self.strategy = strategy
        self.actor = Actor(pretrain(), strategy.args.rollout.temperature)

    @torch.no_grad()
    def forward(
        self,
        sequences: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found: torch.Tensor = self.actor(sequences, action_mask, attention_mask)
        return found.cpu()

    def broadcast_to_vllm(self) -> None:
        raise AssertionError("the recipe replaces this")


class SingleTurnAgentExecutor:
    def __init__(self, remote_rm_url: str | None = None) -> None:
        self.remote_rm_url = remote_rm_url

    async def execute(
        self, prompt: list[int], sampling_params: Any, llm_engine: Any
    ) -> dict[str, Any]:
        output = (await llm_engine.generate(prompt, sampling_params)).outputs[0]
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        return {
            "observation_tokens": prompt + output.token_ids,
            "rollout_log_probs": [found[token].logprob for token, found in pairs],
            "truncated": output.finish_reason == "length",
            "text": output.text,
        }


class SamplingParams(SimpleNamespace):
    """vLLM's struct, with the fields that matter here."""

    def __init__(self, **given: object) -> None:
        fields: dict[str, object] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 16}
        fields |= {"min_tokens": 0, "skip_special_tokens": True, "stop": [], "stop_token_ids": []}
        fields |= {"seed": None, "logprobs": None, "output_text_buffer_length": 0}
        fields |= {"_all_stop_token_ids": (), "presence_penalty": 0.0}
        super().__init__(**{**fields, **given}, __struct_fields__=tuple(fields))


class RolloutRayActor:
    async def __init__(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("starts vLLM on a GPU")

    async def generate_responses(
        self, prompt: list[int], sampling_params: Any, num_samples: int = 1
    ) -> list[dict[str, Any]]:
        tasks = [self.executor.execute(prompt, sampling_params, self) for _ in range(num_samples)]
        return await asyncio.gather(*tasks)


def create_vllm_engines(num_engines: int, tensor_parallel_size: int, **named: object) -> list[Any]:
    raise AssertionError("starts RolloutRayActor, which Slipstream's trainer does not reach")


# --- prime-rl


class VanillaOutputLinear(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> Any:
        return {"logits": super().forward(hidden)}


def with_prime_head(model: Any) -> Any:
    """``model`` with the lm_head that prime-rl puts in."""
    vocab, width = model.lm_head.weight.shape
    head = VanillaOutputLinear(width, vocab, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    return model


class FileSystemWeightBroadcast:
    def __init__(self, output_dir: Path, config: object, lora_config: object = None) -> None:
        self.output_dir, self.world = output_dir, SimpleNamespace(is_master=True)

    def broadcast_weights(self, model: nn.Module, step: int) -> None:
        raise AssertionError("the recipe replaces this")

    def _notify_orchestrator(self, save_dir: Path) -> None:
        (save_dir / "STABLE").touch()


class DataLoader:
    def __init__(self, micro_batches: list[dict[str, torch.Tensor]]) -> None:
        self._micro_batches = micro_batches

    def get_batch(self) -> list[dict[str, torch.Tensor]]:
        return self._micro_batches


class PrimeLoop(types.ModuleType):
    """``prime_rl.trainer.rl.train``: it looks its names up when it calls them.

    Args:
        model: the policy, ``with_prime_head``.
        micro_batches: of its only step.
        output_dir: for broadcasts.
        after: called after each broadcast, with it and the version.
    """

    DataLoader = DataLoader

    def __init__(
        self,
        model: Any,
        micro_batches: list[dict[str, torch.Tensor]],
        output_dir: Path,
        after: Callable[[FileSystemWeightBroadcast, int], None],
    ) -> None:
        super().__init__("train")
        self.model, self.micro_batches = model, micro_batches
        self.output_dir, self.after = output_dir, after

    @staticmethod
    def forward(
        model: Any,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        labels: torch.Tensor,
        temperature: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = model(
            input_ids, position_ids=position_ids, use_cache=False
        ).logits
        return found

    @staticmethod
    def setup_weight_broadcast(
        output_dir: Path, config: object, parallel_dims: object, lora_config: object = None
    ) -> FileSystemWeightBroadcast:
        raise AssertionError("the recipe replaces this")

    def main(self) -> None:
        self.train(None)

    def train(self, config: object) -> None:
        broadcast = self.setup_weight_broadcast(self.output_dir, config, None, None)
        loader = self.DataLoader(self.micro_batches)
        broadcast.broadcast_weights(self.model, step=0)
        self.after(broadcast, 0)
        for micro_batch in loader.get_batch():
            ids = micro_batch["input_ids"]
            out = self.forward(
                self.model,
                ids,
                micro_batch["position_ids"],
                labels=ids.roll(-1, 1),
                temperature=micro_batch["temperatures"],
            )
            scaled = out["logits"] / micro_batch["temperatures"].unsqueeze(-1)
            found = log_probs_of(scaled, ids.roll(-1, 1))
            shifted = torch.nn.functional.pad(found[:, :-1], (1, 0))
            (-(shifted * micro_batch["loss_mask"]).sum()).backward()
        torch.optim.SGD(self.model.parameters(), lr=0.1).step()
        broadcast.broadcast_weights(self.model, step=1)
        self.after(broadcast, 1)


# --- Megatron: states are [S, B, H], and layers count from 1.


class TransformerLayer(nn.Module):
    def __init__(self, width: int, layer_number: int) -> None:
        super().__init__()
        self.layer_number, self.linear = layer_number, nn.Linear(width, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + 0.1 * torch.tanh(self.linear(hidden_states))


class GPTModel(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(TransformerLayer(width, n + 1) for n in range(layers))
        self.decoder.final_layernorm = nn.RMSNorm(width)
        self.output_layer = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids.T)
        for layer in self.decoder.layers:
            hidden = layer(hidden_states=hidden)
        hidden = self.decoder.final_layernorm(hidden)
        # As with ``use_fused_linear_logprobs``: by lm_head's weight, without calling the module.
        logits = nn.functional.linear(hidden, self.output_layer.weight)
        return logits.transpose(0, 1)


@dataclass
class ProcessedMicrobatch:
    """NeMo RL's: packed, it has no positions; masks are only in ``data_dict``, by sequence."""

    data_dict: dict[str, torch.Tensor]
    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    cu_seqlens_padded: torch.Tensor | None


def processed(
    rows: Sequence[torch.Tensor], prompts: Sequence[int], packed: bool
) -> ProcessedMicrobatch:
    """Of sequences; packed, each is padded to a multiple of four tokens."""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for at, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        ids[at, : len(row)] = row
        mask[at, prompt : len(row)] = 1
    data = {"input_ids": ids, "input_lengths": lengths, "token_mask": mask}
    if not packed:
        return ProcessedMicrobatch(data, ids, torch.arange(width).expand(len(rows), -1), None)
    long = (lengths + 3) // 4 * 4
    parts = [
        nn.functional.pad(row, (0, int(n) - len(row))) for row, n in zip(rows, long, strict=True)
    ]
    ends = nn.functional.pad(long.cumsum(0), (1, 0))
    return ProcessedMicrobatch(data, torch.cat(parts)[None], None, ends)


def modules(loop: types.ModuleType | None = None) -> dict[str, types.ModuleType]:
    """By import name, what a recipe imports of each framework; ``loop`` is prime-rl's script."""
    import ray

    parts: dict[str, dict[str, object]] = {
        "trl.experimental.async_grpo": {"AsyncGRPOTrainer": AsyncGRPOTrainer},
        **recipes_verl.parts(),
        "skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker": {
            "FSDPPolicyWorkerBase": FSDPPolicyWorkerBase,
            "FSDPWeightExtractor": FSDPWeightExtractor,
        },
        "openrlhf.trainer.ray": {"create_vllm_engines": create_vllm_engines},
        "openrlhf.trainer.ray.ppo_actor": {"PolicyModelActor": ray.remote(PolicyModelActor)},
        "openrlhf.trainer.ray.vllm_engine": {"RolloutRayActor": ray.remote(RolloutRayActor)},
        "openrlhf.utils.agent": {"SingleTurnAgentExecutor": SingleTurnAgentExecutor},
        "prime_rl.trainer.rl": {"train": loop},
        "prime_rl.transports.weights.filesystem": {
            "FileSystemWeightBroadcast": FileSystemWeightBroadcast
        },
        "prime_rl.utils.utils": {
            "get_broadcast_dir": lambda output_dir: output_dir / "broadcasts",
            "get_step_path": lambda folder, step: folder / f"step_{step}",
        },
        "prime_rl.utils.weights": {
            "convert_state_dict_to_hf": lambda model, state_dict: state_dict,
            "resolve_fqn": lambda model, key: key,
        },
        "megatron.core.parallel_state": {"is_pipeline_last_stage": lambda: True},
        "megatron.core.utils": {"unwrap_model": lambda model: model},
    }
    made: dict[str, types.ModuleType] = {}
    for name, contents in parts.items():
        folders = name.split(".")
        # TRL is installed: of it only the part that needs a GPU is replaced.
        first = len(folders) if folders[0] == "trl" else 1
        for depth in range(first, len(folders) + 1):
            inner = ".".join(folders[:depth])
            made.setdefault(inner, types.ModuleType(inner)).__path__ = []
        vars(made[name]).update(contents)
    for name, module in made.items():  # as an import leaves them
        folder, _, last = name.rpartition(".")
        if folder in made:
            setattr(made[folder], last, module)
    return made


def limits_of_clients(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Limits]:
    """Of every client that a recipe makes from here on."""
    made: list[httpx.Limits] = []

    class Client(httpx.AsyncClient):
        def __init__(self, limits: httpx.Limits | None = None, **named: Any) -> None:
            assert limits is not None, "at most 100 requests at a time"
            made.append(limits)
            super().__init__(limits=limits, **named)

    monkeypatch.setattr(httpx, "AsyncClient", Client)
    return made


def check_limits(made: Sequence[httpx.Limits]) -> None:
    """One client, which keeps no request back and no connection as long as vLLM."""
    (limits,) = made
    assert limits.max_connections is limits.max_keepalive_connections is None
    assert limits.keepalive_expiry is not None
    assert limits.keepalive_expiry < VLLM_IDLE_SECONDS
