"""Training as the trainer's clients see it: gate, releases, publishing, restart."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from benchmarks.publish_faults.memory_server import MemoryServer
from draft_trainer.counters import total
from draft_trainer.server.app import TrainerServer
from draft_trainer.training.cores import CoreSeconds
from draft_trainer.training.economy import Decision
from draft_trainer.training.learner import StepMetrics
from slipstream.errors import RefusedError
from slipstream.tensors import ChunkAssembler
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import release_pb2
from slipstream.v1.release_pb2 import GateFigures
from tests.draft_trainer.registry_rig import create
from tests.draft_trainer.rig import (
    DEADLINE,
    Client,
    Stream,
    feeding,
    make_config,
    refusal,
    rollouts,
    running,
    train,
    train_until_released,
    write_draft,
)


def test_trainer_trains_gates_releases_and_publishes(tmp_path: Path) -> None:
    double = MemoryServer(write_draft(tmp_path / "initial"))
    config = make_config(tmp_path, publish={"rollout_servers": [double.address]})
    with feeding(config) as (_, client):
        version = train_until_released(client)
        status = client.status()
        assert status.promoted_release == version
        assert status.last_verdict.reason.startswith("passed")
        assert len(status.step_acceptance) == 3
        assert all(0 < value < 1 for value in status.step_acceptance)
        # The policy's mass on the third of its tokens that this draft cannot propose.
        assert 0.02 < status.tokens_outside / status.tokens_trained < 0.5
        assert client.prepare(2).draft_version == version
        double.stage_policy("policy-2", 2)
        result = client.complete(2, "policy-2")
        assert result.draft_version == version
        assert result.servers[0].committed and result.servers[0].state.policy_version == 2
        assert result.servers[0].commit_seconds > 0
        assert double.commits() == [(f"draft-{version}", "policy-2")]
        releases = list(client.stub.ListReleases(pb.ListReleasesRequest(), timeout=10).releases)
        assert [r.draft_version for r in releases] == list(range(version + 1))
        newest = releases[-1]
        assert newest.parent_version == version - 1
        assert newest.trained_against_policy_version == 1
        assert (newest.run_id, newest.ttt_steps) == ("run", 3)
        gate = newest.gate
        assert gate.passed and gate.anchors >= 20
        assert gate.candidate_acceptance_length > gate.incumbent_acceptance_length
        _assert_fetched(client, newest.draft_version, double)
        again = client.prepare(3)
        assert (again.draft_version, again.servers[0].stage_seconds) == (version, 0.0)
        assert client.roll_back().servers[0].state.draft_version == 0
    double.stop()


def _assert_fetched(client: Client, version: int, double: MemoryServer) -> None:
    """FetchRelease gives exactly the tensors that the rollout server got."""
    answers = client.stub.FetchRelease(pb.FetchReleaseRequest(draft_version=version), timeout=10)
    manifest = next(answers).manifest
    assembler = ChunkAssembler(manifest.tensors, 1 << 30)
    for answer in answers:
        assembler.feed(answer.chunk)
    tensors = assembler.finish()
    assert tensors.keys() == double.live.keys()
    assert all(torch.equal(tensors[name], double.live[name]) for name in tensors)
    error = refusal(
        lambda: list(client.stub.FetchRelease(pb.FetchReleaseRequest(draft_version=99), timeout=10))
    )
    assert error.code is grpc.StatusCode.NOT_FOUND


def test_nice_trainer_trains_and_counts_core_seconds(tmp_path: Path) -> None:
    """A thread's nice value is inherited, and only root may lower it."""
    found: dict[int, tuple[int, CoreSeconds | None]] = {}

    def serve() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
        for nice in (0, 5, 9):
            config = make_config(tmp_path / str(nice), training={"nice": nice})
            with feeding(config) as (server, client):
                train(client, 1)
                thread = server.loop._thread.native_id
                assert thread is not None
                cores = server.loop.economy._cores()
                found[nice] = os.getpriority(os.PRIO_PROCESS, thread), cores

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert {nice: of_thread for nice, (of_thread, _) in found.items()} == {0: 7, 5: 7, 9: 9}
    assert all(cores is not None and cores.ran > 0 for _, cores in found.values())


def test_candidate_seconds_bounds_time_to_the_gate(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        replay={"max_epochs": 10_000},
        training={"steps_per_candidate": 1_000_000, "candidate_seconds": 0.05},
    )
    with feeding(config) as (_, client):
        client.send(*rollouts(60))
        client.wait_for(lambda s: sum(s.verdicts.values()) > 0 and not s.idle)


def test_gate_takes_at_most_a_fifth_of_the_time(tmp_path: Path) -> None:
    with running(make_config(tmp_path), train=False) as (server, _):
        loop = server.loop
        loop._steps_since_candidate, loop._first_step_at = 1, time.monotonic() - 100
        loop._gate_seconds = 10
        assert loop._is_due()
        loop._gate_seconds = 30
        assert not loop._is_due()
        loop._steps_since_candidate = loop.config.training.steps_per_candidate
        assert loop._is_due()


def test_state_from_before_the_newest_release_is_not_resumed(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with feeding(config) as (server, client):
        train(client, 0)
        # More than any training below comes to.
        server.loop.learner.steps += 100_000
        train(client, 1)
    before = server.loop.learner.steps
    without = make_config(tmp_path, training={"state_every_steps": 0})
    with feeding(without) as (_, client):
        version = train_until_released(client, first_seed=5)
    with running(config) as (server, client):
        tensors = server.publisher._registry.tensors(version)
        weights = server.loop.learner.head.state_dict()
        assert all(torch.equal(weights[name], tensors[name].float()) for name in weights)
        client.open()
        client.announce(1)
        train(client, 800)
    # Fewer steps than the stale state has, which must not be taken for the newer one.
    steps = server.loop.learner.steps
    assert 0 < steps < before
    with running(config, train=False) as (server, _):
        assert server.loop.learner.steps == steps


def test_another_run_begins_with_fresh_moments_and_a_warm_up(tmp_path: Path) -> None:
    config = make_config(tmp_path, training={"warmup_steps": 50})
    with running(config) as (server, client):
        learner = server.loop.learner
        client.open("first")
        client.announce(1)
        train(client, 0)
        first = learner.steps
        assert learner.steps_since_restart == first > 0
        client.open("second")
        client.announce(1)
        train(client, 1)
        assert learner.steps_since_restart == learner.steps - first > 0
        adam_steps = learner.state_dict()["optimizer.fc.weight.step"]
        assert int(adam_steps) == learner.steps_since_restart
    with running(config) as (server, client):
        # The same run again: it goes on where it was.
        client.open("second")
        client.announce(1)
        train(client, 2)
        learner = server.loop.learner
        assert learner.steps_since_restart == learner.steps - first


def test_training_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    with feeding(make_config(tmp_path, training={"optimizer": "muon"})) as (server, client):
        train(client, 0)
        assert server.loop.learner.steps > 0
    with pytest.raises(RefusedError, match=r"training state training\.optimizer: found muon"):
        TrainerServer(make_config(tmp_path))
    with running(make_config(tmp_path, training={"optimizer": "muon"}), train=False) as (again, _):
        assert again.loop.learner.steps == server.loop.learner.steps


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_training_thread_death_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(make_config(tmp_path)) as (server, client):

        def out_of_memory(*_: object) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(server.loop.learner, "step", out_of_memory)
        client.open()
        client.announce(1)
        client.send(*rollouts(20))
        assert server.died.wait(DEADLINE)
        assert server._counters.training_error == "the training thread ended with an error"


def test_training_waits_on_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with feeding(make_config(tmp_path)) as (server, client):
        database = server._store._db
        record, full, tries = database.record_draw, threading.Event(), threading.Semaphore(0)
        full.set()

        def until_there_is_space(draw: int, numbers: list[int]) -> None:
            if full.is_set():
                tries.release()
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error
            record(draw, numbers)

        monkeypatch.setattr(database, "record_draw", until_there_is_space)
        client.send(*rollouts(20))
        status = client.wait_for(lambda s: s.training_error)
        assert "training waits" in status.training_error and "disk is full" in caplog.text
        assert status.training_waits_for == release_pb2.REFUSAL_REASON_DISK
        assert "replay.directory" in status.training_error and status.train_steps == 0
        assert all(tries.acquire(timeout=DEADLINE) for _ in range(4))
        assert total(server._counters.training_waits) >= 3
        said = [one for one in caplog.records if one.name == "draft_trainer.training.loop"]
        assert len(said) == 1 and not server.died.is_set()
        full.clear()
        status = client.wait_for(lambda s: s.train_steps >= 1 and s.idle)
        assert status.training_error == "" and status.samples_pending == 0


def test_weights_trained_before_a_pause_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        tmp_path,
        economy={"mode": "when-it-pays"},
        training={"steps_per_candidate": 10_000, "batch_tokens": 64},
    )
    with running(config) as (server, client):
        economy, learner = server.loop.economy, server.loop.learner
        step = learner.step

        def decide(version: int) -> Decision:
            economy.last = Decision(version, version < 2, "the test's", economy.figures)
            return economy.last

        def then_the_policy_moves(*given: Any) -> StepMetrics:
            client.announce(2)
            return step(*given)

        monkeypatch.setattr(economy, "decide", decide)
        monkeypatch.setattr(learner, "step", then_the_policy_moves)
        client.open()
        client.announce(1)
        client.send(*rollouts(60))
        status = client.wait_for(lambda s: s.training_paused and s.idle)
        assert status.train_steps == 1 and status.samples_pending > 0
        # The status before may have been read while the verdict was written.
        assert client.status().last_verdict.trained_against_policy_version == 1
        # What was trained on does not stay in the way of what is to be stored.
        assert server._store.credit_bytes() == server._store.capacity_bytes


def test_draft_of_another_run_counts_from_first_version(
    tmp_path: Path,
) -> None:
    with running(make_config(tmp_path, publish={"rollout_servers": []}), train=False) as (
        server,
        client,
    ):
        pointer, registry = server.loop.pointer, server.loop.registry
        for run_id, against in (("another", 900), ("run", 503)):
            create(registry, run_id=run_id, trained_against_policy_version=against)
        client.open()
        for version in (500, 504):
            client.announce(version)
        for release, staleness in ((1, 4), (2, 1)):
            pointer.promote(release, pin=False)
            pointer.go_live(release)
            status = client.status()
            assert (status.served_release, status.served_staleness) == (release, staleness)
            assert status.HasField("promoted_trained_against") is (release == 2)


def test_new_run_at_same_version_gets_its_own_decision(
    tmp_path: Path,
) -> None:
    with running(make_config(tmp_path, economy={"mode": "when-it-pays"})) as (server, client):
        for run, version, missing in (
            ("one", 1, "gain_per_version"),
            ("one", 2, "generation_seconds_per_version"),
            ("other", 2, "gain_per_version"),
        ):
            client.open(run)
            client.announce(version)
            client.send(*rollouts(1, version, version))
            text = f"counts as paying: {missing}"
            client.wait_for(lambda s, text=text: text in s.training_decision)
            figures = GateFigures(incumbent_acceptance_length=2.0)
            server.loop.economy.compared(figures, released=False)


def test_new_run_does_not_judge_weights_of_last_run(tmp_path: Path) -> None:
    with feeding(make_config(tmp_path), train=False) as (server, client):
        loop = server.loop
        loop.position = replace(loop.position, run_id="run")
        loop._steps_since_candidate = loop._trained_against = 7
        client.open("another")
        client.announce(1)
        client.send(*rollouts(60))
        run = server.runs.current
        assert run is not None and run.run_id == "another"
        loop._consider(run)
        assert not client.status().HasField("last_verdict") and loop._steps_since_candidate == 7


def test_release_that_cannot_be_promoted_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with feeding(make_config(tmp_path)) as (server, client):
        pointer = server.loop.pointer
        offer, asked = pointer.offer, list[tuple[int, int]]()

        def locked_at_first(version: int, against: int) -> bool:
            asked.append((version, against))
            if len(asked) == 1:
                raise RefusedError("draft.registry", "locked", "a folder", "wait")
            return offer(version, against)

        monkeypatch.setattr(pointer, "offer", locked_at_first)
        assert train_until_released(client) == 1
        assert client.status().promoted_release == 0
        assert train_until_released(client, first_seed=40) == 2
        assert asked == [(1, 0), (2, 0)] and client.status().promoted_release == 2
        assert not server.died.is_set()


def test_batch_whose_policy_version_was_forgotten_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(make_config(tmp_path)) as (server, client):
        step, sent, drawn = server.loop.learner.step, threading.Event(), threading.Event()

        def late(*given: Any) -> StepMetrics:
            if not drawn.is_set():
                assert sent.wait(DEADLINE)
                for version in (2, 3, 4):
                    client.announce(version)
                drawn.set()
            return step(*given)

        monkeypatch.setattr(server.loop.learner, "step", late)
        client.open()
        client.announce(1)
        client.send(*rollouts(20))
        sent.set()
        assert drawn.wait(DEADLINE)
        client.send(*rollouts(20, seed=1, version=4))
        status = client.wait_for(lambda s: s.train_steps >= 1 and s.idle)
        assert status.samples_accepted == 40


def test_trainer_with_training_paused_keeps_samples(tmp_path: Path) -> None:
    config = make_config(tmp_path, economy={"mode": "never"})
    with feeding(config) as (_, client):
        client.send(*rollouts(8))
        status = client.wait_for(lambda status: status.training_paused)
        assert status.training_decision == "economy.mode is never"
        assert status.train_steps == 0
        assert status.samples_pending + status.samples_held_out == 8
        training = next(found for found in status.diagnosis if found.part == "training")
        assert training.found == "training is paused: economy.mode is never"
        # Twice 20 steps of up to four tokens, of the quarter of all prompts that is held out here.
        with Stream(client) as stream:
            stream.send(rollouts(1, seed=3)[0])
            assert stream.wanted_tokens == 640


def test_samples_stale_during_a_pause_are_not_lost(tmp_path: Path) -> None:
    config = make_config(tmp_path, economy={"mode": "never"}, replay={"max_policy_lag": 1})
    with feeding(config) as (_, client):
        client.send(*rollouts(8))
        pending = client.wait_for(lambda status: status.training_paused).samples_pending
        client.announce(3)
        status = client.wait_for(lambda status: status.samples_evicted)
        assert {r: n for r, n in status.evicted_by_reason.items() if n} == {"unneeded": pending}


def test_a_paused_trainer_wants_a_whole_sample_at_least(tmp_path: Path) -> None:
    sections = {"gate": {"min_anchors": 1}, "publish": {"num_speculative_tokens": 1}}
    config = make_config(tmp_path, economy={"mode": "never"}, **sections)
    sample = rollouts(9)[8]
    with feeding(config) as (_, client), Stream(client) as stream:
        stream.send(sample)
        # 16 tokens would measure the draft.
        assert stream.wanted_tokens == sample.tokens > 16
