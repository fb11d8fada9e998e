"""The blocks of docs/integrations.md on vLLM's own weight transfer, as printed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from policy_bridge import BridgeConfig, PolicyBridge, PolicySyncError
from tests.docs.test_recipes import RECIPES, Rig, connected, rig, run
from tests.policy_bridge.conftest import VOCAB, make_model
from tests.policy_bridge.doubles import DEADLINE

__all__ = ["rig"]

UPDATE = {"names": ["lm_head.weight"], "dtypes": ["bfloat16"], "shapes": [[VOCAB, 32]]}


def opened(rig: Rig) -> PolicyBridge:
    config = BridgeConfig(trainer=rig.address, run_id="external")
    return connected(PolicyBridge(make_model(), config))


def test_weights_are_sent_beside_the_commit(rig: Rig) -> None:
    sent: list[int] = []
    with opened(rig) as bridge:
        run(
            *(RECIPES[-1], 1, 2),
            bridge=bridge,
            version=5,
            broadcast_weights=lambda: sent.append(1),
            **UPDATE,
        )
    (update,) = rig.rollout.updates.values()
    assert '"dtype_names": ["bfloat16"]' in update
    assert sent == [1] and len(rig.rollout.commits) == 1


@pytest.mark.parametrize(
    ("fails", "error", "gathers"),
    [("", None, 3), ("stage", PolicySyncError, 0), ("send", TimeoutError, 3)],
)
def test_no_rank_gathers_alone(
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
            *(RECIPES[-1], 2, 2),
            bridge=bridge,
            version=5,
            whole_weights=whole_weights,
            broadcast_weights=broadcast_weights,
            **UPDATE,
        )

    monkeypatch.setattr(dist, "get_rank", lambda: here.rank)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    if fails == "stage":
        rig.rollout.fail.add("Stage")
    with opened(rig) as lead, opened(rig) as other, ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(rank, number, bridge) for number, bridge in enumerate((lead, other))]
        assert type(ranks[0].exception()) is (error or type(None))
        assert ranks[1].exception() is None
    assert gathered[0] == gathered[1] == list("abc")[:gathers]
    assert sent == (list("abc") if not fails else [])
    assert len(rig.rollout.commits) == (fails != "stage")
