"""A policy over two ranks: sharded by FSDP2 in the plain loop, and cut into pipeline stages."""

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
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from benchmarks.publish_faults.memory_server import MemoryServer
from examples.torch_loop.train import PROMPTS, SAMPLES, load
from policy_bridge import BridgeConfig, PolicyBridge
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.adapters.ranks import AUX_LAYERS, STEPS, batches, completion_mask, loop
from tests.policy_bridge.doubles import DEADLINE, FakeTrainer

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


@dataclass(frozen=True)
class Seen:
    ranks: list[dict[str, Any]]
    loop: FakeTrainer
    pipeline: FakeTrainer
    rollout: MemoryServer


@pytest.fixture(scope="module")
def seen(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    out = tmp_path_factory.mktemp("ranks")
    loop, pipeline, rollout = trainer(), trainer(), MemoryServer(policy=policy_dir)
    with ExitStack() as stack:
        stack.callback(rollout.stop)
        first, last = (stack.enter_context(each.serve()) for each in (loop, pipeline))
        addresses = [first.address, rollout.address, last.address]
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.adapters.ranks"),
                *addresses,
                str(policy_dir),
                str(out),
            ],
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
        # tests.policy_bridge.sharded_process asserts on the ranks themselves.
        assert process.returncode == 0, errors
        ranks = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(2)]
        yield Seen(ranks, loop, pipeline, rollout)


@pytest.mark.slow
def test_two_fsdp2_ranks_bit_identical_and_ship_every_sample(seen: Seen) -> None:
    for found in (rank["loop"] for rank in seen.ranks):
        assert found["same"] and found["flushed"] and found["shed"] == {}, found
        assert found["accepted"] == found["chosen"] == ROWS * STEPS
        assert all(math.isfinite(loss) for loss in found["losses"])
        assert found["moved"] > 0.0
    assert seen.ranks[0]["loop"]["losses"] != seen.ranks[1]["loop"]["losses"]
    assert seen.ranks[0]["loop"]["parameters"] > 100
    samples = seen.loop.samples.values()
    assert Counter(s.policy_version for s in samples) == dict.fromkeys(range(STEPS), 2 * ROWS)
    assert seen.rollout.policy_version == STEPS - 1
    assert len(seen.rollout.commits()) == STEPS
    # One rank leads: the draft is staged and committed once a step, with the policy.
    calls = Counter(name for name, _ in seen.loop.events)
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


@pytest.mark.slow
def test_pipeline_stages_ship_same_samples_as_whole_policy(seen: Seen, policy_dir: Path) -> None:
    first, last = (rank["pipeline"] for rank in seen.ranks)
    assert (first["gathered"], first["layers"]) == (0, 5)
    assert (last["gathered"], last["layers"]) == (2, 5)
    rows = sum(len(ids) for ids in batches())
    assert last["flushed"] and last["accepted"] == rows
    assert last["shed"] == {"policy_moved": rows}, last

    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).eval()
    double = trainer()
    with (
        double.serve() as server,
        PolicyBridge(model, BridgeConfig(server.address, "whole")) as bridge,
    ):
        assert bridge.wait_connected(DEADLINE)
        with bridge.sync(0):
            pass
        with torch.no_grad(), bridge.capture(temperature=1.0) as capture:
            for ids in batches():
                model(ids, use_cache=False)
                capture.ship(ids, loss_mask=completion_mask(ids))
        assert bridge.flush(DEADLINE)
    assert contents(seen.pipeline) == contents(double)
    ours, theirs = logits_of(seen.pipeline), logits_of(double)
    for tokens, logits in theirs.items():
        # The whole policy's are picked from its pass; those of stages are made from lm_head.
        torch.testing.assert_close(ours[tokens], logits, rtol=1e-5, atol=1e-5)
    for name, tensor in double.tensors[0].items():
        assert torch.equal(seen.pipeline.tensors[0][name], tensor), name


def contents(double: FakeTrainer) -> dict[bytes, list[bytes]]:
    """Every tensor of every sample but its logits, to the bit, by its tokens."""
    names = [
        *("loss_mask", "aux_hidden_states", "final_hidden_state"),
        *("sampled_logprobs", "positions"),
    ]
    return {
        double.tensor(s, "token_ids").numpy().tobytes(): [
            double.tensor(s, name).contiguous().view(torch.uint8).numpy().tobytes()
            for name in names
        ]
        for s in double.samples.values()
    }


def logits_of(double: FakeTrainer) -> dict[bytes, torch.Tensor]:
    """The sampled tokens' logits of every sample, by its tokens."""
    return {
        double.tensor(s, "token_ids").numpy().tobytes(): double.tensor(s, "sampled_logits")
        for s in double.samples.values()
    }
