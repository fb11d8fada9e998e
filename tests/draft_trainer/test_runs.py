"""One run at a time: no sample of one is stored under another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from draft_trainer.ingest.run import Runs, Session
from draft_trainer.ingest.store import SampleStore
from slipstream.errors import RefusedError, StatusCode
from slipstream.tensors import chunks_of, spec_of
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import release_pb2
from tests.draft_trainer.rig import SPEC
from tests.draft_trainer.samples import open_store, put, received
from tests.draft_trainer.synthetic import Policy, config, draft_vocab_ids


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    return open_store(tmp_path)


@pytest.fixture
def runs(store: SampleStore) -> Runs:
    return Runs(config(), store, max_policy_lag=2)


def request(run_id: str) -> pb.OpenRunRequest:
    return pb.OpenRunRequest(run_id=run_id, policy=SPEC)


def test_run_that_failed_to_begin_matches_the_store(
    runs: Runs, store: SampleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.open(request("one"))

    def full(*_: object, **__: object) -> bool:
        raise RefusedError("replay.directory", "a full disk", "space", "free some")

    with monkeypatch.context() as patched:
        patched.setattr(store, "keep_versions", full)
        with pytest.raises(RefusedError, match="a full disk"):
            runs.open(request("two"))
    for run_id in ("one", "two"):
        session = runs.open(request(run_id))
        assert session.run is runs.current and store.run is not None
        assert session.run.run_id == run_id == store.run[0]


def test_first_policy_version_of_run_survives_restart(
    runs: Runs, store: SampleStore, tmp_path: Path
) -> None:
    run, policy = runs.open(request("one")).run, Policy()
    assert run.first_policy_version is None
    for version in (500, 501, 510):
        run.add_policy(policy.heads(version).get(version))
        assert run.first_policy_version == 500
    assert [version for version, _ in store.policies()] == [510]
    store.close()
    again = open_store(tmp_path)
    runs = Runs(config(), again, max_policy_lag=2)
    assert runs.current is not None and runs.current.first_policy_version == 500
    run = runs.open(request("two")).run
    assert run.first_policy_version is None
    run.add_policy(policy.heads(0).get(0))
    run.add_policy(policy.heads(1).get(1))
    assert (run.first_policy_version, again.first_policy()) == (0, 0)


def test_samples_of_another_run_are_refused(store: SampleStore) -> None:
    store.begin("one", {})
    assert put(store, "a")
    sample = received(store, "b")
    store.begin("two", {})
    for late in (lambda: store.accept("one", [sample]), lambda: store.seen("one", "a")):
        with pytest.raises(RefusedError) as caught:
            late()
        assert (caught.value.field, caught.value.found) == ("run_id", "one")
        assert caught.value.code is StatusCode.FAILED_PRECONDITION
    assert store.counts().resident == 0 and not store.seen("two", "a")


def announced(runs: Runs, session: Session, version: int, seed: int = 0) -> bool:
    """Announce a version with the matrices of a synthetic policy."""
    policy = Policy(seed)
    tensors = {
        "lm_head.weight": policy.lm_head[draft_vocab_ids()],
        "embed_tokens.weight": policy.embed,
    }
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    header = pb.AnnouncePolicyHeader(policy_version=version, tensors=specs)
    return runs.announce(session, header, chunks_of(tensors))


def followed(runs: Runs, session: Session, version: int) -> None:
    """Announce a version as a process that does not lead."""
    runs.announce(session, pb.AnnouncePolicyHeader(policy_version=version), iter(()))


def killed_at_version_12(runs: Runs, store: SampleStore) -> Session:
    """A job feeds versions 10 to 12, two samples each."""
    session = runs.open(request("one"))
    for version in (10, 11, 12):
        assert not announced(runs, session, version)
        assert all(put(store, f"{version}-{row}", version) for row in range(2))
    return session


def test_job_resumed_from_older_checkpoint_begins_a_new_history(
    runs: Runs, store: SampleStore, tmp_path: Path
) -> None:
    """Frozen matrices, as with adapters: versions of both jobs look alike."""
    zombie = killed_at_version_12(runs, store)
    resumed, rank = runs.open(request("one")), runs.open(request("one"))
    # A rank that follows waits for its leader, whatever the job before has left.
    with pytest.raises(RefusedError) as waits:
        followed(runs, rank, 11)
    assert waits.value.reason == release_pb2.REFUSAL_REASON_NOT_ANNOUNCED
    assert announced(runs, resumed, 11)
    followed(runs, rank, 11)
    run = runs.current
    assert run is not None and run is resumed.run is rank.run
    assert (run.run_id, run.history, run.heads.versions) == ("one", 1, (10, 11))
    assert {sample.policy_version for sample in run.draw(10**6).samples} == {10}
    # The same names are of other samples now.
    assert put(store, "11-0", 11) and not put(store, "11-0", 11)
    assert not announced(runs, resumed, 12)
    store.close()
    again = Runs(config(), open_store(tmp_path), max_policy_lag=2).current
    assert again is not None and (again.history, again.heads.versions) == (1, (10, 11, 12))
    assert zombie.run.superseded and not run.superseded


def test_process_of_an_earlier_history_never_turns_it_back(
    runs: Runs, store: SampleStore, tmp_path: Path
) -> None:
    zombie = killed_at_version_12(runs, store)
    late = received(store, "late", 12)
    resumed = runs.open(request("one"))
    assert announced(runs, resumed, 5)

    def refused(attempt: Callable[[], object], field: str = "history") -> None:
        with pytest.raises(RefusedError) as error:
            attempt()
        assert error.value.field == field
        assert error.value.code is StatusCode.FAILED_PRECONDITION

    # On the stream and session that it has, and by the store, for what was being checked.
    refused(zombie.run.check_current)
    refused(lambda: announced(runs, zombie, 13))
    refused(lambda: store.accept(zombie.run.key, [late]), "run_id")
    refused(lambda: zombie.run.add_policy(Policy().heads(13).get(13)), "run_id")
    refused(lambda: runs.session(zombie.session_id), "session_id")
    # It opens the run again, also at a trainer that was restarted meanwhile.
    of_zombie, of_resumed = (
        pb.OpenRunRequest(run_id="one", policy=SPEC, history=history) for history in (0, 1)
    )
    refused(lambda: runs.open(of_zombie))
    store.close()
    again = Runs(config(), open_store(tmp_path), max_policy_lag=2)
    refused(lambda: again.open(of_zombie))
    # The new job goes on, and connects again without a further history.
    back = again.open(of_resumed)
    assert not announced(again, back, 6)
    assert back.run.heads.versions == (5, 6) and back.run.history == 1


def test_trainer_without_samples_takes_the_latest_history(runs: Runs) -> None:
    """It has lost them, as in a reboot, and the process of the earlier history comes first."""
    first = runs.open(pb.OpenRunRequest(run_id="one", policy=SPEC, history=3))
    assert not announced(runs, first, 12)
    then = runs.open(pb.OpenRunRequest(run_id="one", policy=SPEC, history=4))
    assert then.run.history == 4 and then.run.heads.versions == ()
    assert first.run.superseded and not announced(runs, then, 6)
    with pytest.raises(RefusedError, match="history: found 18446744073709551615"):
        runs.open(pb.OpenRunRequest(run_id="one", policy=SPEC, history=2**64 - 1))


def test_history_goes_on_with_every_process_of_a_job(runs: Runs, store: SampleStore) -> None:
    """A late rank, a process that resumes at the newest version, and one beside it."""
    lead, late = runs.open(request("one")), runs.open(request("one"))
    assert not announced(runs, lead, 0) and not announced(runs, lead, 1)
    assert not announced(runs, late, 0), "opened before version 1 was announced"
    same, rank = runs.open(request("one")), runs.open(request("one"))
    assert not announced(runs, same, 1)
    followed(runs, rank, 1)
    assert not rank.joined, "its leader may begin a new history at this version"
    assert not announced(runs, same, 2)
    # Once it has announced one, its versions rise.
    with pytest.raises(RefusedError, match="higher than 2"):
        announced(runs, same, 1, seed=1)
    # Other matrices under the newest number are of another policy.
    assert announced(runs, runs.open(request("one")), 2, seed=1)
