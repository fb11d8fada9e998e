"""The recorder beside the service: what it writes, what it sheds, and what it survives."""

from __future__ import annotations

import errno
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from draft_trainer.config import RecordingConfig, ReplayConfig
from draft_trainer.counters import Counters, by_label, total
from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.ingest.run import Run, policy_of
from draft_trainer.ingest.store import SampleStore
from draft_trainer.recordings import recorder as recording_writer
from draft_trainer.recordings.recorder import Recorder, RecordingWriter
from draft_trainer.recordings.recording import INDEX_FILE, Recording
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.draft_trainer.recordings import FACTS, same
from tests.draft_trainer.rig import make_config, rollouts, running
from tests.draft_trainer.samples import sealed
from tests.draft_trainer.synthetic import HIDDEN, VOCAB, Policy, config, draft_vocab_ids
from tests.draft_trainer.test_recording import WRITE_UNTIL_KILLED

pytestmark = pytest.mark.slow


def new_run(folder: Path, run_id: str) -> Run:
    store = SampleStore(folder, ReplayConfig(capacity_bytes=1 << 20))
    store.begin(run_id, {})
    sizes = pb.PolicySpec(hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=8)
    return Run(run_id, policy_of(sizes), store, 2)


class Rig:
    """A recorder and a run whose policy version 1 is known."""

    def __init__(self, folder: Path, **changes: float) -> None:
        self.counters = Counters()
        self._samples = TemporaryDirectory()
        self.run = new_run(Path(self._samples.name), "run")
        self.policy = Policy()
        self.announce(1)
        limits = RecordingConfig.model_validate({"shard_bytes": 8_000, **changes})
        self.recorder = Recorder(folder, limits, config(), draft_vocab_ids(), self.counters)

    def announce(self, version: int) -> None:
        rows = self.policy.lm_head[draft_vocab_ids()]
        self.run.add_policy(PolicyHead(version, rows, self.policy.embed))

    def record(self, samples: Sequence[Sample]) -> None:
        """From the first offer to the recorder's end."""
        for sample in samples:
            self.recorder.offer(self.run, sample)
        self.recorder.start()
        assert self.recorder.stop(30)

    def counts(self) -> tuple[int, dict[str, int]]:
        recorded = total(self.counters.samples_recorded)
        return int(recorded), by_label(self.counters.recording_shed)


def test_the_service_records_what_it_accepts(tmp_path: Path) -> None:
    made = make_config(tmp_path, recording={"directory": str(tmp_path / "states")})
    messages = rollouts(12)
    with running(made, train=False) as (server, client):
        client.open("grpo-1")
        client.announce(1)
        acks = client.send(*messages, messages[0])
        assert [ack.status for ack in acks] == [pb.ACK_STATUS_ACCEPTED] * 12 + [
            pb.ACK_STATUS_DUPLICATE
        ]
    recording = Recording(tmp_path / "states" / "run-000000")
    assert recording.facts == FACTS.model_copy(update={"run_id": "grpo-1"})
    assert len(recording) == 12
    for found, sample in zip(
        map(recording.__getitem__, range(12)), Policy().samples(12), strict=True
    ):
        assert same(found, sealed(sample))
    heads = recording.policy_heads(draft_vocab_ids())
    assert torch.equal(heads.get(1).embed_tokens, Policy().embed)
    assert total(server._counters.samples_recorded) == 12


def test_the_queue_is_bounded_and_what_it_sheds_is_counted(tmp_path: Path) -> None:
    samples = Policy().samples(10)
    size = max(s.nbytes for s in samples)
    rig = Rig(tmp_path, queue_bytes=4 * size)
    for sample in samples:
        rig.recorder.offer(rig.run, sample)
    recorded, shed = rig.counts()
    assert recorded == 0 and 5 <= shed["queue_full"] <= 6
    rig.recorder.start()
    assert rig.recorder.stop(30)
    recorded, after = rig.counts()
    assert recorded == 10 - shed["queue_full"] and after == shed
    assert len(Recording(tmp_path / "run-000000")) == recorded


def test_the_directory_is_bounded_over_restarts(tmp_path: Path) -> None:
    samples = Policy().samples(40)
    capacity = 60_000
    kept = 0
    for _ in range(2):
        rig = Rig(tmp_path, capacity_bytes=capacity)
        for sample in samples:
            rig.recorder.offer(rig.run, sample)
        rig.recorder.start()
        assert rig.recorder.stop(30)
        recorded, shed = rig.counts()
        assert recorded + shed["capacity"] == 40
        kept += recorded
    assert 0 < kept < 40
    states = sum(s.nbytes for s in samples[:kept])
    assert capacity / 2 < states <= capacity
    # Headers and the index, which are not counted in advance, are small.
    assert sum(p.stat().st_size for p in tmp_path.rglob("*.safetensors")) < capacity + 20_000


def test_recordings_that_are_taken_away_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = Policy().samples(60)
    Rig(tmp_path, capacity_bytes=60_000).record(samples)
    rig = Rig(tmp_path, capacity_bytes=60_000)

    def record() -> None:
        for sample in samples:
            rig.recorder._guarded(partial(rig.recorder._record, rig.run, sample), 1)
        rig.recorder._guarded(rig.recorder._flush)

    record()
    shutil.rmtree(tmp_path / "run-000000")
    record()
    # It is not looked for with every sample.
    assert rig.counts() == (0, {"capacity": 120})
    monkeypatch.setattr(recording_writer, "SUM_SECONDS", 0.0)
    record()
    recorded, shed = rig.counts()
    assert 0 < recorded == len(Recording(tmp_path / "run-000001"))
    assert shed == {"capacity": 180 - recorded}
    # The one that it writes, which is full: a sample is lost, and the next begins another.
    shutil.rmtree(tmp_path / "run-000001")
    record()
    assert len(Recording(tmp_path / "run-000000")) == recorded
    assert rig.counts() == (2 * recorded, {"capacity": 239 - 2 * recorded, "write_failed": 1})


def test_another_run_gets_another_recording(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rig = Rig(tmp_path)
    samples = Policy().samples(4)
    other = new_run(tmp_path_factory.mktemp("samples"), "other")
    other.add_policy(rig.run.heads.get(1))
    for run, sample in zip((rig.run, rig.run, other, other), samples, strict=True):
        rig.recorder.offer(run, sample)
    rig.recorder.start()
    assert rig.recorder.stop(30)
    assert rig.counts() == (4, {})
    for number, name in enumerate(("run", "other")):
        recording = Recording(tmp_path / f"run-00000{number}")
        assert recording.facts.run_id == name and len(recording) == 2


def test_a_forgotten_policy_version_sheds_its_samples(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for version in (2, 3, 4):
        rig.announce(version)
    rig.recorder.offer(rig.run, Policy().samples(1)[0])
    rig.recorder.start()
    assert rig.recorder.stop(30)
    assert rig.counts() == (0, {"policy_forgotten": 1})


def test_recorder_queue_holds_no_space_of_the_store(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    (sample,) = Policy().samples(1)
    store = rig.run.store
    block = store.reserve(sample.nbytes)
    block[:] = sample.block[: sample.nbytes].numpy()
    stored = Sample(sealed(sample).header, torch.from_numpy(block))
    assert store.accept("run", [stored]) == [True]
    rig.recorder.offer(rig.run, stored)
    del stored, block
    assert store.credit_bytes() == store.capacity_bytes
    rig.recorder.start()
    assert rig.recorder.stop(30) and rig.counts() == (1, {})
    assert same(Recording(tmp_path / "run-000000")[0], sealed(sample))


def test_a_full_disk_loses_shards_not_the_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    samples = Policy().samples(20)
    save, calls = recording_writer.save_file, []

    def full_at_shard_2(tensors: dict[str, Tensor], *rest: object, **named: object) -> None:
        if "blocks" in tensors:
            calls.append(len(tensors["block_ends"]))
            if len(calls) == 2:
                raise SafetensorError("No space left on device")
        save(tensors, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(recording_writer, "save_file", full_at_shard_2)
    rig.record(samples)
    recorded, shed = rig.counts()
    # The sample that made the shard full is lost with it.
    assert shed == {"write_failed": calls[1] + 1} and recorded + shed["write_failed"] == 20
    recording = Recording(tmp_path / "run-000000")
    assert len(recording) == recorded
    assert not list(tmp_path.rglob(".*"))
    # What was lost takes none of recording.capacity_bytes.
    writer, head = rig.recorder._writer, rig.run.heads.get(1)
    assert writer is not None
    blocks = sum(recording[i].nbytes for i in range(recorded))
    matrices = [*head.tensors, draft_vocab_ids().long()]
    assert writer.nbytes == blocks + sum(tensor.nbytes for tensor in matrices)


def test_recorder_shard_without_index_entry_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, whole, written = Rig(tmp_path), recording_writer.written_whole, list[str]()

    @contextmanager
    def full_at_the_first_shards_entry(path: Path) -> Iterator[Path]:
        with whole(path) as temporary:
            written.append(path.name)
            shards = [name for name in written if name.startswith("states-")]
            if len(shards) == 1 and path.name == INDEX_FILE:
                raise OSError(errno.ENOSPC, "No space left on device")
            yield temporary

    monkeypatch.setattr(recording_writer, "written_whole", full_at_the_first_shards_entry)
    rig.record(Policy().samples(20))
    recorded, shed = rig.counts()
    assert shed["write_failed"] > 0 and recorded + shed["write_failed"] == 20
    assert len(Recording(tmp_path / "run-000000")) == recorded > 0


@pytest.mark.parametrize(
    "error",
    [
        RefusedError("run-000000", "files in it", "a new or empty folder", "use another"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        UnicodeEncodeError("ascii", "\u2260", 0, 1, "ordinal not in range"),
    ],
)
def test_no_failure_ends_the_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    rig = Rig(tmp_path)
    begun, writer = [], recording_writer.RecordingWriter

    def fails_once(*arguments: object) -> RecordingWriter:
        begun.append(arguments)
        if len(begun) == 1:
            raise error
        return writer(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recording_writer, "RecordingWriter", fails_once)
    rig.record(Policy().samples(3))
    assert rig.counts() == (2, {"write_failed": 1})


def test_recorder_removes_leftovers_of_killed_recorder(tmp_path: Path) -> None:
    killed, live, other = (tmp_path / name for name in ("run-000000", "run-000001", "run-000002"))
    done = subprocess.run(
        [sys.executable, "-c", WRITE_UNTIL_KILLED, str(killed), "5"], check=False, timeout=600
    )
    assert done.returncode == -signal.SIGKILL
    (part,) = killed.glob(".states-000000.safetensors-*")
    sound = {path for path in killed.iterdir() if path != part}
    (killed / ".tmpAb3_x9").write_bytes(b"x")
    writer = RecordingWriter(live, FACTS)
    other.mkdir()
    kept = [
        *(killed / ".tmp-of-somebody", killed / ".states-000000.safetensors"),
        # It is being written; and this is no recording.
        *(live / ".states-000000.safetensors-abcd1234", other / ".tmpabcdef"),
    ]
    for path in kept:
        path.write_bytes(b"x")
    rig = Rig(tmp_path)
    assert set(killed.iterdir()) == sound | set(kept[:2])
    assert all(path.exists() for path in kept)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert rig.recorder._older_bytes == sum(path.stat().st_size for path in files)
    # Once its writer is gone too.
    del writer
    Rig(tmp_path)
    assert not kept[2].exists()
