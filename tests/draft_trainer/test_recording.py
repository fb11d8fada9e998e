"""Recorded states: what was put in comes out, and what was damaged or does not fit is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch

from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.recordings.recorder import RecordingWriter
from draft_trainer.recordings.recording import Recording
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from tests.draft_trainer.recordings import FACTS, record_synthetic, same
from tests.draft_trainer.synthetic import HIDDEN, VOCAB, Policy, config, draft_vocab_ids

pytestmark = pytest.mark.slow


def bfloat16(sample: Sample, version: int = 1) -> Sample:
    return sample.repacked(
        aux=sample.aux.bfloat16(),
        final_hidden=sample.final_hidden.bfloat16(),
        policy_version=version,
    )


@pytest.fixture
def policy() -> Policy:
    return Policy()


def test_recording_round_trip_in_bounded_shards(tmp_path: Path, policy: Policy) -> None:
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
    (folder / "index.json").write_text(text.replace("recording/3", "recording/2"))


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
        (
            lambda f: (f / "index.json").unlink(),
            "index.json: found no recording there.*draft-trainer record",
        ),
    ],
)
def test_damage_is_refused_by_name(
    tmp_path: Path, policy: Policy, edit: Callable[[Path], None], text: str
) -> None:
    record_synthetic(tmp_path, policy.samples(3), {1: policy})
    edit(tmp_path)
    with pytest.raises(RefusedError, match=text):
        Recording(tmp_path).policy_heads(draft_vocab_ids())


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
