"""The control plane's state machine, over an engine in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import pytest
import torch

from benchmarks.publish_faults.memory_server import MemoryEngine
from rollout_server.control import control as control_module
from rollout_server.control.acceptance_counts import AcceptanceTracker
from rollout_server.control.changes import Change, ReceivedError, Result, UntrustedEngineError
from rollout_server.control.control import (
    ACCEPTANCE,
    DRAFT,
    MAX_STAGED,
    POLICY,
    RolloutControl,
    Weights,
)
from rollout_server.control.stages import StageStore, WeightSource
from slipstream.errors import RefusedError
from slipstream.readiness import not_ready_text
from slipstream.tensors import spec_of
from slipstream.v1 import rollout_server_pb2 as pb

pytestmark = pytest.mark.contract("all or none")


class Engine(MemoryEngine):
    """That can be held, and checks what it is told that it replaces."""

    gate: asyncio.Event | None = None
    asked_for: list[tuple[int | None, int | None]]
    while_switching: Callable[[], object] = staticmethod(lambda: None)

    async def apply(self, changes: Sequence[Change]) -> Result:
        if self.gate is not None:
            await self.gate.wait()
        for change in changes:
            assert self.live[change.kind]["w"].equal(dict(change.old.weights())["w"])
        return await super().apply(changes)

    async def prepare(self, source: WeightSource, keep: WeightSource | None) -> str:
        # Now: what is superseded is deleted.
        self.asked_for.append((version_of(source), version_of(keep)))
        return await super().prepare(source, keep)

    async def set_speculation(self, enabled: bool) -> float:
        self.while_switching()
        return await super().set_speculation(enabled)


def weights(store: StageStore, kind: str, version: int, stage_id: str = "") -> Weights:
    """One tensor in the store, which holds the version."""
    tensor, folder = torch.tensor([version, kind == POLICY]), store.new_folder()
    made = Weights.of(kind, version, [spec_of("w", tensor)], folder, stage_id)
    with store.receiving(folder, [staged.key for staged in made.source.tensors]) as missing:
        for key in missing:
            store.write(folder, key, tensor)
    return made


def version_of(source: WeightSource | None) -> int | None:
    return None if source is None else int(dict(source.weights())["w"][0])


class Plane:
    def __init__(self, directory: Path) -> None:
        self.engine = Engine()
        self.engine.asked_for = []
        self.outcomes: list[tuple[str, str]] = []
        self.store = StageStore(directory, 1000)
        draft, policy = self.weights(DRAFT, 0), self.weights(POLICY, 0)
        for first in (draft, policy):
            self.engine.live[first.kind] = dict(first.source.weights())
        self.control = RolloutControl(
            self.engine,
            self.store,
            AcceptanceTracker(),
            lambda kind, outcome, result: self.outcomes.append((kind, outcome)),
            draft,
            policy,
        )

    def weights(self, kind: str, version: int, stage_id: str = "") -> Weights:
        return weights(self.store, kind, version, stage_id)

    def served(self, kind: str) -> int:
        """The version in the engine's memory."""
        return int(self.engine.live[kind]["w"][0])

    def stage(self, kind: str, version: int) -> str:
        stage_id = f"{kind}-{version}"
        self.control.add_stage(self.weights(kind, version, stage_id))
        return stage_id


@pytest.fixture
def plane(tmp_path: Path) -> Plane:
    return Plane(tmp_path)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_commit_refused_by_engine_keeps_stage(plane: Plane) -> None:
    stage = plane.stage(DRAFT, 1)
    plane.engine.failure = RefusedError("commit", "x", "y", "z", grpc.StatusCode.ABORTED)
    with pytest.raises(RefusedError):
        await plane.control.commit([stage])
    assert plane.control.live[DRAFT].version == 0
    assert list(plane.control.staged) == [stage]
    plane.engine.failure = None
    await plane.control.commit([stage])
    assert plane.control.live[DRAFT].version == 1
    assert plane.outcomes == [("draft", "failed"), ("draft", "ok")]


@pytest.mark.anyio
async def test_commit_refuses_transfer_received_in_vain(plane: Plane) -> None:
    """Its sender has ended: the trainer's and the bridge's next commits would wait for tensors."""
    policy = Weights(POLICY, 1, WeightSource(transfer="{}"), "policy-1")
    plane.control.add_stage(policy)
    draft = plane.stage(DRAFT, 1)
    named = ("commit", "model.layers.0.attn.sinks", "y", "z", grpc.StatusCode.ABORTED)
    plane.engine.failure = ReceivedError(*named)
    with pytest.raises(RefusedError, match="sinks"):
        await plane.control.commit([draft, "policy-1"])
    plane.engine.failure = None
    assert list(plane.control.staged) == [draft]
    for stages in ([draft, "policy-1"], ["policy-1"]):
        with pytest.raises(RefusedError, match=r"received in vain: commit: found .*sinks"):
            await plane.control.commit(stages)
    assert plane.control.live[POLICY].version == 0
    await plane.control.commit([draft])
    assert plane.control.live[DRAFT].version == 1


@pytest.mark.anyio
async def test_unknown_weights_end_the_server(plane: Plane) -> None:
    plane.engine.failure = UntrustedEngineError("lost")
    with pytest.raises(RefusedError) as refusal:
        await plane.control.commit([plane.stage(DRAFT, 1)])
    assert refusal.value.code == grpc.StatusCode.DATA_LOSS
    assert plane.control.untrusted.is_set()


@pytest.mark.anyio
async def test_commit_continues_after_caller_cancels(plane: Plane) -> None:
    plane.engine.gate = asyncio.Event()
    first, second = plane.stage(DRAFT, 1), plane.stage(DRAFT, 2)
    caller = asyncio.ensure_future(plane.control.commit([first]))
    other = asyncio.ensure_future(plane.control.commit([second]))
    await asyncio.sleep(0)
    caller.cancel()
    plane.engine.gate.set()
    await other
    assert plane.control.live[DRAFT].version == 2
    assert plane.control.previous_draft is not None
    assert plane.control.previous_draft.version == 1, "serialised, and the first one finished"
    await plane.control.close()


@pytest.mark.anyio
async def test_prepare_keeps_previous_draft_ready(plane: Plane) -> None:
    for version in (1, 2):
        await plane.control.prepare(plane.weights(DRAFT, version))
        await plane.control.commit([plane.stage(DRAFT, version)])
    await plane.control.prepare(plane.weights(POLICY, 5))
    await plane.control.prepare(plane.weights(DRAFT, 3))
    assert plane.engine.asked_for == [(1, None), (2, 0), (3, 1)]


@pytest.mark.anyio
async def test_commit_refuses_bad_stage_ids(plane: Plane) -> None:
    two = [plane.stage(DRAFT, 1), plane.stage(DRAFT, 2)]
    for stage_ids, code in (
        ([], grpc.StatusCode.INVALID_ARGUMENT),
        (two, grpc.StatusCode.INVALID_ARGUMENT),
        (["never"], grpc.StatusCode.NOT_FOUND),
    ):
        with pytest.raises(RefusedError) as refusal:
            await plane.control.commit(stage_ids)
        assert refusal.value.code == code
    assert plane.served(DRAFT) == 0


@pytest.mark.anyio
async def test_stages_are_bounded_and_ids_unique(plane: Plane) -> None:
    for version in range(MAX_STAGED):
        plane.stage(DRAFT, version)
    plane.stage(DRAFT, 0)  # the same again
    with pytest.raises(RefusedError) as refusal:
        plane.control.add_stage(plane.weights(DRAFT, 7, "draft-0"))
    assert refusal.value.code == grpc.StatusCode.ALREADY_EXISTS
    with pytest.raises(RefusedError) as refusal:
        plane.stage(DRAFT, MAX_STAGED)
    assert refusal.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_without_speculation_restores_last_request(tmp_path: Path) -> None:
    plane = Plane(tmp_path)

    async def turn() -> list[bool]:
        seen = []
        async with plane.control.without_speculation():
            seen.append(plane.control.speculation_enabled)
        seen.append(plane.control.speculation_enabled)
        async with plane.control.without_speculation():
            # A caller asks for no drafts meanwhile.
            await plane.control.set_speculation(False)
        return [*seen, plane.control.speculation_enabled]

    assert asyncio.run(turn()) == [False, True, False]


@pytest.mark.anyio
async def test_state_tells_who_turned_speculation_off(plane: Plane) -> None:
    control = plane.control

    def drafting() -> tuple[bool, bool]:
        state = control.state()
        return state.speculation_enabled, state.speculation_wanted

    assert drafting() == (True, True)
    await control.set_draft_lengths(None)
    assert drafting() == (False, True), "no length pays"
    await control.set_speculation(False)
    await control.set_draft_lengths([1, 1])
    assert drafting() == (False, False), "somebody turned it off"
    await control.set_speculation(True)
    assert drafting() == (True, True)


@pytest.mark.anyio
async def test_failed_switch_keeps_reported_speculation(plane: Plane) -> None:
    control, engine = plane.control, plane.engine
    failure = RefusedError("set_speculation", "no answer", "an answer", "look at the log")

    def drafting() -> tuple[bool, bool]:
        return control.speculation_enabled, control.speculation_wanted

    engine.failure = failure
    with pytest.raises(RefusedError):
        await control.set_speculation(False)
    assert drafting() == (True, True), "it drafts"
    engine.failure = None
    # The engine may do it late: it is told again what is wanted, and once.
    sent: list[bool] = []
    engine.while_switching = lambda: sent.append(True)
    await control.set_speculation(True)
    await control.set_speculation(True)
    assert sent == [True]
    # Neither a moment without drafts nor the choice of lengths is told as off, while it ends too.
    seen: list[tuple[bool, bool]] = []
    engine.while_switching = lambda: seen.append(drafting())
    async with control.without_speculation():
        assert drafting() == (False, True)
    await control.set_draft_lengths(None)
    await control.set_draft_lengths([1, 1])
    assert seen == [(True, True), (False, True)] * 2 and drafting() == (True, True)
    # Drafts that the engine does not take up again are off, whatever was asked.
    with pytest.raises(RefusedError):
        async with control.without_speculation():
            engine.failure = failure
    assert drafting() == (False, False)
    engine.failure = None
    await control.set_draft_lengths(None)
    engine.failure = failure
    with pytest.raises(RefusedError):
        await control.set_draft_lengths([1, 1])
    assert drafting() == (False, False)


def said(control: RolloutControl) -> str:
    return not_ready_text(control.not_ready)


def test_not_ready_reasons_are_kept_by_source(plane: Plane) -> None:
    control = plane.control
    one, two = (pb.NotReady(draft_version=version) for version in (1, 2))
    assert not control.not_ready
    control.report("b", [two])
    control.report("a", [one])
    assert control.not_ready == [one, two]
    control.report("b")
    control.report("never")
    assert control.not_ready == [one]


@pytest.mark.anyio
async def test_commit_clears_not_ready_reasons_of_old_draft(plane: Plane) -> None:
    plane.engine.memory = "differs"
    await plane.control.read_back()
    assert said(plane.control) == "draft read back from memory: worker 0: differs"
    await plane.control.commit([plane.stage(DRAFT, 1)])
    assert not plane.control.not_ready
    plane.control.report(ACCEPTANCE, [pb.NotReady(draft_version=1, drafts=608)])
    await plane.control.roll_back()
    assert not plane.control.not_ready
    await plane.control.read_back()
    assert not plane.control.not_ready


@pytest.mark.anyio
async def test_repeated_commit_keeps_roll_back_target(
    plane: Plane,
) -> None:
    await plane.control.commit([plane.stage(DRAFT, 1)])
    await plane.control.commit([plane.stage(DRAFT, 1)])
    assert plane.control.previous_draft is not None
    assert plane.control.previous_draft.version == 0
    await plane.control.roll_back()
    assert plane.served(DRAFT) == 0


@pytest.mark.anyio
async def test_server_on_other_release_than_fleet_is_not_ready(plane: Plane) -> None:
    control = plane.control
    control.left_out(pb.FleetDraft(version=1, sha256=b"?" * 32))
    assert said(control) == "serves draft 0, the fleet 1"
    # Whatever is committed is newer than what was said.
    await control.commit([plane.stage(DRAFT, 1)])
    assert not control.not_ready
    control.left_out(pb.FleetDraft(version=1, sha256=control.state().draft_sha256))
    assert not control.not_ready, "it serves it"
    control.left_out(pb.FleetDraft(version=1, sha256=b"?" * 32))
    assert said(control) == "serves another draft 1, the fleet 1", "other content"
    await control.roll_back()
    assert not control.not_ready
    control.left_out(pb.FleetDraft(version=2))
    await control.commit([plane.stage(POLICY, 4)])
    assert "fleet 2" in said(control), "a policy changes nothing about it"


@pytest.mark.anyio
async def test_left_out_server_is_ready_when_its_trainer_falls_silent(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would catch it up."""
    control = plane.control
    control.check_claim("one", claims=True)
    control.left_out(pb.FleetDraft(version=1), "one")
    assert said(control) == "serves draft 0, the fleet 1"
    with monkeypatch.context() as patch:
        patch.setattr(control_module, "CLAIM_SECONDS", 0.0)
        assert not control.not_ready
    assert said(control) == "serves draft 0, the fleet 1", "it is heard again"


@pytest.mark.anyio
async def test_abort_waits_for_running_commit(plane: Plane) -> None:
    """A trainer whose commit was not answered in time aborts it while the workers apply it."""
    for failure, live in ((None, 1), (RefusedError("commit", "x", "y", "z"), 1)):
        plane.engine.gate, plane.engine.failure = asyncio.Event(), failure
        stage = plane.stage(DRAFT, 1 if failure is None else 2)
        commit = asyncio.ensure_future(plane.control.commit([stage]))
        await asyncio.sleep(0)
        abort = asyncio.ensure_future(plane.control.abort([stage, "never"]))
        for _ in range(3):
            await asyncio.sleep(0)
        assert list(plane.control.staged) == [stage], "its files are being read"
        plane.engine.gate.set()
        ended = await asyncio.gather(commit, return_exceptions=True)
        await abort
        assert isinstance(ended[0], RefusedError) == (failure is not None)
        assert plane.control.live[DRAFT].version == live
        assert plane.served(DRAFT) == live
        assert plane.control.staged == {}


def test_stage_id_with_other_bytes_of_same_version_refused(plane: Plane) -> None:
    """A trainer with another registry uses the number too; what is held is not its release."""
    plane.stage(DRAFT, 1)
    folder = plane.store.new_folder()
    other = Weights.of(DRAFT, 1, [spec_of("w", torch.tensor([7, 7]))], folder, "draft-1")
    with pytest.raises(RefusedError, match="other content"):
        plane.control.add_stage(other)
