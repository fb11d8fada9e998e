"""The fixtures that several tests of the trainer share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draft_trainer.kernels.library import using_kernels
from draft_trainer.releases import reconcile, watch
from draft_trainer.server.app import TrainerServer
from examples.arithmetic_grpo.sampling import solutions
from examples.arithmetic_grpo.states import States, states_of
from tests.draft_trainer.fleet_rig import Rig
from tests.draft_trainer.rig import Client, feeding, make_config
from tests.draft_trainer.warmup_rig import COUNT, Rollout


@pytest.fixture(scope="session")
def tiny_policy(policy_dir: Path) -> PreTrainedModel:
    """The trained tiny policy. Not to be written to."""
    return AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def drawn(tiny_policy: PreTrainedModel) -> list[Rollout]:
    """Solutions of the trained tiny policy."""
    return [one for part in solutions(tiny_policy, COUNT, seed=1) for one in part]


@pytest.fixture(scope="session")
def fresh(tiny_policy: PreTrainedModel) -> States:
    """The trained tiny policy's states on other rollouts."""
    return states_of(tiny_policy, [one for part in solutions(tiny_policy, 32, 2) for one in part])


@pytest.fixture(autouse=True)
def plain_torch() -> Iterator[None]:
    """A command that ran in this process leaves its choice of kernels behind, and with it bits."""
    with using_kernels("off"):
        yield


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TrainerServer, Client]]:
    """A server that takes short samples and does not train, and a client that feeds it."""
    config = make_config(
        tmp_path_factory.mktemp("ingest"),
        server={"max_tokens_per_sample": 32, "receive_window_bytes": 1 << 17},
    )
    with feeding(config, train=False) as (server, client):
        yield server, client


@pytest.fixture
def make_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    """Makes a fleet with its publisher, which is closed after the test; servers report at once."""
    monkeypatch.setattr(watch, "INTERVAL_MS", 1)
    rigs: list[Rig] = []

    def make(*arguments: object, **options: object) -> Rig:
        rigs.append(Rig(tmp_path, *arguments, **options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """Three rollout servers, four releases, a publisher."""
    return make_rig()


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once what could not be put right."""
    monkeypatch.setattr(reconcile, "FIRST_WAIT", 0.0)
