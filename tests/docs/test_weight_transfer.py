"""The blocks of docs/integrations.md on vLLM's own weight transfer, as printed."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.publish_faults.memory_server import MemoryServer
from policy_bridge import BridgeConfig, PolicyBridge, PolicySyncError
from tests.policy_bridge.conftest import VOCAB, make_model
from tests.policy_bridge.doubles import DEADLINE, FakeTrainer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
TITLE = "Policies through vLLM's own weight transfer"
UPDATE = {"names": ["lm_head.weight"], "dtypes": ["bfloat16"], "shapes": [[VOCAB, 32]]}


def run(block: int, **surroundings: object) -> None:
    """Execute one of the two Python blocks of the section."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {TITLE}\n")[2]
    section = section.partition("\n## ")[0]
    first, second = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    exec(compile((first, second)[block], TITLE, "exec"), surroundings)


@dataclass
class Rig:
    """A rollout server and the address of its trainer."""

    rollout: MemoryServer
    address: str

    def open(self) -> PolicyBridge:
        bridge = PolicyBridge(make_model(), BridgeConfig(self.address, "external"))
        assert bridge.wait_connected(DEADLINE)
        return bridge


@pytest.fixture
def rig() -> Iterator[Rig]:
    rollout, trainer = MemoryServer(), FakeTrainer()
    trainer.rollout_servers = (rollout.address,)
    with trainer.serve() as server:
        yield Rig(rollout, server.address)
    rollout.stop()


def test_external_weights_are_sent_beside_the_commit(rig: Rig) -> None:
    sent: list[int] = []
    with rig.open() as bridge:
        run(0, bridge=bridge, version=5, broadcast_weights=lambda: sent.append(1), **UPDATE)
    (update,) = rig.rollout.engine.received
    assert '"dtype_names": ["bfloat16"]' in update
    assert sent == [1] and len(rig.rollout.commits()) == 1


@pytest.mark.parametrize(
    ("fails", "error", "gathers"),
    [("", None, 3), ("stage", PolicySyncError, 0), ("send", TimeoutError, 3)],
)
def test_sharded_weights_gathered_by_all_ranks_or_none(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    error: type[Exception] | None,
    gathers: int,
) -> None:
    """Ranks are threads here: a gather ends when both are in it."""
    here, flag, both = threading.local(), queue.Queue[bool](), threading.Barrier(2)
    gathered: dict[int, list[str]] = {0: [], 1: []}
    sent: list[str] = []

    def broadcast(objects: list[bool]) -> None:
        if here.rank == 0:
            flag.put(objects[0])
        else:
            objects[0] = flag.get(timeout=DEADLINE)

    def whole_weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            both.wait(DEADLINE)
            gathered[here.rank].append(name)
            yield name, torch.zeros(1)

    def broadcast_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, _ in weights:
            if fails == "send":
                raise TimeoutError("a server does not receive")
            sent.append(name)

    def rank(number: int, bridge: PolicyBridge) -> None:
        here.rank = number
        run(
            1,
            bridge=bridge,
            version=5,
            whole_weights=whole_weights,
            broadcast_weights=broadcast_weights,
            **UPDATE,
        )

    monkeypatch.setattr(dist, "get_rank", lambda: here.rank)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    if fails == "stage":
        rig.rollout.faults.stage = "a switch"
    with rig.open() as lead, rig.open() as other, ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(rank, number, bridge) for number, bridge in enumerate((lead, other))]
        assert type(ranks[0].exception()) is (error or type(None))
        assert ranks[1].exception() is None
    assert gathered[0] == gathered[1] == list("abc")[:gathers]
    assert sent == (list("abc") if not fails else [])
    assert len(rig.rollout.commits()) == (fails != "stage")
