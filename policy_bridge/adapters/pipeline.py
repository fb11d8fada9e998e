"""Pipeline-parallel policies: every stage captures its own layers, the last one ships.

On each rank of a pipeline:

    stage = PipelineCapture({first + i: layer for i, layer in enumerate(layers)}, (2, 5, 7), group)
    with stage:
        run_the_log_prob_pass_of_all_micro_batches()
    batches = stage.gather()  # collective; the states on the last rank, else []

The bridge is built on the last rank, where lm_head is, on a ``StagedPolicy``, because no process
holds the whole policy:

    policy = StagedPolicy(last_stage, num_layers, lm_head, embed_tokens)
    bridge = PolicyBridge(policy, BridgeConfig(..., modules=StagedPolicy.PATHS))
    with bridge.capture(temperature=1.0) as capture:
        for batch, aux, final in gathered:
            policy(aux, final)  # to the bridge, a forward pass
            capture.ship(batch.input_ids, loss_mask=batch.mask)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from policy_bridge.config import ModulePaths
from policy_bridge.model import Matrix
from slipstream.errors import RefusedError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Aux = dict[int, torch.Tensor]


class PipelineCapture:
    """Keeps the inputs of this stage's captured layers, one per micro-batch and layer.

    The residual stream after L layers is the input of layer L, so the stage that holds
    layer L captures it; for its first layer that is what the stage before sent. Only
    passes without gradients count: recomputation inside backward looks like a pass too.

    Args:
        layers: this stage's decoder layers by global number, counted from 0.
        aux_layers: "after L layers" numbers that the draft takes.
        group: the pipeline's ranks, in stage order. Best one of its own
            (``dist.new_group``), so that nothing meets the schedule's messages.

    Raises:
        RefusedError: no stage holds one of the layers. Constructing is collective.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        aux_layers: Sequence[int],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group, self._aux_layers = group, tuple(aux_layers)
        self._held = {layer: layers[layer] for layer in self._aux_layers if layer in layers}
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, list(self._held), group=group)
        self._owners = {layer: rank for rank, held in enumerate(everyone) for layer in held}
        absent = sorted(set(self._aux_layers) - self._owners.keys())
        if absent:
            raise RefusedError(
                "aux_layers", absent, "layers that a stage holds", "see the stages' layer numbers"
            )
        self._rank, self._last = dist.get_rank(group), len(everyone) - 1
        self._kept: dict[int, list[torch.Tensor]] = {layer: [] for layer in self._held}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> PipelineCapture:
        for kept in self._kept.values():
            kept.clear()
        for layer, module in self._held.items():
            hook = _keep_input(self._kept[layer])
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def gather(self) -> list[Aux]:
        """Every micro-batch's states on the last rank, by layer, in the order of the passes.

        Collective: every rank of the group calls it after the pass. States keep the
        layout that the layers see; on other ranks the list is empty.

        Raises:
            RefusedError: stages that saw different numbers of micro-batches.
        """
        counts: list[Any] = [None] * (self._last + 1)
        mine = {layer: len(kept) for layer, kept in self._kept.items()}
        dist.all_gather_object(counts, mine, group=self._group)
        passes = {count for held in counts for count in held.values()}
        if len(passes) != 1:
            raise RefusedError(
                "micro_batches", counts, "as many on every stage", "run the whole pass inside with"
            )
        batches: list[Aux] = [{} for _ in range(passes.pop())]
        for layer in self._aux_layers:
            for index, batch in enumerate(batches):
                if self._owners[layer] == self._last == self._rank:
                    batch[layer] = self._kept[layer][index]
                elif self._owners[layer] == self._rank:
                    self._send(self._kept[layer][index])
                elif self._rank == self._last:
                    batch[layer] = self._receive(self._owners[layer])
            if layer in self._kept:
                self._kept[layer].clear()
        return batches if self._rank == self._last else []

    def _send(self, state: torch.Tensor) -> None:
        header = torch.tensor([*state.shape, _DTYPES.index(state.dtype)], device=state.device)
        dist.send(header, group=self._group, group_dst=self._last)
        dist.send(state.contiguous(), group=self._group, group_dst=self._last)

    def _receive(self, source: int) -> torch.Tensor:
        # Of every device: "cpu:gloo,cuda:nccl" where a group has both.
        on_gpu = "nccl" in dist.get_backend_config(self._group)
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        header = torch.empty(4, dtype=torch.int64, device=device)
        dist.recv(header, group=self._group, group_src=source)
        *shape, dtype = header.tolist()
        state = torch.empty(shape, dtype=_DTYPES[dtype], device=device)
        dist.recv(state, group=self._group, group_src=source)
        return state


def _keep_input(kept: list[torch.Tensor]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            kept.append((args[0] if args else kwargs["hidden_states"]).detach())

    return hook


class StagedPolicy(nn.Module):
    """A policy without layers of its own: states that others captured are replayed through it.

    Args:
        stage: the part of the policy that is here. Sync after each step: Megatron's optimizers step
            on copies of its parameters, so that the bridge does not see a step.
        num_layers: decoder layers of the whole policy.
        lm_head: the whole output matrix [V, H], gathered if it is sharded; assign
            ``lm_head.weight`` anew before a sync where it is a copy.
        embed_tokens: the whole embeddings [V, H], which may come from the first stage.
        lm_head_bias: [V], of an lm_head that has one.
    """

    PATHS = ModulePaths("layers", "lm_head", "embed_tokens", "norm")

    def __init__(
        self,
        stage: nn.Module,
        num_layers: int,
        lm_head: torch.Tensor,
        embed_tokens: torch.Tensor,
        lm_head_bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.stage, self.config = stage, getattr(stage, "config", None)
        self.layers = nn.ModuleList(nn.Identity() for _ in range(num_layers))
        self.norm = nn.Identity()
        self.lm_head, self.embed_tokens = Matrix(lm_head, lm_head_bias), Matrix(embed_tokens)

    def forward(self, aux: Mapping[int, torch.Tensor], final: torch.Tensor) -> None:
        """Replay: ``aux`` by "after L layers" and ``final``, the input of lm_head, [B, S, H]."""
        for layer in sorted(aux):
            self.layers[layer](aux[layer])
        self.norm(final)
