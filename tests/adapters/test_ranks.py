"""A policy over two ranks, sharded by FSDP2 in the plain loop."""

# gRPC finds the handlers by the names in the .proto.
# ruff: noqa: N802

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.publish_faults.memory_server import MemoryServer
from examples.torch_loop.train import PROMPTS, SAMPLES, load
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.adapters.ranks import AUX_LAYERS, STEPS, loop
from tests.policy_bridge.doubles import FakeTrainer

pytestmark = pytest.mark.contract("never waits")

ROOT = Path(__file__).resolve().parents[2]
ROWS = PROMPTS * SAMPLES


class SharedTrainer(FakeTrainer):
    """Takes a version from every rank, as the trainer does; the double insists on one."""

    announcing = threading.Lock()

    def AnnouncePolicy(self, requests, context):  # type: ignore[no-untyped-def]
        header = next(requests)
        version = header.header.policy_version
        with self.announcing:
            if version in self.tensors:
                return pb.AnnouncePolicyResponse(policy_version=version)
            return super().AnnouncePolicy(itertools.chain([header], requests), context)


def trainer() -> FakeTrainer:
    return SharedTrainer(layers=AUX_LAYERS, vocab_ids=torch.arange(0, 128, 2))


@pytest.mark.slow
def test_two_fsdp2_ranks_bit_identical_and_ship_every_sample(
    policy_dir: Path, tmp_path: Path
) -> None:
    double, rollout = trainer(), MemoryServer(policy=policy_dir)
    with double.serve() as server:
        addresses = (server.address, rollout.address)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.adapters.ranks", *addresses, policy_dir, tmp_path],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            errors = process.communicate(timeout=600)[1]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
            rollout.stop()
    # tests.policy_bridge.sharded_process asserts on the ranks themselves.
    assert process.returncode == 0, errors
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for found in ranks:
        assert found["same"] and found["flushed"] and found["shed"] == {}, found
        assert found["accepted"] == found["chosen"] == ROWS * STEPS
        assert all(math.isfinite(loss) for loss in found["losses"])
        assert found["moved"] > 0.0
    assert ranks[0]["losses"] != ranks[1]["losses"]
    assert ranks[0]["parameters"] > 100
    samples = double.samples.values()
    assert Counter(s.policy_version for s in samples) == dict.fromkeys(range(STEPS), 2 * ROWS)
    assert rollout.policy_version == STEPS - 1
    assert len(rollout.commits()) == STEPS
    # One rank leads: the draft is staged and committed once a step, with the policy.
    calls = Counter(name for name, _ in double.events)
    assert (calls["PrepareSync"], calls["CompleteSync"]) == (STEPS, STEPS)


def test_torch_loop_stays_on_cpu_where_a_gpu_is(
    policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
        parameters = [*load(policy_dir).parameters()]
        assert all(isinstance(each, DTensor) for each in parameters)
        assert {each.device.type for each in parameters} == {"cpu"}
    finally:
        dist.destroy_process_group()


def test_one_rank_bit_identical_and_ships_every_sample(policy_dir: Path) -> None:
    double, rollout = trainer(), MemoryServer(policy=policy_dir)
    with double.serve() as server:
        found = loop(policy_dir, server.address, rollout.address)
    assert found["same"] and found["flushed"] and found["shed"] == {}, found
    versions = Counter(s.policy_version for s in double.samples.values())
    assert versions == dict.fromkeys(range(STEPS), ROWS)
    assert rollout.policy_version == STEPS - 1
    rollout.stop()
