"""A small random Qwen3 (8 layers) and a bridge to a trainer double."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3ForCausalLM

from benchmarks.publish_faults.memory_server import DRAFT_DIR, MemoryServer
from policy_bridge import BridgeConfig, PolicyBridge
from policy_bridge.copier import Copier
from slipstream.checkpoints import load_tensors
from tests.tiny import tiny_qwen3

from .doubles import DEADLINE, FakeTrainer
from .windows import Streams

VOCAB, HIDDEN = 64, 32


def make_model(dtype: torch.dtype = torch.float32, tied: bool = False) -> Qwen3ForCausalLM:
    model = tiny_qwen3(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=8, tie_word_embeddings=tied
    )
    return model.to(dtype).eval()


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    return make_model()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = f"file://{tmp_path / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


Connect = Callable[..., PolicyBridge]
Rollouts = list[MemoryServer]


@pytest.fixture
def connect(model: Qwen3ForCausalLM, trainer: FakeTrainer) -> Iterator[Connect]:
    """``connect(address, **settings)``: a bridge that has opened its run and synced ``version``.

    Without an address, to ``trainer``, which serves until the end of the test.
    """
    bridges = []
    servers = []

    def build(
        address: str = "", *, wait: bool = True, version: int | None = None, **settings: object
    ) -> PolicyBridge:
        if not address:
            if not servers:
                servers.append(trainer.serve())
            address = servers[0].address
        settings = {"max_backoff_seconds": 0.1, "drain_seconds": 0.2, **settings}
        used = settings.pop("model", model)
        bridge = PolicyBridge(
            used,  # type: ignore[arg-type]
            BridgeConfig(trainer=address, run_id="test", **settings),  # type: ignore[arg-type]
        )
        bridges.append(bridge)
        if wait:
            assert bridge.wait_connected(DEADLINE)
        if version is not None:
            sync(bridge, version)
        return bridge

    yield build
    for bridge in bridges:
        bridge.close()
    for server in servers:
        server.kill()


@pytest.fixture
def trainer() -> FakeTrainer:
    return FakeTrainer()


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copier]:
    """Make the copier of a device."""
    made = Streams(monkeypatch).copier()
    yield made
    made.close()


def batch(lengths: tuple[int, ...], side: str = "right", seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tokens; prompts of 3, the rest completion. Padding id 0."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    attention, loss = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, length in enumerate(lengths):
        start = 0 if side == "right" else width - length
        ids[row, start : start + length] = torch.randint(1, VOCAB, (length,), generator=generator)
        attention[row, start : start + length] = 1
        loss[row, start + 3 : start + length] = True
    return {"input_ids": ids, "attention_mask": attention, "loss_mask": loss}


def sync(bridge: PolicyBridge, version: int, lead: bool = True) -> None:
    """A weight sync in which nothing is pushed."""
    with bridge.sync(version, lead=lead):
        pass


def ship(bridge: PolicyBridge, model: torch.nn.Module, data: dict[str, torch.Tensor]) -> None:
    """One capture with one forward pass, log-probs left to the bridge."""
    with torch.no_grad(), bridge.capture(temperature=1.0) as capture:
        model(input_ids=data["input_ids"], attention_mask=data["attention_mask"])
        capture.ship(
            data["input_ids"], attention_mask=data["attention_mask"], loss_mask=data["loss_mask"]
        )


def deliver(bridge: PolicyBridge, model: torch.nn.Module, data: dict[str, torch.Tensor]) -> None:
    """``ship``, and wait until everything was acknowledged or shed."""
    ship(bridge, model, data)
    assert bridge.flush(DEADLINE)


@pytest.fixture
def rollouts(saved_policy: Path) -> Iterator[Rollouts]:
    """Two rollout servers that serve draft 3."""
    servers = [MemoryServer(policy=saved_policy) for _ in range(2)]
    for server in servers:
        server.put(3, load_tensors(DRAFT_DIR))
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def saved_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of ``make_model()``, as rollout servers are started with it."""
    folder = tmp_path_factory.mktemp("policy")
    make_model().save_pretrained(folder)
    return folder


def addresses(rollouts: Rollouts) -> tuple[str, ...]:
    return tuple(server.address for server in rollouts)
