"""Clients that hold places, flood, or never read: sound ones are served all the while."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from slipstream.client import open_channel
from slipstream.errors import refused_from
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from tests.robustness import traffic
from tests.robustness.healthy import Feeder
from tests.robustness.overload import SILENT_ROLLOUT, SILENT_TRAINER, Crowd, flood
from tests.robustness.services import Process, start_trainer
from tests.waiting import until

from .conftest import DEADLINE, PATIENCE, Rollout, Size, Trainer

pytestmark = pytest.mark.contract("hostile peers")

MORE_MEMORY = 96 << 20


@pytest.fixture
def more_memory(size: Size) -> int:
    """Bytes that a crowd may take: connections, and the threads and messages of its calls."""
    return size(MORE_MEMORY, 2 * MORE_MEMORY)


@pytest.mark.slow
def test_silent_calls_hold_no_threads(trainer: Trainer, size: Size, more_memory: int) -> None:
    memory, calls = trainer.process.rss, size(300, 1_000)
    with Crowd(trainer.process.health) as crowd:
        crowd.silent_calls(SILENT_TRAINER, calls)
        for _ in range(5):
            trainer.feeder.serve()
        # Another one comes in too: it sends what it wants.
        late = Feeder(trainer.process.health, DEADLINE)
        late.serve()
        late.close()
        until(lambda: crowd.ended.total() == calls, DEADLINE, "all of them are ended by the server")
        assert set(crowd.ended) <= {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "OK"}, crowd.ended
    assert trainer.process.rss - memory < more_memory
    until(lambda: trainer.process.threads < 300, DEADLINE, "the threads of the calls are idle")


@pytest.mark.slow
def test_idle_sessions_release_rings_and_files(
    trainer: Trainer, size: Size, more_memory: int
) -> None:
    memory, files, sessions = trainer.process.rss, trainer.process.files, size(60, 1_000)
    with Crowd(trainer.process.health) as crowd:
        found = crowd.idle_sessions(sessions)
        crowd.bare_connections(size(100, 1_000))
        assert found == {"OK": sessions}
        trainer.feeder.serve()
    assert trainer.process.rss - memory < more_memory
    rings = lambda: len(list(Path("/dev/shm").glob("slipstream-samples-*")))  # noqa: E731
    until(lambda: trainer.process.files <= files + 2, DEADLINE, "connections and rings are closed")
    assert rings() == 0 or trainer.process.files <= files + 2


@pytest.mark.slow
def test_client_that_reads_no_acks_uses_bounded_memory(trainer: Trainer, size: Size) -> None:
    memory = trainer.process.rss
    refused = trainer.feeder.status().samples_refused
    with Crowd(trainer.process.health) as crowd:
        crowd.deaf_stream(trainer.feeder.session_id, size(100_000, 1_000_000))
        until(
            lambda: trainer.feeder.status().samples_refused > refused + 100,
            DEADLINE,
            "it is answered",
        )
        for _ in range(5):
            trainer.feeder.serve()
        assert trainer.process.rss - memory < MORE_MEMORY
        until(lambda: streams(trainer) == 1, DEADLINE, "its place is free, and the feeder's is not")
    trainer.feeder.serve()


def streams(trainer: Trainer) -> int:
    return sum(trainer.feeder.status().streams.values())


@pytest.mark.slow
def test_flood_of_refused_calls_logs_few_lines(
    trainer: Trainer, size: Size, more_memory: int
) -> None:
    memory, lines = trainer.process.rss, len(trainer.process.text.splitlines())
    calls = size(600, 10_000)
    request = traffic.open_run()
    request.policy.hidden_size = 1
    over = threading.Event()
    served = [0]

    def keep_serving() -> None:
        while not over.is_set():
            trainer.feeder.serve()
            served[0] += 1

    sound = threading.Thread(target=keep_serving)
    sound.start()
    try:
        path = "/slipstream.v1.DraftTrainer/OpenRun"
        found = flood(trainer.process.health, path, request.SerializeToString(), calls)
    finally:
        over.set()
        sound.join(DEADLINE)
    assert found.total() == calls
    assert set(found) <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    assert found["INVALID_ARGUMENT"] > 0 and served[0] > 0
    assert trainer.process.rss - memory < more_memory
    assert len(trainer.process.text.splitlines()) - lines < 10


@pytest.mark.slow
def test_streams_and_messages_over_limit_refused(trainer: Trainer) -> None:
    with open_channel(trainer.process.health) as channel:
        stub = pb_grpc.DraftTrainerStub(channel)

        def error_of(call: Callable[[], object]) -> grpc.RpcError:
            with pytest.raises(grpc.RpcError) as failed:
                call()
            return failed.value

        streams, over = [], threading.Event()
        for _ in range(7):
            stream = stub.StreamStates(
                held_open(traffic.header(trainer.feeder.session_id), over), timeout=DEADLINE
            )
            assert next(stream).credit.bytes > 0
            streams.append(stream)
        header = traffic.header(trainer.feeder.session_id)
        beyond = error_of(lambda: list(stub.StreamStates(iter([header]), timeout=DEADLINE)))
        refusal = refused_from(beyond)
        assert refusal is not None and refusal.field == "StreamStates"
        assert beyond.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        over.set()
        for stream in streams:
            stream.cancel()
        large = pb.RollBackReleaseRequest(reason="x" * (1 << 20))
        refusal = refused_from(error_of(lambda: stub.RollBackRelease(large, timeout=DEADLINE)))
        assert refusal is not None and refusal.field == "RollBackRelease request"
        assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        long = pb.PrepareSyncRequest(session_id="≠" * 10_000, policy_version=1)
        refusal = refused_from(error_of(lambda: stub.PrepareSync(long, timeout=DEADLINE)))
        assert refusal is not None and refusal.field == "session_id"
        assert refusal.found.endswith("(10002 characters)")
    trainer.feeder.serve()


@pytest.mark.slow
def test_batch_of_millions_of_empty_samples_refused(trainer: Trainer) -> None:
    memory = trainer.process.rss
    empty = b"\x0a\x00" * (16 << 20)
    from slipstream.tensors import _varint

    message = b"\x1a" + _varint(len(empty)) + empty
    fields = b"\x12\x00" * (16 << 20)
    with Crowd(trainer.process.health) as crowd:
        for data in (message, fields):
            header = traffic.header(trainer.feeder.session_id).SerializeToString()
            stream = crowd.channel().stream_stream("/slipstream.v1.DraftTrainer/StreamStates")
            with pytest.raises(grpc.RpcError) as failed:
                list(stream(iter([header, data]), timeout=DEADLINE))
            refusal = refused_from(failed.value)
            assert refusal is not None and refusal.field in ("batch", "request")
    trainer.feeder.serve()
    assert trainer.process.rss - memory < MORE_MEMORY + (64 << 20)


@pytest.mark.slow
def test_idle_stream_ends_and_frees_its_place(tmp_path: Path) -> None:
    process = start_trainer(tmp_path, seconds=PATIENCE, idle=PATIENCE, streams=1)
    try:
        feeder = Feeder(process.health, DEADLINE)
        feeder.serve()
        assert not any(each.acks.acks for each in feeder._call), (
            "ended without an error: its client opens another one"
        )
        feeder.close()
        Feeder(process.health, DEADLINE).close()
    finally:
        assert process.stop() == 0
    assert "Traceback" not in process.text


# A machine may take longer than ``message_timeout_s`` from one message to the next.
FEEDING = """
import grpc, time
from tests.robustness.healthy import Feeder

def opened():
    while True:
        try:
            return Feeder({address!r}, {deadline})
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise

feeder = opened()
print("up", flush=True)
while True:
    feeder.serve()
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_unplugged_client_frees_its_place(tmp_path: Path) -> None:
    process = start_trainer(tmp_path, seconds=1.0, streams=1)
    code = FEEDING.format(address=process.health, deadline=DEADLINE)
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None and client.stdout.readline() == b"up\n"
        assert not can_stream(process), "its place is taken"
        # As if its machine were unplugged: it answers no ping any more.
        client.send_signal(signal.SIGSTOP)
        until(lambda: can_stream(process), DEADLINE, "its place is free")
    finally:
        client.kill()
        client.wait()
        assert client.stdout is not None
        client.stdout.close()
        assert process.stop() == 0


def can_stream(process: Process) -> bool:
    try:
        Feeder(process.health, DEADLINE).close()
    except grpc.RpcError as error:
        # The second where this machine took longer than ``message_timeout_s`` for a message.
        refused = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert error.code() in refused
        return False
    return True


@pytest.mark.slow
def test_slow_stages_do_not_block_others(rollout: Rollout, size: Size, more_memory: int) -> None:
    memory, calls = rollout.process.rss, size(300, 1_000)
    with Crowd(rollout.process.health) as crowd:
        crowd.slow_stages(size(5, 32))
        crowd.silent_calls(SILENT_ROLLOUT, calls)
        for _ in range(5):
            rollout.stager.serve()
        until(
            lambda: crowd.ended.total() >= calls, DEADLINE, "silent calls are ended by the server"
        )
        assert set(crowd.ended) <= {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "OK"}, crowd.ended
    rollout.stager.serve()
    assert rollout.process.rss - memory < more_memory


def held_open(
    first: pb.StreamStatesRequest, over: threading.Event
) -> Iterator[pb.StreamStatesRequest]:
    yield first
    over.wait(DEADLINE)


def test_compressed_message_over_limit_is_not_inflated(trainer: Trainer, rollout: Rollout) -> None:
    for process, path in (
        (trainer.process, "/slipstream.v1.DraftTrainer/GetStatus"),
        (rollout.process, "/slipstream.v1.RolloutServer/GetState"),
    ):
        before = process.usage()[1]
        unlimited = (("grpc.max_send_message_length", -1),)
        with (
            grpc.insecure_channel(process.health, options=unlimited) as channel,
            pytest.raises(grpc.RpcError) as failed,
        ):
            channel.unary_unary(path)(
                bytes(256 << 20), timeout=DEADLINE, compression=grpc.Compression.Gzip
            )
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert process.usage()[1] - before < 128 << 20
    trainer.feeder.serve()
    rollout.stager.serve()


def test_log_injection_is_refused(trainer: Trainer) -> None:
    with open_channel(trainer.process.health) as channel:
        stub = pb_grpc.DraftTrainerStub(channel)
        request = traffic.open_run()
        request.client = "bridge\n2026-01-01 INFO rolled back"
        with pytest.raises(grpc.RpcError) as failed:
            stub.OpenRun(request, timeout=DEADLINE)
        refusal = refused_from(failed.value)
        assert refusal is not None and refusal.field == "client"
        with pytest.raises(grpc.RpcError) as failed:
            stub.RollBackRelease(pb.RollBackReleaseRequest(reason="a\rb"), timeout=DEADLINE)
        refusal = refused_from(failed.value)
        assert refusal is not None and refusal.field == "reason"
    assert "\n2026-01-01 INFO rolled" not in trainer.process.text
