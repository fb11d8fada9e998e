"""Samples put into a store as ingest does, with bytes that follow from their ids."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_trainer.config import ReplayConfig
from draft_trainer.ingest.store import Reservation, SampleStore
from draft_trainer.sample import Sample

WIDTH = 8


def open_store(folder: Path, capacity: int = 1 << 16, **options: Any) -> SampleStore:
    """A store; held out is next to nothing unless it is said."""
    on_evicted = options.pop("on_evicted", lambda reason, samples: None)
    config = {"held_out_fraction": 1e-9, "capacity_bytes": capacity, **options}
    folder.mkdir(exist_ok=True)
    return SampleStore(folder, ReplayConfig(**config), on_evicted=on_evicted)


def put(store: SampleStore, name: str, version: int = 1, tokens: int = 16) -> bool:
    """Reserve, fill, accept; False for a duplicate."""
    reservation, sample = received(store, name, version, tokens)
    return store.accept([(reservation, sample)])[0]


def received(
    store: SampleStore, name: str, version: int = 1, tokens: int = 16
) -> tuple[Reservation, Sample]:
    """A sample in its reservation, not accepted yet."""
    reservation = store.reserve(nbytes(tokens))
    buffer = torch.from_numpy(reservation.block)
    buffer.copy_(content(name, buffer.numel()))
    at = 0

    def take(dtype: torch.dtype, *shape: int) -> Tensor:
        nonlocal at
        start, size = at, torch.Size(shape).numel() * dtype.itemsize
        at = -(-(at + size) // 8) * 8
        return buffer[start : start + size].view(dtype).view(shape)

    integers = [take(torch.int32, tokens) for _ in range(3)]
    logprobs, logits = take(torch.float32, tokens), take(torch.float32, tokens)
    aux, final = take(torch.bfloat16, tokens, 3 * WIDTH), take(torch.bfloat16, tokens, WIDTH)
    mask = take(torch.bool, tokens)
    mask.copy_(torch.arange(tokens) >= 4)
    sample = Sample(name, version, 1.0, *integers, mask, aux, final, logprobs, logits)
    return reservation, sample


def nbytes(tokens: int) -> int:
    """Of a sample."""
    return tokens * (20 + 8 * WIDTH) + tokens + 40


def content(name: str, size: int) -> Tensor:
    """uint8 [size] that follows from the name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def is_intact(sample: Sample) -> bool:
    """Whether the bytes of a sample from the store are those that were put in."""
    expected = content(sample.sample_id, nbytes(sample.num_tokens))
    for tensor in (sample.token_ids, sample.aux, sample.final_hidden, sample.sampled_logits):
        base = sample.token_ids.data_ptr()
        start = tensor.data_ptr() - base
        found = tensor.reshape(-1).view(torch.uint8)
        if not torch.equal(found, expected[start : start + found.numel()]):
            return False
    return True


def all_drawn(store: SampleStore, run_id: str = "run", tokens: int = 10**9) -> list[str]:
    """One draw; the ids, and nothing that views the arena."""
    return [sample.sample_id for sample in store.draw(run_id, tokens).samples]
