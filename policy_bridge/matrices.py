"""Copies the policy's matrices for the trainer when a version is synced.

The policy moves on while its samples wait, so they are copied then and hashed and
sent later, off the policy's thread (``announce``). The copies' memory is used again.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from policy_bridge.announce import EMBED_TOKENS, LM_HEAD, PolicySnapshot
from policy_bridge.modules import PolicyModules
from policy_bridge.pool import ALIGNMENT, HostPool
from policy_bridge.session import Session
from policy_bridge.wrappers import full_tensor, is_sharded
from slipstream.refusal import RefusedError

# Two wait to be announced while the next one is copied.
_SNAPSHOTS = 3


class PolicyMatrices:
    """Takes snapshots of one policy.

    Args:
        modules: the policy.
    """

    def __init__(self, modules: PolicyModules) -> None:
        self._modules = modules
        self._pool: HostPool | None = None

    def snapshot(self, session: Session | None, policy_version: int) -> PolicySnapshot | None:
        """The lm_head rows of the draft vocabulary and the embeddings, on the CPU.

        Of a policy that is spread over ranks these two matrices, and nothing else, are
        gathered if any rank has a session. So there this is a collective call, made by
        all ranks alike whether or not they reach the trainer.

        Args:
            session: says which rows; None: this rank wants none.
            policy_version: whose weights these are.

        Returns:
            None without a session.

        Raises:
            RefusedError: the policy was sharded after the bridge was built.
        """
        modules = self._modules
        head, embed = modules.head_weight, modules.embed_weight
        if modules.shards:
            if not self._wanted_by_any(session is not None):
                return None
            tied = embed is head
            head = full_tensor(head)
            embed = head if tied else full_tensor(embed)
        elif is_sharded(head) or is_sharded(embed):
            raise RefusedError(
                "model",
                "sharded after the bridge was built",
                "sharded before it",
                "call fully_shard, then build the PolicyBridge",
            )
        if session is None:
            return None
        head, embed = head.detach(), embed.detach()
        ids = session.draft_vocab_ids.to(head.device)
        rows = self._memory(head, len(ids), embed.nbytes)
        copied = self._memory(embed, len(embed), embed.nbytes)
        if head.device.type == "cpu":
            torch.index_select(head, 0, ids, out=rows)
        else:
            rows.copy_(head.index_select(0, ids))
        copied.copy_(embed)
        return PolicySnapshot(policy_version, {LM_HEAD: rows, EMBED_TOKENS: copied})

    def _wanted_by_any(self, wanted: bool) -> bool:
        sharded = next(shard for shard in self._modules.shards if is_sharded(shard))
        mesh = sharded.device_mesh  # type: ignore[attr-defined]
        flag = torch.tensor([int(wanted)], device=mesh.device_type)
        for dimension in range(mesh.ndim):
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
        return bool(flag.item())

    def _memory(self, like: torch.Tensor, rows: int, embed_bytes: int) -> torch.Tensor:
        """CPU memory of ``like``'s dtype and width; used again where the pool has room."""
        shape = (rows, like.shape[1])
        nbytes = rows * like.shape[1] * like.element_size()
        if self._pool is None:
            self._pool = HostPool(_SNAPSHOTS * (nbytes + embed_bytes + 2 * ALIGNMENT))
        loan = self._pool.take(nbytes)
        if loan is None:
            return torch.empty(shape, dtype=like.dtype)
        return loan.view(like.dtype).reshape(shape)
