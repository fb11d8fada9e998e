"""The ranks of data-parallel training, and what they exchange.

torch.distributed underneath: gloo between processors, NCCL between GPUs. Started by torchrun, or by
anything else that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (Ray does). Only
tensors travel: the collectives for objects pickle.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor

from slipstream.errors import RefusedError

# Its functions have the group that exists when it is first imported as a default argument. An
# optimizer's first step imports it by way of dynamo; then the group outlives ``leave``, and a
# thread of gloo that drops its last tensor while the interpreter ends aborts the process.


class RankLostError(RuntimeError):
    """Another rank died, or was silent for longer than the deadline. Training cannot continue."""


def check_gpu(number: int = 0) -> None:
    """Raise RefusedError unless torch sees GPU ``number`` of this machine."""
    count = torch.cuda.device_count()
    if not count:
        raise RefusedError(
            "training.device",
            '"cuda", and torch sees no GPU',
            'a GPU, or training.device = "cpu"',
            'set training.device = "cpu"; or see what nvidia-smi says, and whether torch is built '
            "with CUDA (deploy/requirements/cuda.lock)",
        )
    if number >= count:
        raise RefusedError(
            "training.device",
            f'"cuda" for {number + 1} ranks on this machine',
            f"a GPU for each; torch sees {count}",
            f"start at most {count} ranks here (torchrun --nproc-per-node {count})",
        )


class Ranks:
    """This process among ``size``. Alone, every method is the identity.

    Args:
        rank: of this process.
        size: how many there are; with more than one, torch.distributed is initialised.
        device: of this rank's draft; the CPU if None.
        timeout_s: deadline of every exchange, as the process group was initialised with.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device or torch.device("cpu")
        self.timeout_s = timeout_s

    @classmethod
    def join(cls, timeout_s: float, device_type: str = "cpu") -> Ranks:
        """The ranks that this process was started as one of; alone where WORLD_SIZE is not set.

        Args:
            timeout_s: deadline of joining, and of every exchange after it. A rank that dies is
                mostly noticed at once; one that hangs, after this long.
            device_type: "cpu" or "cuda"; on the latter, GPU number LOCAL_RANK.

        Raises:
            RefusedError: a variable is missing or not a number, or there is no such GPU.
            RankLostError: the others did not come in time.
        """
        size = _variable("WORLD_SIZE") if "WORLD_SIZE" in os.environ else 1
        device = torch.device("cpu")
        if device_type == "cuda":
            local = _variable("LOCAL_RANK") if size > 1 else 0
            check_gpu(local)
            device = torch.device("cuda", local)
        if size == 1:
            return cls(device=device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        rank = _variable("RANK")
        if not dist.is_initialized():
            # Small exchanges stay with gloo: they must not wait for what the GPU has queued.
            backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
            with _deadline(rank, "the start"):
                dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        return cls(rank, size, device, timeout_s)

    def leave(self) -> None:
        """After the last exchange; nothing where the group is gone."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def gather(self, row: Tensor) -> Tensor:
        """Every rank's [N] on the CPU as [size, N]."""
        if self.size == 1:
            return row[None]
        rows = [torch.empty_like(row) for _ in range(self.size)]
        with _deadline(self.rank, "gather"):
            dist.all_gather(rows, row)
        return torch.stack(rows)

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace every ``grad`` by its sum over the ranks, in one exchange of one flat buffer.

        All ranks end with the same bits: each part of the buffer is added up on one of them.

        Args:
            parameters: in the same order on every rank, each with a gradient.
        """
        if self.size == 1:
            return
        flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        with _deadline(self.rank, "sum of gradients"):
            dist.all_reduce(flat)
        parts = flat.split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts, strict=True):
            p.grad = part.view_as(p)

    def sum(self, row: Tensor) -> Tensor:
        """The sum over the ranks of a tensor on the CPU."""
        if self.size > 1:
            with _deadline(self.rank, "sum"):
                dist.all_reduce(row)
        return row

    def broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite tensors with rank 0's. The same names, shapes and types on every rank."""
        if self.size == 1:
            return
        for name in sorted(tensors):
            with _deadline(self.rank, "broadcast"):
                dist.broadcast(tensors[name], src=0)

    def send(self, message: bytes, to: int) -> None:
        """A message to another rank, which calls ``receive``."""
        with _deadline(self.rank, "send"):
            dist.send(torch.tensor([len(message)]), to)
            dist.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), to)

    def receive(self, sender: int) -> bytes:
        """What another rank sent."""
        size = torch.empty(1, dtype=torch.int64)
        with _deadline(self.rank, "receive"):
            dist.recv(size, sender)
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(data, sender)
        return data.numpy().tobytes()


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Split what ``sizes`` are the sizes of into ``ranks`` parts of about equal sums.

    Largest first, each to the rank with least so far; a function of its arguments alone, so that
    ranks which see the same data need not be told.

    Returns:
        ascending indices for every rank; empty ones where there are fewer items than ranks.
    """
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = loads.index(min(loads))
        parts[least].append(index)
        loads[least] += sizes[index]
    return [sorted(part) for part in parts]


@contextmanager
def _deadline(rank: int, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # torch.distributed raises plain RuntimeErrors for gloo's timeouts and closed connections.
        reason = str(error).partition("\n")[0]
        # Nothing is under way: every exchange is waited for. NCCL would wait for the lost rank.
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()
        raise RankLostError(f"rank {rank} lost another rank at a {what}: {reason}") from error


def _variable(name: str) -> int:
    text = os.environ.get(name)
    if text is None or not text.isdecimal():
        raise RefusedError(name, text, "a number in the environment", "start it with torchrun")
    return int(text)
