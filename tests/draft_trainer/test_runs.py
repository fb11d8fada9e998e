"""One run at a time: no sample of one is stored under another."""

from __future__ import annotations

from pathlib import Path

import pytest

from draft_trainer.ingest.run import Runs
from draft_trainer.ingest.store import SampleStore
from slipstream.errors import RefusedError, StatusCode
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.draft_trainer.rig import SPEC
from tests.draft_trainer.samples import open_store, put, received
from tests.draft_trainer.synthetic import Policy, config


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
