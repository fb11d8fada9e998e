"""Recorded states: what was put in comes out, and what was damaged or does not fit is refused."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from draft_trainer.config import RecordingConfig, ReplayConfig
from draft_trainer.counters import Counters, by_label, total
from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.ingest.run import PolicySizes, Run
from draft_trainer.ingest.store import SampleStore
from draft_trainer.recordings import recorder as recording_writer
from draft_trainer.recordings.recorder import Recorder, RecordingWriter
from draft_trainer.recordings.recording import Recording
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.draft_trainer.recordings import FACTS, record_synthetic
from tests.draft_trainer.rig import make_config, rollouts, running
from tests.draft_trainer.samples import sealed
from tests.draft_trainer.synthetic import HIDDEN, VOCAB, Policy, config, draft_vocab_ids


def same(found: Sample, expected: Sample) -> bool:
    """Equal descriptions and equal bytes; a sample that was sent has a checksum too."""
    return _described(found) == _described(expected) and torch.equal(
        found.block[: found.nbytes], expected.block[: expected.nbytes]
    )


def _described(sample: Sample) -> pb.VerifierStates:
    header = pb.VerifierStates()
    header.CopyFrom(sample.header)
    for name in ("span", "checksum", "checksum_kind"):
        header.packed.ClearField(name)
    return header


def bfloat16(sample: Sample, version: int = 1) -> Sample:
    return sample.repacked(
        aux=sample.aux.bfloat16(),
        final_hidden=sample.final_hidden.bfloat16(),
        policy_version=version,
    )


@pytest.fixture
def policy() -> Policy:
    return Policy()


def test_samples_come_back_as_they_were_in_bounded_shards(tmp_path: Path, policy: Policy) -> None:
    samples = policy.samples(40)
    samples = [*samples[:20], *(bfloat16(s, 2) for s in samples[20:])]
    limit = 20_000
    index = record_synthetic(tmp_path, samples, {1: policy, 2: Policy(1)}, shard_bytes=limit)
    ends = list(accumulate(shard.samples for shard in index.shards))
    assert len(ends) > 4 and ends[-1] == 40
    for start, end in pairwise([0, *ends]):
        size = sum(s.nbytes for s in samples[start:end])
        assert size <= limit
        # A shard ends where it is full, not sooner; types may be mixed.
        assert end == 40 or size + samples[end].nbytes > limit
    recording = Recording(tmp_path)
    assert len(recording) == 40 and recording.index.tokens == sum(s.tokens for s in samples)
    for number in (39, 0, 20, 19, 7):
        assert same(recording[number], samples[number])
    assert all(same(recording[i], samples[i]) for i in range(40))
    assert recording.lengths() == [s.tokens for s in samples]
    assert recording.groups() == [s.group for s in samples]
    with pytest.raises(IndexError):
        recording[40]


def test_counts_are_of_completion_tokens_only(tmp_path: Path, policy: Policy) -> None:
    samples = policy.samples(10)
    record_synthetic(tmp_path, samples, {1: policy}, shard_bytes=10_000)
    expected = Counter(t for s in samples for t in s.token_ids[s.loss_mask].tolist())
    counts = Recording(tmp_path).completion_token_counts()
    assert counts.tolist() == [expected[token] for token in range(VOCAB)]


def test_matrices_are_stored_once_per_content(tmp_path: Path, policy: Policy) -> None:
    frozen = Policy(1)
    frozen.embed = policy.embed
    record_synthetic(tmp_path, policy.samples(3), {1: policy, 2: frozen, 3: policy})
    assert len(list(tmp_path.glob("matrix-*"))) == 3
    heads = Recording(tmp_path).policy_heads(draft_vocab_ids())
    assert heads.versions == (1, 2, 3)
    assert torch.equal(heads.get(2).lm_head_rows, frozen.lm_head[draft_vocab_ids()])
    assert torch.equal(heads.get(3).embed_tokens, policy.embed)


def test_recorded_rows_are_found_by_their_ids(tmp_path: Path, policy: Policy) -> None:
    record_synthetic(tmp_path, policy.samples(3), {1: policy}, rows=draft_vocab_ids())
    recording = Recording(tmp_path)
    assert torch.equal(recording.lm_head_ids(), draft_vocab_ids())
    some = draft_vocab_ids()[2::3]
    rows = recording.policy_heads(some).get(1).lm_head_rows
    assert torch.equal(rows, policy.lm_head[some])
    with pytest.raises(RefusedError, match=r"draft vocabulary: found 8 tokens without .* \[2, 5"):
        recording.policy_heads(torch.arange(VOCAB))


def test_layers_can_be_narrowed_to(tmp_path: Path, policy: Policy) -> None:
    (sample,) = policy.samples(1)
    record_synthetic(tmp_path, [sample], {1: policy})
    recording = Recording(tmp_path)
    recording.select_layers((2, 5))
    wanted = torch.cat([sample.aux[:, :HIDDEN], sample.aux[:, 2 * HIDDEN :]], dim=1)
    assert torch.equal(recording[0].aux, wanted)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"hidden_size": 32, "target_hidden_size": 32},
            "target_hidden_size: found 32, expected 16",
        ),
        ({"vocab_size": 25}, "vocab_size: found 25, expected 24"),
        ({"aux_layer_ids": (2, 3, 5)}, r"auxiliary layers: found \[2, 3, 5\]"),
    ],
)
def test_a_draft_of_another_policy_is_refused(
    tmp_path: Path, policy: Policy, changes: dict[str, object], text: str
) -> None:
    record_synthetic(tmp_path, policy.samples(1), {1: policy})
    with pytest.raises(RefusedError, match=text):
        Recording(tmp_path).fit_to(config(**changes))  # type: ignore[arg-type]


def test_an_lm_head_of_another_version_is_refused(tmp_path: Path, policy: Policy) -> None:
    record_synthetic(tmp_path, policy.samples(3), {1: Policy(1)})
    with pytest.raises(RefusedError, match=r"teacher.logits: found .* policy version 1"):
        Recording(tmp_path).policy_heads(draft_vocab_ids())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def drop_policy(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    del index["policies"]["1"]
    (folder / "index.json").write_text(json.dumps(index))


def set_format(folder: Path) -> None:
    text = (folder / "index.json").read_text()
    (folder / "index.json").write_text(text.replace("recording/2", "recording/1"))


SHARD = "states-000000.safetensors"


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda f: flip(f / SHARD), f"{SHARD}: found .* bytes with SHA-256"),
        (lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-1]), f"{SHARD}"),
        (lambda f: (f / SHARD).unlink(), f"{SHARD}: found .*No such file"),
        (lambda f: flip(next(f.glob("matrix-*"))), "matrix-.*: found SHA-256"),
        (lambda f: next(f.glob("matrix-*")).unlink(), "matrix-.*No such file"),
        (drop_policy, r"policy_version: found \[1\], whose lm_head was not recorded"),
        (set_format, "index.json: format"),
        (lambda f: (f / "index.json").write_text("{"), "index.json: found Invalid JSON"),
        (lambda f: (f / "index.json").unlink(), "index.json: found No such file"),
    ],
)
def test_damage_is_refused_by_name(
    tmp_path: Path, policy: Policy, edit: Callable[[Path], None], text: str
) -> None:
    record_synthetic(tmp_path, policy.samples(3), {1: policy})
    edit(tmp_path)
    with pytest.raises(RefusedError, match=text):
        Recording(tmp_path).policy_heads(draft_vocab_ids())


def test_the_folder_above_recordings_names_them(tmp_path: Path, policy: Policy) -> None:
    for name in ("run-000000", "run-000001"):
        record_synthetic(tmp_path / name, policy.samples(1), {1: policy})
    with pytest.raises(RefusedError, match=r"give one of .*: run-000000, run-000001"):
        Recording(tmp_path)


def test_what_cannot_be_recorded_is_refused(tmp_path: Path, policy: Policy) -> None:
    sample = policy.samples(1)[0]
    writer = RecordingWriter(tmp_path, FACTS)
    with pytest.raises(RefusedError, match="files in it"):
        RecordingWriter(tmp_path, FACTS)
    with pytest.raises(RefusedError, match="policy_version: found 1"):
        writer.add(sample)
    with pytest.raises(RefusedError, match=r"lm_head: found .*\[16, 16\]"):
        writer.add_policy(PolicyHead(1, policy.lm_head[:16], policy.embed), None)
    writer.add_policy(PolicyHead(1, policy.lm_head, policy.embed), None)
    with pytest.raises(RefusedError, match="policy_version: found 1"):
        writer.add_policy(PolicyHead(1, policy.lm_head, policy.embed), None)
    poisoned = sample.aux.clone()
    poisoned[3, 7] = torch.nan
    for name, changes in (
        ("aux_layers", {"aux": sample.aux[:, :HIDDEN], "aux_layers": (2,)}),
        ("aux_hidden_states", {"aux": poisoned}),
        ("token_ids", {"token_ids": sample.token_ids + VOCAB}),
    ):
        with pytest.raises(RefusedError, match=f"^{name}"):
            writer.add(sample.repacked(**changes))
    assert not writer.waiting


WRITE_UNTIL_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.draft_trainer.recordings import FACTS
from tests.draft_trainer.synthetic import Policy
from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.recordings.recorder import RecordingWriter

left = int(sys.argv[2])
def on_event(name, arguments):
    global left
    if name == "os.rename":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(on_event)
policy = Policy()
with RecordingWriter(Path(sys.argv[1]), FACTS, 10_000) as writer:
    writer.add_policy(PolicyHead(1, policy.lm_head, policy.embed), None)
    for sample in policy.samples(30):
        writer.add(sample)
"""


@pytest.mark.parametrize("rename", [6, 7])
def test_a_kill_leaves_what_was_written(tmp_path: Path, policy: Policy, rename: int) -> None:
    """Renames: the empty index, two matrices, the index; then a shard and the index by turns."""
    done = subprocess.run(
        [sys.executable, "-c", WRITE_UNTIL_KILLED, str(tmp_path / "r"), str(rename)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=600,
    )
    assert done.returncode == -signal.SIGKILL
    recording, samples = None, policy.samples(30)
    if rename == 6:  # the first index that names a shard
        with pytest.raises(RefusedError, match="no samples"):
            Recording(tmp_path / "r")
    else:
        recording = Recording(tmp_path / "r")
        assert 0 < len(recording) < 30
        assert all(same(recording[i], samples[i]) for i in range(len(recording)))


# The recorder beside the service.

# Nothing is shed because a thread was held up.
PATIENT = {"offer_timeout_s": 60.0}


def new_run(folder: Path, run_id: str) -> Run:
    store = SampleStore(folder, ReplayConfig(capacity_bytes=1 << 20))
    store.begin(run_id, {})
    return Run(run_id, PolicySizes(HIDDEN, VOCAB, 8), store, 2)


class Rig:
    """A recorder and a run whose policy version 1 is known."""

    def __init__(self, folder: Path, **changes: float) -> None:
        self.counters = Counters()
        self._samples = TemporaryDirectory()
        self.run = new_run(Path(self._samples.name), "run")
        self.policy = Policy()
        self.announce(1)
        limits = RecordingConfig.model_validate({**PATIENT, "shard_bytes": 8_000, **changes})
        self.recorder = Recorder(folder, limits, config(), draft_vocab_ids(), self.counters)

    def announce(self, version: int) -> None:
        rows = self.policy.lm_head[draft_vocab_ids()]
        self.run.add_policy(PolicyHead(version, rows, self.policy.embed))

    def counts(self) -> tuple[int, dict[str, int]]:
        recorded = total(self.counters.samples_recorded)
        return int(recorded), by_label(self.counters.recording_shed)


def test_the_service_records_what_it_accepts(tmp_path: Path) -> None:
    made = make_config(tmp_path, recording={**PATIENT, "directory": str(tmp_path / "states")})
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


def test_a_deadline_bounds_the_offer(tmp_path: Path) -> None:
    rig = Rig(tmp_path, offer_timeout_s=0.01)
    with rig.recorder._changed:
        rig.recorder.offer(rig.run, Policy().samples(1)[0])
    assert rig.counts() == (0, {"busy": 1})


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


def test_a_sample_that_waits_for_its_shard_keeps_no_room_of_the_store(tmp_path: Path) -> None:
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


def test_a_disk_that_is_full_from_the_start_gets_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)

    @contextmanager
    def full(path: Path) -> Iterator[Path]:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
        yield path

    monkeypatch.setattr(recording_writer, "written_whole", full)
    for sample in Policy().samples(3):
        rig.recorder.offer(rig.run, sample)
    rig.recorder.start()
    assert rig.recorder.stop(30)
    assert rig.counts() == (0, {"write_failed": 3})
    assert list(tmp_path.iterdir()) == []


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
    for sample in samples:
        rig.recorder.offer(rig.run, sample)
    rig.recorder.start()
    assert rig.recorder.stop(30)
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
