"""The control plane's state machine, over an engine that only remembers what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from rollout_server.acceptance import AcceptanceTracker
from rollout_server.control import (
    ACCEPTANCE,
    DRAFT,
    MAX_STAGED,
    POLICY,
    RolloutControl,
    Weights,
)
from rollout_server.engine import Description, ReceivedError, UntrustedEngineError
from rollout_server.reload import Change, Result
from rollout_server.store import ContentStore, Key, StagedTensor, WeightSource
from slipstream.errors import RefusedError


class FakeEngine:
    def __init__(self) -> None:
        self.live = {DRAFT: "draft-0", POLICY: "policy-0"}
        self.prepared: list[tuple[str, str]] = []
        self.failure: Exception | None = None
        self.damage = ""
        self.gate: asyncio.Event | None = None
        self.while_switching: Callable[[], object] = lambda: None

    async def prepare(self, source: WeightSource, keep: WeightSource | None) -> str:
        self.prepared.append((name_of(source), name_of(keep)))
        return ""

    async def apply(self, changes: Sequence[Change]) -> Result:
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        for change in changes:
            assert name_of(change.old) == self.live[change.kind]
            self.live[change.kind] = name_of(change.new)
        return Result(0.01)

    async def describe(self) -> Description:
        raise NotImplementedError

    async def check_transfer(self, transfer: str) -> str:
        return ""

    async def set_draft_lengths(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    async def set_speculation(self, enabled: bool) -> float:
        self.while_switching()
        if self.failure is not None:
            raise self.failure
        return 0.0

    async def read_back(self) -> str:
        return self.damage

    def is_alive(self) -> bool:
        return True


def weights(kind: str, version: int, stage_id: str = "") -> Weights:
    name = f"{kind}-{version}"
    tensor = StagedTensor("w", Key(f"{name}", "float32", 10), (2,), name)
    return Weights(kind, version, WeightSource(tensors=(tensor,)), stage_id)


def name_of(source: WeightSource | None) -> str:
    return "" if source is None else source.tensors[0].path


class Plane:
    def __init__(self, directory: Path) -> None:
        self.engine = FakeEngine()
        self.outcomes: list[tuple[str, str]] = []
        self.store = ContentStore(directory, 1000)
        self.control = RolloutControl(
            self.engine,
            self.store,
            AcceptanceTracker(),
            lambda kind, outcome, result: self.outcomes.append((kind, outcome)),
            weights(DRAFT, 0),
            weights(POLICY, 0),
        )

    def stage(self, kind: str, version: int) -> str:
        stage_id = f"{kind}-{version}"
        self.control.add_stage(weights(kind, version, stage_id))
        return stage_id


@pytest.fixture
def plane(tmp_path: Path) -> Plane:
    return Plane(tmp_path)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_a_refused_apply_changes_nothing_and_keeps_the_stage(plane: Plane) -> None:
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
async def test_a_transfer_that_was_received_in_vain_is_not_received_again(plane: Plane) -> None:
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
async def test_a_commit_goes_on_when_its_caller_leaves(plane: Plane) -> None:
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
async def test_a_draft_is_prepared_and_what_it_replaced_stays_ready(plane: Plane) -> None:
    for version in (1, 2):
        await plane.control.prepare(weights(DRAFT, version))
        await plane.control.commit([plane.stage(DRAFT, version)])
    await plane.control.prepare(weights(POLICY, 5))
    await plane.control.prepare(weights(DRAFT, 3))
    assert plane.engine.prepared == [
        ("draft-1", ""),
        ("draft-2", "draft-0"),
        ("draft-3", "draft-1"),
    ]


@pytest.mark.anyio
async def test_bad_commits_are_refused(plane: Plane) -> None:
    two = [plane.stage(DRAFT, 1), plane.stage(DRAFT, 2)]
    for stage_ids, code in (
        ([], grpc.StatusCode.INVALID_ARGUMENT),
        (two, grpc.StatusCode.INVALID_ARGUMENT),
        (["never"], grpc.StatusCode.NOT_FOUND),
    ):
        with pytest.raises(RefusedError) as refusal:
            await plane.control.commit(stage_ids)
        assert refusal.value.code == code
    assert plane.engine.live[DRAFT] == "draft-0"


@pytest.mark.anyio
async def test_stages_are_bounded_and_ids_mean_one_content(plane: Plane) -> None:
    for version in range(MAX_STAGED):
        plane.stage(DRAFT, version)
    plane.stage(DRAFT, 0)  # the same again
    with pytest.raises(RefusedError) as refusal:
        plane.control.add_stage(weights(DRAFT, 7, "draft-0"))
    assert refusal.value.code == grpc.StatusCode.ALREADY_EXISTS
    with pytest.raises(RefusedError) as refusal:
        plane.stage(DRAFT, MAX_STAGED)
    assert refusal.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_moment_without_speculation_ends_as_was_asked_for_last(tmp_path: Path) -> None:
    plane = Plane(tmp_path / "store")

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
async def test_who_turned_drafting_off_can_be_told(plane: Plane) -> None:
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
async def test_what_the_engine_did_not_do_is_not_told(plane: Plane) -> None:
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


def test_reasons_come_and_go_by_source(plane: Plane) -> None:
    control = plane.control
    assert control.not_ready == ""
    control.report("b", "two")
    control.report("a", "one")
    assert control.not_ready == "one; two"
    control.report("b", "")
    control.report("never", "")
    assert control.not_ready == "one"


@pytest.mark.anyio
async def test_a_commit_withdraws_what_was_found_of_the_draft_before(plane: Plane) -> None:
    plane.engine.damage = "draft read back from memory: worker 0: differs"
    await plane.control.read_back()
    assert plane.control.not_ready == plane.engine.damage
    await plane.control.commit([plane.stage(DRAFT, 1)])
    assert plane.control.not_ready == ""
    plane.control.report(ACCEPTANCE, "acceptance length of draft 1 is 1.00 over 608 drafts")
    await plane.control.roll_back()
    assert plane.control.not_ready == ""
    plane.engine.damage = ""
    await plane.control.read_back()
    assert plane.control.not_ready == ""


@pytest.mark.anyio
async def test_committing_the_same_release_again_keeps_what_can_be_rolled_back_to(
    plane: Plane,
) -> None:
    await plane.control.commit([plane.stage(DRAFT, 1)])
    await plane.control.commit([plane.stage(DRAFT, 1)])
    assert plane.control.previous_draft is not None
    assert plane.control.previous_draft.version == 0
    await plane.control.roll_back()
    assert plane.engine.live[DRAFT] == "draft-0"


@pytest.mark.anyio
async def test_a_server_on_another_release_than_the_fleet_is_not_ready(plane: Plane) -> None:
    control = plane.control
    control.expect(1, b"?" * 32)
    assert control.not_ready == "serves draft 0, the fleet 1"
    # Whatever is committed is newer than what was said.
    await control.commit([plane.stage(DRAFT, 1)])
    assert control.not_ready == ""
    control.expect(1, control.state().draft_sha256)
    assert control.not_ready == "", "it serves it"
    control.expect(1, b"?" * 32)
    assert control.not_ready == "serves another draft 1, the fleet 1", "other content"
    await control.roll_back()
    assert control.not_ready == ""
    control.expect(2, b"")
    await control.commit([plane.stage(POLICY, 4)])
    assert "fleet 2" in control.not_ready, "a policy changes nothing about it"


@pytest.mark.anyio
async def test_an_abort_waits_for_the_commit_that_applies_its_stage(plane: Plane) -> None:
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
        assert plane.engine.live[DRAFT] == f"draft-{live}"
        assert plane.control.staged == {}


def test_stage_id_with_other_bytes_of_same_version_refused(plane: Plane) -> None:
    """A trainer with another registry uses the number too; what is held is not its release."""
    plane.stage(DRAFT, 1)
    (held,) = weights(DRAFT, 1).source.tensors
    other = WeightSource(tensors=(replace(held, key=Key("other", "float32", 10)),))
    with pytest.raises(RefusedError, match="other content"):
        plane.control.add_stage(Weights(DRAFT, 1, other, "draft-1"))
