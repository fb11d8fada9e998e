"""The trainer as its clients see it: runs, policies, training, releases, status."""

from __future__ import annotations

import errno
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from benchmarks.publish_faults.memory_server import MemoryServer
from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.releases import fleet
from draft_trainer.releases.pointer import PointerStore
from draft_trainer.releases.registry import Registry
from draft_trainer.server import service
from draft_trainer.server.app import TrainerServer
from slipstream.client import open_channel
from slipstream.errors import RefusedError
from slipstream.v1 import console_pb2, release_pb2
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.draft_trainer.registry_rig import create
from tests.draft_trainer.rig import (
    DEADLINE,
    LAYERS,
    SPEC,
    Client,
    Stream,
    feeding,
    make_config,
    refusal,
    rollouts,
    running,
    train,
    write_draft,
)
from tests.draft_trainer.synthetic import HIDDEN, VOCAB, Policy, draft_vocab_ids
from tests.waiting import until


def spec(**changes: int) -> pb.PolicySpec:
    message = pb.PolicySpec()
    message.CopyFrom(SPEC)
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def test_open_run_answers_what_to_capture(tmp_path: Path) -> None:
    config = make_config(tmp_path, publish={"rollout_servers": ["127.0.0.1:9"]})
    with running(config, train=False) as (_, client):
        answer = client.open()
        assert list(answer.aux_layers) == list(LAYERS)
        assert list(answer.draft_vocab_ids) == draft_vocab_ids().tolist()
        assert answer.max_tokens_per_sample == 2048
        assert not answer.HasField("latest_policy_version")
        assert list(answer.rollout_servers) == ["127.0.0.1:9"]
        client.announce(4)
        again = client.open()
        assert again.session_id != answer.session_id
        assert again.latest_policy_version == 4


@pytest.mark.parametrize(
    ("changes", "field", "found", "expected"),
    [
        ({"hidden_size": 32}, "policy.hidden_size", "32", str(HIDDEN)),
        ({"num_hidden_layers": 4}, "policy.num_hidden_layers", "4", "at least 5"),
    ],
)
def test_policy_that_does_not_fit_the_draft(
    tmp_path: Path, changes: dict[str, int], field: str, found: str, expected: str
) -> None:
    with running(make_config(tmp_path), train=False) as (_, client):
        error = refusal(lambda: client.open(policy=spec(**changes)))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.field, error.found) == (field, found)
        assert expected in error.expected
        # A draft may read after the last layer.
        assert client.open(policy=spec(num_hidden_layers=LAYERS[-1])).session_id


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with running(make_config(tmp_path), train=False) as (_, client):
        assert refusal(lambda: client.open(run_id="")).field == "run_id"
        client.open("one")
        error = refusal(lambda: client.open("one", spec(num_hidden_layers=9)))
        assert error.field == "policy"
        assert "'num_hidden_layers': 9" in error.found and "_layers': 8" in error.expected
        client.announce(7)
        with Stream(client) as stream:
            assert stream.send(rollouts(1, version=7)[0]).status == pb.ACK_STATUS_ACCEPTED
            error = refusal(lambda: client.open("two"))
            assert error.code is grpc.StatusCode.FAILED_PRECONDITION
            assert "1 stream(s)" in error.expected
            # The same run may be opened again while it is fed.
            client.open("one")
            stream.finish()
        old = client.session_id
        opened = client.open("two")
        assert not opened.HasField("latest_policy_version")
        status = client.status()
        assert status.replay_bytes == 0 and not status.HasField("policy_version")
        assert not status.HasField("policy_registered_at")
        client.announce(7)
        assert client.status().policy_registered_at > status.time
        error = refusal(lambda: next(Stream(client, old).call))
        assert error.field == "session_id"
        assert error.reason == release_pb2.REFUSAL_REASON_SESSION


def test_refused_policy_announcement_changes_nothing(tmp_path: Path) -> None:
    policy = Policy()
    rows, embed = policy.lm_head[draft_vocab_ids()], policy.embed
    with running(make_config(tmp_path), train=False) as (_, client):
        client.open()

        def refused(rows: torch.Tensor, embed: torch.Tensor, **options: object) -> RefusedError:
            tensors = {"lm_head.weight": rows, "embed_tokens.weight": embed}
            return refusal(lambda: client.announce(1, tensors=tensors, **options))  # type: ignore[arg-type]

        error = refused(policy.lm_head, embed)
        assert error.field == "lm_head.weight.shape"
        assert (error.found, error.expected) == (f"[{VOCAB}, {HIDDEN}]", f"[16, {HIDDEN}]")
        error = refused(rows, embed[:, :8])
        assert error.field == "embed_tokens.weight.shape"
        error = refused(rows.int(), embed)
        assert error.field == "lm_head.weight.dtype"
        bad = rows.clone()
        bad[3, 4] = float("nan")
        error = refused(bad, embed)
        assert (error.field, error.found) == ("lm_head.weight", "values that are not finite")
        error = refused(rows, embed, send=["lm_head.weight"])
        assert error.code is grpc.StatusCode.FAILED_PRECONDITION
        assert error.found == "no chunks of embed_tokens.weight"
        error = refusal(lambda: client.announce(1, tensors={"lm_head.weight": rows}))
        assert (error.field, error.found) == ("tensors", "['lm_head.weight']")
        assert not client.status().HasField("policy_version")
        client.announce(1)
        assert client.status().policy_version == 1


def test_announce_without_tensors_needs_the_lead(tmp_path: Path) -> None:
    with running(make_config(tmp_path), train=False) as (_, client):
        client.open()

        def ask(version: int) -> pb.AnnouncePolicyResponse:
            header = pb.AnnouncePolicyHeader(session_id=client.session_id, policy_version=version)
            requests = [pb.AnnouncePolicyRequest(header=header)]
            return client.stub.AnnouncePolicy(iter(requests), timeout=DEADLINE)

        error = refusal(lambda: ask(2))
        assert (error.field, error.code) == ("lead", grpc.StatusCode.FAILED_PRECONDITION)
        assert error.reason == release_pb2.REFUSAL_REASON_NOT_ANNOUNCED
        client.announce(2)
        assert ask(2).policy_version == 2
        assert client.status().policy_version == 2
        # Nobody announces it any more.
        assert refusal(lambda: ask(1)).field == "policy_version"


def head_of(server: TrainerServer, version: int) -> PolicyHead:
    assert server.runs.current is not None
    return server.runs.current.heads.get(version)


def test_announced_differences_are_of_a_held_version(tmp_path: Path) -> None:
    policies = [Policy() for _ in range(6)]
    for number, policy in enumerate(policies):
        policy.embed = policy.embed.clone()
        policy.embed[number] += 1.0
    settings = make_config(tmp_path)
    with feeding(settings, train=False) as (server, client):
        client.announce(2, policies[0])
        for number in range(1, 5):
            send, before = ["embed_tokens.weight"], policies[number - 1]
            client.announce(2 + number, policies[number], send=send, before=before)
            held = head_of(server, 2 + number)
            assert torch.equal(held.embed_tokens, policies[number].embed)
        # Version 2 is forgotten, and with it its embeddings.
        error = refusal(lambda: client.announce(7, policies[5], before=policies[0]))
        assert (error.field, error.code) == (
            "bases.embed_tokens.weight",
            grpc.StatusCode.FAILED_PRECONDITION,
        )
    with running(settings, train=False) as (server, client):
        # A trainer that is started again has the newest ones.
        client.open()
        client.announce(7, policies[5], send=["embed_tokens.weight"], before=policies[4])
        held = head_of(server, 7)
        assert torch.equal(held.embed_tokens, policies[5].embed)


def test_announce_sends_only_unknown_tensors(tmp_path: Path) -> None:
    with feeding(make_config(tmp_path), train=False) as (_, client):
        assert client.announce(2, send=[]).policy_version == 2
        moved = Policy()
        moved.lm_head = moved.lm_head + 1.0
        assert client.announce(3, moved, send=["lm_head.weight"]).policy_version == 3
        # A retry after a lost answer changes nothing; other content does not pass for it.
        assert client.announce(3, moved).policy_version == 3
        error = refusal(lambda: client.announce(3, Policy(1)))
        assert (error.field, error.found, error.expected) == (
            "policy_version",
            "3",
            "higher than 3",
        )
        assert error.code is grpc.StatusCode.FAILED_PRECONDITION
        # A rank that is a version late announces what another one has announced.
        assert client.announce(2).policy_version == 2
        assert client.status().policy_version == 3
        error = refusal(lambda: client.announce(2, Policy(1)))
        assert error.field == "policy_version"


def test_old_releases_are_removed_at_start_and_on_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full is written to after that alone."""
    with running(make_config(tmp_path), train=False) as (server, _):
        for seed in range(4):
            create(server.loop.registry, seed)
    with running(make_config(tmp_path, draft={"keep_releases": 2})) as (server, client):
        registry = server.loop.registry
        assert registry.versions() == (0, 3, 4)
        # Draft 4 is what training goes on from.
        for seed in range(3):
            create(registry, seed, source=release_pb2.RELEASE_SOURCE_IMPORTED)
        with registry.using(5):
            registry.retain(server.loop.config.draft)
        assert registry.versions() == (0, 4, 5, 6, 7)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(registry, "create", full)
        client.open()
        client.announce(1)
        seeds = iter(range(40))
        train(client, next(seeds))
        # Asked again: the first status that is idle may still have the verdict before.
        while client.status().last_verdict.outcome != "write_failed":
            assert registry.versions() == (0, 4, 5, 6, 7)
            train(client, next(seeds))
        assert registry.versions() == (0, 4, 6, 7) and not server.died.is_set()


def test_missing_promoted_release_is_refused(tmp_path: Path) -> None:
    with running(make_config(tmp_path), train=False):
        pass
    with Registry(tmp_path / "registry").writing() as state:
        PointerStore(state, lambda version: None).promote(7, pin=False)
    with pytest.raises(RefusedError) as caught:
        TrainerServer(make_config(tmp_path))
    assert (caught.value.field, caught.value.found) == ("draft_version", "7")


def test_operator_waits_for_publish_until_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(make_config(tmp_path), train=False) as (server, client):
        before = server.publisher.pointer.now
        with monkeypatch.context() as patch, server.publisher.committing():
            patch.setattr(service, "ANSWER_SECONDS", DEADLINE)
            for move in (client.roll_back, lambda: client.promote(0, pin=True)):
                assert refusal(move).code is grpc.StatusCode.ABORTED
        assert refusal(client.roll_back).code is grpc.StatusCode.FAILED_PRECONDITION
        assert server.publisher.pointer.now == before
        assert client.promote(0, pin=True).draft_version == 0 and client.status().pinned


def test_sync_waits_for_publish_until_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stages nothing later, when nobody asks for it any more."""
    with ExitStack() as closing:
        double = MemoryServer(write_draft(tmp_path / "another", 9))
        closing.callback(double.stop)
        publish = {"rollout_servers": [double.address], "reconcile_s": 0.0}
        config = make_config(tmp_path, publish=publish)
        server, client = closing.enter_context(running(config, train=False))
        client.open()
        with monkeypatch.context() as patch, server.publisher._publishing():
            patch.setattr(service, "ANSWER_SECONDS", DEADLINE)
            assert refusal(client.prepare).code is grpc.StatusCode.ABORTED
        assert not double.state.staged
        client.prepare()
        assert double.staged == ["draft-0"]


def test_sync_does_not_wait_for_dns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as closing:
        double, over = MemoryServer(write_draft(tmp_path / "another", 9)), threading.Event()
        closing.callback(double.stop)

        def silent(entry: str) -> list[str]:
            assert over.wait(2 * DEADLINE)
            return []

        monkeypatch.setattr(fleet, "look_up", lambda entry: [double.address])
        publish = {"rollout_servers": ["dns:rollouts:1"], "reconcile_s": 0.0}
        config = make_config(tmp_path, publish=publish)
        _, client = closing.enter_context(running(config, train=False))
        closing.callback(over.set)
        client.open()
        monkeypatch.setattr(fleet, "look_up", silent)
        client.prepare()
        assert double.staged == ["draft-0"], "the servers that were known"


def test_stop_while_the_gate_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with feeding(make_config(tmp_path)) as (server, client):
        gate, judges = server.loop.gate, threading.Event()
        real = gate.judge

        def judge(*arguments: Any) -> Any:
            judges.set()
            assert server._reconciler._stopping.wait(DEADLINE)
            return real(*arguments)

        monkeypatch.setattr(gate, "judge", judge)
        client.send(*rollouts(60))
        assert judges.wait(DEADLINE)
        assert server.stop()


def test_health_and_reflection(tmp_path: Path) -> None:
    with (
        running(make_config(tmp_path), train=False) as (server, _),
        open_channel(server.address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "slipstream.v1.DraftTrainer"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(health.Watch(health_pb2.HealthCheckRequest(), timeout=10))
        # A gRPC client that checks health takes this one for "no health service", and goes on.
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answer = next(stub.ServerReflectionInfo(iter([ask]), timeout=10))
        names = {s.name for s in answer.list_services_response.service}
        assert {"slipstream.v1.DraftTrainer", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_printed_ipv6_addresses_can_be_called(tmp_path: Path, host: str) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
    with running(make_config(tmp_path, server={"host": host}), train=False) as (server, client):
        assert client.status().samples_pending == 0
        with urlopen(f"{server.ready_line.rpartition('web=')[2]}metrics") as answer:
            assert answer.status == 200


def test_slow_state_db_stalls_no_other_call(tmp_path: Path) -> None:
    with (
        running(make_config(tmp_path), train=False) as (server, client),
        ThreadPoolExecutor() as pool,
    ):
        asked = console_pb2.WatchEventsRequest(newest=5)
        client.open()
        run = server.runs.current
        assert run is not None
        with server.status.state.lock, open_channel(server.address) as channel:
            watch = client.stub.WatchEvents(asked, timeout=60)
            history = client.stub.GetHistory.future(console_pb2.GetHistoryRequest(), timeout=60)
            announced = pool.submit(client.announce, 4)
            until(lambda: run.latest_policy_version == 4)
            _serves(channel)
            assert not history.done() and not announced.done()
        assert announced.result().policy_version == 4
        assert next(watch).kind == "trainer_started"
        assert list(history.result().verdicts) == []


def test_slow_sample_store_stalls_no_other_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        running(make_config(tmp_path), train=False) as (server, client),
        ThreadPoolExecutor() as pool,
    ):
        client.open("one")
        begins, begin = threading.Event(), server._store.begin

        def noted(*facts: Any) -> None:
            begins.set()
            begin(*facts)

        monkeypatch.setattr(server._store, "begin", noted)
        with open_channel(server.address) as channel:
            with server._store._lock:
                stream = Stream(client)
                until(lambda: bool(server.runs._open_streams))
                _serves(channel)
            with stream:
                stream.finish()
            with server._store._lock:
                opened = pool.submit(Client(channel).open, "two")
                assert begins.wait(DEADLINE)
                # Run one is over, so its session is looked for in vain, and at once.
                assert refusal(client.prepare).field == "session_id"
                assert refusal(lambda: client.announce(1)).field == "session_id"
                _serves(channel)
                assert not opened.done()
            assert opened.result().session_id


def _serves(channel: grpc.Channel) -> None:
    check = health_pb2_grpc.HealthStub(channel).Check
    for _ in range(20):
        answer = check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_streams_and_watchers_are_bounded(tmp_path: Path) -> None:
    with running(make_config(tmp_path, server={"max_streams": 2}), train=False) as (_, client):
        client.open()
        with Stream(client), Stream(client):
            error = refusal(lambda: next(Stream(client).call))
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "at most 2" in error.expected
        asked = console_pb2.WatchEventsRequest(follow=True)
        watches = [client.stub.WatchEvents(asked, timeout=60) for _ in range(16)]
        for watch in watches:
            next(watch)
        error = refusal(lambda: next(client.stub.WatchEvents(asked, timeout=60)))
        assert error.field == "server.max_calls"
        assert error.found == "16 calls of WatchEvents in progress"
        assert client.status().idle
        for watch in watches:
            watch.cancel()


def test_batch_is_freed_while_training_waits_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(make_config(tmp_path)) as (server, client):
        held, sent, enough = list[int](), threading.Event(), threading.Event()

        def short(*_: object) -> None:
            assert sent.wait(DEADLINE)
            reason = release_pb2.REFUSAL_REASON_DEVICE_MEMORY
            raise RefusedError("gpu", "too little", "room for a pass", "lower it", reason=reason)

        def wait(error: str) -> None:
            held.append(store.capacity_bytes - store.credit_bytes())
            enough.wait(DEADLINE)

        store = server._store
        monkeypatch.setattr(server.loop.learner, "step", short)
        monkeypatch.setattr(server.loop, "_wait_for_memory", wait)
        client.open()
        client.announce(1)
        client.send(*rollouts(20))
        sent.set()
        client.wait_for(lambda _: held)
        assert client.status().samples_pending > 0 and held[0] == 0
        enough.set()


def test_open_streams_end_when_the_trainer_stops(tmp_path: Path) -> None:
    with running(make_config(tmp_path)) as (server, client):
        client.open()
        stream = Stream(client).__enter__()
        watch = client.stub.WatchEvents(console_pb2.WatchEventsRequest(follow=True), timeout=60)
        next(watch)
        assert server.stop()
        # Both end by themselves, with OK.
        assert not [each for each in stream.call if each.acks.acks]
        assert stream.call.code() is grpc.StatusCode.OK
        list(watch)
        assert watch.code() is grpc.StatusCode.OK
        with pytest.raises(grpc.RpcError):
            client.status()
