"""Samples put into a store as ingest does, with bytes that follow from their ids."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_trainer.config import ReplayConfig
from draft_trainer.ingest.database import key_of
from draft_trainer.ingest.store import SampleStore
from slipstream.sample import Sample, header_of, layout_of
from slipstream.tensors import checksum_of

WIDTH = 8


def open_store(folder: Path, capacity: int = 1 << 16, **options: Any) -> SampleStore:
    """A store; held out is next to nothing unless it is said."""
    on_evicted = options.pop("on_evicted", lambda reason, samples: None)
    config: dict[str, Any] = {"held_out_fraction": 1e-9, "capacity_bytes": capacity, **options}
    seed = config.pop("seed", 0)
    folder.mkdir(exist_ok=True)
    return SampleStore(folder, ReplayConfig(**config), seed, on_evicted)


def put(store: SampleStore, name: str, version: int = 1, tokens: int = 16) -> bool:
    """Reserve, fill, accept; False for a duplicate."""
    assert store.run is not None
    return store.accept(store.run[0], [received(store, name, version, tokens)])[0]


def received(
    store: SampleStore, name: str, version: int = 1, tokens: int = 16, prompt: int | None = None
) -> Sample:
    """A sample in the store's memory, not accepted yet; its prompt's first token may be chosen."""
    layout = layout_of(tokens, 3, WIDTH, torch.bfloat16)
    block = torch.from_numpy(store.reserve(layout.nbytes))
    sample = Sample(header_of(name, version, 1.0, (2, 4, 5), layout), block)
    sample.block.copy_(content(name, layout.nbytes))
    sample.loss_mask.copy_(torch.arange(tokens) >= 4)
    if prompt is not None:
        sample.token_ids[:4] = prompt
    return sealed(sample)


def sealed(sample: Sample) -> Sample:
    """The same, with the checksum of its block in its header."""
    packed = sample.header.packed
    packed.checksum = checksum_of(sample.block.numpy())
    return sample


def nbytes(tokens: int) -> int:
    """Return the bytes of a sample."""
    return layout_of(tokens, 3, WIDTH, torch.bfloat16).nbytes


def content(name: str, size: int) -> Tensor:
    """uint8 [size] that follows from the name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def is_intact(sample: Sample) -> bool:
    """Return whether the bytes of a sample from the store are those that were put in."""
    expected = content(sample.sample_id, sample.nbytes)
    mask = sample.layout.mask_at
    found = sample.block[: sample.nbytes].clone()
    found[mask : mask + sample.tokens] = expected[mask : mask + sample.tokens]
    return torch.equal(found, expected)


def all_drawn(store: SampleStore, run_id: str = "run", tokens: int = 10**9) -> list[str]:
    """One draw; the ids, and nothing that views the arena."""
    return [sample.sample_id for sample in store.draw(run_id, tokens).samples]


def times_drawn(store: SampleStore, names: Iterable[str], run_id: str = "run") -> dict[str, int]:
    """Count how often each of these samples was drawn; those that were evicted are left out."""
    query = "SELECT times_drawn FROM samples WHERE key = ? AND start IS NOT NULL"
    found = {name: store._db.execute(query, key_of(run_id, name)).fetchone() for name in names}
    return {name: row[0] for name, row in found.items() if row is not None}


def rows_of(store: SampleStore) -> dict[str, int]:
    """Rows of every table that grows."""
    tables = ("samples", "draws")
    return {table: store._db.one(f"SELECT count(*) FROM {table}") for table in tables}
