"""Data-parallel ranks: a call reaches every engine core, and a change is on all or on none."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_server.control.changes import Change, Result, UntrustedEngineError
from rollout_server.control.stages import WeightSource
from rollout_server.vllm import engine
from rollout_server.vllm.api_server import check_speculation
from rollout_server.vllm.engine import VllmEngine
from rollout_server.vllm.plugins import Settings
from rollout_server.vllm.worker import _receive, slipstream_check_transfer
from slipstream.errors import RefusedError
from slipstream.v1 import rollout_server_pb2 as pb
from tests.draft_trainer.rig import open_to_all
from tests.rollout_server.checkpoints import load, perturbed
from tests.rollout_server.live import Live, prompts

pytestmark = pytest.mark.contract("all or none")

DRAFT = Change("draft", WeightSource("new"), WeightSource("old"))
POLICY = Change("policy", WeightSource("new"), WeightSource("old"))
EXTERNAL = Change("policy", WeightSource("new"), WeightSource(transfer="{}"))


class Client:
    """vLLM's ``AsyncLLM`` with two engine cores; ``errors`` are of the next changes of each."""

    def __init__(self) -> None:
        self.engine_core = SimpleNamespace(
            core_engines=[b"0", b"1"], _call_utility_async=self._answer
        )
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(is_moe=False))
        self.errors: dict[bytes, list[str]] = {b"0": [], b"1": []}
        self.requests: list[dict[str, int]] = []
        self.calls: list[tuple[str, str]] = []
        self.pause: asyncio.Future[None] | None = None
        self.paused: bool | Exception = False

    async def is_paused(self) -> bool:
        if isinstance(self.paused, Exception):
            raise self.paused
        return self.paused

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.calls.append(("hold", mode))
        if self.pause is not None:
            await self.pause

    async def resume_generation(self) -> None:
        self.calls.append(("go on", ""))

    async def _answer(self, name: str, method: str, args: list[Any], engine: bytes) -> Any:
        assert name == "slipstream_call"
        if method == "step_sums":
            return [["plain", 2, 0, 3, 0.5]]
        if method == "set_speculation":
            return 0.1 + int(engine)
        if method != "apply":
            return [f"same {engine.decode()}"]
        [message], _ = args
        self.calls.append((engine.decode(), message["new"]["directory"]))
        error = self.errors[engine].pop(0) if self.errors[engine] else ""
        if error == "silent":
            raise RuntimeError(error)
        requests = self.requests.pop(0) if self.requests and not error else {}
        steps = (5 + int(engine),)
        return asdict(Result(0.1 + int(engine), error, steps_before=steps, requests=requests))


def test_apply_reaches_every_engine_core() -> None:
    client = Client()
    result = asyncio.run(VllmEngine(client).apply([DRAFT]))
    assert (result.worker_seconds, result.steps_before) == (1.1, (5, 6))
    assert client.calls == [("0", "new"), ("1", "new")], "a draft is replaced without a hold"


def test_failed_core_reverts_other_cores() -> None:
    client = Client()
    client.errors[b"1"] = ["no memory"]
    with pytest.raises(RefusedError, match="the old weights are live again"):
        asyncio.run(VllmEngine(client).apply([DRAFT]))
    assert client.calls[2:] == [("0", "old"), ("1", "old")]
    client = Client()
    client.errors[b"1"] = ["no memory", "no memory"]
    with pytest.raises(RefusedError, match="the old weights are live again"):
        asyncio.run(VllmEngine(client).apply([DRAFT]))
    client = Client()
    client.errors = {b"0": ["", "no memory"], b"1": ["no memory"]}
    with pytest.raises(UntrustedEngineError):
        asyncio.run(VllmEngine(client).apply([DRAFT]))


def test_ended_requests_are_reported_after_reverted_commit() -> None:
    """A core says it once, and this one has two commits behind it by then."""
    client = Client()
    rollout = VllmEngine(client)
    client.errors[b"1"] = ["no memory"]
    client.requests = [{"ended": -1, "runs": 3}, {"runs": 3}, {}, {"late": -1}, {"runs": 4}]
    with pytest.raises(RefusedError):
        asyncio.run(rollout.apply([POLICY]))
    result = asyncio.run(rollout.apply([POLICY]))
    assert result.requests == {"ended": -1, "late": -1, "runs": 4}
    assert asyncio.run(rollout.apply([POLICY])).requests == {}


def test_no_step_mixes_two_policies() -> None:
    client = Client()
    client.errors[b"0"] = ["no memory"]
    with pytest.raises(RefusedError):
        asyncio.run(VllmEngine(client).apply([POLICY]))
    assert client.calls[0] == ("hold", "keep") and client.calls[-1] == ("go on", "")
    assert ("1", "old") in client.calls
    client = Client()
    client.errors[b"0"] = ["silent"]
    with pytest.raises(UntrustedEngineError):
        asyncio.run(VllmEngine(client).apply([POLICY]))
    assert ("go on", "") not in client.calls, "a torn policy takes no step"


def test_external_policy_failing_on_one_core_ends_server() -> None:
    """Nobody would send those that applied the change the old weights again."""
    client = Client()
    client.errors[b"1"] = ["no memory"]
    with pytest.raises(UntrustedEngineError, match="no memory"):
        asyncio.run(VllmEngine(client).apply([EXTERNAL]))
    assert client.calls == [("hold", "keep"), ("0", "new"), ("1", "new")]


def test_policy_commit_keeps_paused_engine_paused() -> None:
    """While it sleeps, the steps of one that goes on would read memory that is gone."""
    client = Client()
    client.paused = True
    asyncio.run(VllmEngine(client).apply([POLICY]))
    assert client.calls == [("0", "new"), ("1", "new")]


def test_policy_commit_refused_when_some_cores_are_paused() -> None:
    client = Client()
    client.paused = RuntimeError("Engines returned different is_scheduler_paused results")
    with pytest.raises(RefusedError, match="different is_scheduler_paused"):
        asyncio.run(VllmEngine(client).apply([POLICY]))
    assert client.calls == [], "nothing was replaced"


@pytest.mark.parametrize("error", [None, RuntimeError("no pause")], ids=["silent", "failed"])
def test_cores_that_do_not_pause_end_server(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some may hold them for ever."""
    monkeypatch.setattr(engine, "CALL_SECONDS", 0.01)
    monkeypatch.setattr(engine, "_STEP_SECONDS", 0.0)
    client = Client()

    async def apply() -> None:
        client.pause = asyncio.get_running_loop().create_future()
        if error is not None:
            client.pause.set_exception(error)
        await asyncio.wait_for(VllmEngine(client).apply([POLICY]), 30)

    with pytest.raises(UntrustedEngineError, match="pause_generation"):
        asyncio.run(apply())
    assert client.calls == [("hold", "keep")], "nothing was replaced"


def test_cancelled_call_cancels_calls_to_all_cores() -> None:
    client = Client()

    async def leave() -> int:
        waits: list[asyncio.Future[None]] = []

        async def answer(*args: Any, engine: bytes) -> None:
            waits.append(asyncio.get_running_loop().create_future())
            await waits[-1]

        client.engine_core._call_utility_async = answer
        caller = asyncio.ensure_future(VllmEngine(client).read_back())
        while len(waits) < 2:
            await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait({caller})
        await asyncio.sleep(0)
        return sum(wait.cancelled() for wait in waits)

    assert asyncio.run(leave()) == 2


def test_speculation_off_is_refused_for_data_parallel_moe() -> None:
    """Idle ranks run the draft in vLLM's dummy batch: busy ones that skip it hang them all."""
    client = Client()
    settings = Settings(Path("policy"), Path("draft"), open_to_all(), speculation="off")
    timed = replace(settings, speculation="fixed", time_plain_steps=True)
    switch = VllmEngine(client).set_speculation
    assert asyncio.run(switch(False)) == 1.1
    client.vllm_config.model_config.is_moe = True
    assert asyncio.run(switch(True)) == 1.1
    with pytest.raises(RefusedError, match=r"speculation: found off.*experts.*data-parallel"):
        asyncio.run(switch(False))
    for given, name in ((settings, "--speculation: found off"), (timed, "--time-plain-steps")):
        with pytest.raises(RefusedError, match=rf"{name}.*experts on data-parallel ranks"):
            check_speculation(given, VllmEngine(client))
    check_speculation(replace(timed, time_plain_steps=False), VllmEngine(client))
    client.engine_core.core_engines.pop()
    assert asyncio.run(switch(False)) == 0.1, "one rank is never refused"
    check_speculation(settings, VllmEngine(client))


def test_transfer_update_entry_is_chosen_by_rank() -> None:
    """Each core's workers count from 0; an update's entries go over all cores."""
    loaded: list[Any] = []
    parallel = SimpleNamespace(data_parallel_index=1, world_size=2)
    model = torch.nn.Linear(2, 2)
    model.load_weights = list  # type: ignore[assignment]
    worker = SimpleNamespace(
        rank=0,
        vllm_config=SimpleNamespace(parallel_config=parallel),
        weight_transfer_engine=SimpleNamespace(parse_update_info=lambda update: update["names"]),
        get_model=lambda: model,
        start_weight_update=lambda: None,
        update_weights=loaded.append,
        finish_weight_update=lambda: None,
    )
    good: dict[str, list[str]] = {"names": []}
    for update, wrong in (
        ([good, good], "IndexError"),
        ([good, good, {}, good], "KeyError: 'names'"),
        ([{}, {}, good, {}], ""),
        (good, ""),
    ):
        found = slipstream_check_transfer(worker, json.dumps(update))
        assert wrong in found and bool(found) == bool(wrong)
        if not wrong:
            # Not the list: vLLM 0.29 and 0.30 take another entry of it.
            _receive(worker, json.dumps(update))
    assert loaded == [good, good]


def test_receive_synchronizes_with_running_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's engine for NCCL loads on streams of its own."""
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("quiet"))
    model = torch.nn.Linear(2, 2, device="meta")
    model.load_weights = list  # type: ignore[assignment]
    worker = SimpleNamespace(
        rank=0,
        get_model=lambda: model,
        start_weight_update=lambda: order.append("start"),
        update_weights=lambda update: order.append("update"),
        finish_weight_update=lambda: order.append("finish"),
    )
    _receive(worker, "{}")
    assert order == ["quiet", "start", "update", "finish"]


def test_empty_transfer_update_is_refused() -> None:
    """vLLM 0.33's engine for NCCL takes empty lists for those of the update before."""
    model, before = object(), dict[object, object]()
    engine = SimpleNamespace(
        parse_update_info=lambda update: SimpleNamespace(**update), _last_update_info=before
    )
    worker = SimpleNamespace(weight_transfer_engine=engine, get_model=lambda: model)
    assert "none before it" in slipstream_check_transfer(worker, json.dumps({"names": []}))
    assert slipstream_check_transfer(worker, json.dumps({"names": ["a"]})) == ""
    before[model] = "what the update before had"
    assert slipstream_check_transfer(worker, json.dumps({"names": []})) == ""


def test_step_sums_add_up_over_cores() -> None:
    sums = asyncio.run(VllmEngine(Client()).step_sums())
    assert {key: (total.steps, total.seconds) for key, total in sums.items()} == {
        ("plain", 2, 0): (6, 1.0)
    }


@pytest.mark.slow
@pytest.mark.vllm
def test_data_parallel_server_commits_under_load(  # type: ignore[no-untyped-def]
    serve, policy_dir: Path, draft_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM binds each rank to a core of its own and keeps one for itself: two cores are too few.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    live: Live = serve("--data-parallel-size", "2")
    live.speculate(False)
    plain = live.generate(prompts(16))
    live.speculate(True)
    draft = load(draft_dir)
    with live.generating(prompts(16)) as rounds:
        for version in (1, 2, 3):
            live.stage(
                "draft", f"draft-{version}", version, perturbed(draft, scale=0.01, seed=version)
            )
            live.stage("policy", f"policy-{version}", version, load(policy_dir))
            live.commit(f"draft-{version}", f"policy-{version}")
            served, count = len(rounds), live.drafts().get(version, 0)
            while len(rounds) < served + 2 or live.drafts().get(version, 0) == count:
                live.generate(prompts(2))
    assert all(completions == plain for completions in rounds)
    state = live.stub.GetState(pb.GetStateRequest(read_back=True), timeout=60)
    assert (state.draft_version, state.policy_version, not state.not_ready) == (3, 3, True)
    assert min(live.drafts()[version] for version in (1, 2, 3)) > 0
