"""A full disk: whatever the trainer writes is refused whole, and written once there is space."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.ingest.run import Run
from draft_trainer.ingest.store import ARENA
from draft_trainer.releases.pointer import PointerStore
from draft_trainer.releases.registry import Registry
from draft_trainer.state import State
from draft_trainer.training.training_state import StateStore
from slipstream.errors import RefusedError
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1.release_pb2 import REFUSAL_REASON_DISK
from tests.draft_trainer.registry_rig import create
from tests.draft_trainer.samples import open_store, put

REPLAY = "replay.directory"


@contextmanager
def full_disk(most: int = 0) -> Iterator[None]:
    """Let the kernel refuse this process to write beyond ``most`` bytes of any file."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


class Component(NamedTuple):
    """Something that the trainer keeps on disk.

    Attributes:
        write: changes it.
        read: what it says.
        field: which a refusal names; empty where the caller gets the OSError and says it.
    """

    write: Callable[[], object]
    read: Callable[[], object]
    field: str = REPLAY


def sample_bytes(folder: Path) -> Component:
    open_store(folder, 1 << 16).close()
    arena = folder / ARENA
    return Component(lambda: open_store(folder, 1 << 20).close(), lambda: arena.stat().st_size)


def sample_index(folder: Path) -> Component:
    store = open_store(folder)
    store.begin("run", {})
    put(store, "before")

    def read() -> tuple[bool, int]:
        return store.seen("run", "sample"), store.counts().resident

    return Component(lambda: put(store, "sample"), read)


def policy_matrices(folder: Path) -> Component:
    store = open_store(folder)
    store.begin("run", {})
    policy = pb.PolicySpec(hidden_size=4, vocab_size=9, num_hidden_layers=6)
    run = Run("run", policy, store, max_policy_lag=4)
    head = PolicyHead(1, torch.randn(6, 4), torch.randn(9, 4))
    return Component(lambda: run.add_policy(head), lambda: (run.heads.versions, store.policies()))


def release_pointers(folder: Path) -> Component:
    state = State(folder)
    pointer = PointerStore(state, lambda version: None)

    return Component(lambda: pointer.begin_commit(1), lambda: pointer.now, "draft.registry")


def test_full_disk_drops_event_and_raises_nothing(tmp_path: Path) -> None:
    """A roll back goes on without its event."""
    state = State(tmp_path)
    with full_disk():
        state.events.note("rolled_back", draft_version=1, reason="why")
    assert [*state.events.since(0)] == []


def training_states(folder: Path) -> Component:
    store = StateStore(folder, {})
    store.save({"weight": torch.zeros(4096)}, 1, {})

    def newest() -> int:
        state = store.load()
        assert state is not None
        return state.step

    return Component(lambda: store.save({"weight": torch.ones(4096)}, 2, {}), newest, "")


def releases(folder: Path) -> Component:
    registry = Registry(folder)
    registry.hold()
    create(registry)
    return Component(lambda: create(registry, 1), registry.versions, "")


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (sample_bytes, 0),
        (sample_index, 0),
        (policy_matrices, 0),
        (release_pointers, 0),
        (training_states, 0),
        (training_states, 4096),
        (releases, 0),
        (releases, 4096),
    ],
)
def test_full_disk_write_is_refused_whole(
    make: Callable[[Path], Component], most: int, tmp_path: Path
) -> None:
    """The disk is full from the first byte on, or half-way."""
    part = make(tmp_path)
    before, files = part.read(), set(tmp_path.rglob("*"))
    for _ in range(2):
        with full_disk(most), pytest.raises((RefusedError, OSError)) as caught:
            part.write()
        if part.field:
            assert isinstance(caught.value, RefusedError)
            assert caught.value.field == part.field
            assert (caught.value.reason == REFUSAL_REASON_DISK) == (part.field == REPLAY)
        assert part.read() == before and set(tmp_path.rglob("*")) == files
    part.write()
    assert part.read() != before
