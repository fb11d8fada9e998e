"""``draft-trainer fit``: learns, keeps its best, resumes to the same bits, refuses by name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from draft_trainer.cli.main import main
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.drafters.expected_acceptance import expected_acceptance
from draft_trainer.offline.report import read_log
from draft_trainer.recordings.recording import Recording
from slipstream.sample import is_held_out
from tests.draft_trainer.recordings import record_synthetic
from tests.draft_trainer.rig import write_draft
from tests.draft_trainer.synthetic import Policy, head

pytestmark = pytest.mark.slow

PROGRAM = """
import os, signal, sys
from draft_trainer.cli.main import main
number, left = int(sys.argv[1]), int(sys.argv[2])
def on_event(name, arguments):
    global left
    # Every training state and every better draft comes into being by a rename.
    if name == "os.rename":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), number)
sys.addaudithook(on_event)
sys.exit(main(sys.argv[3:]))
"""
CONFIG = """
[fit]
epochs = 3
evaluations = 4
held_out_fraction = 0.2
[training]
learning_rate = 0.01
warmup_steps = 5
weight_averaging = 0.5
ttt_steps = 3
batch_tokens = 160
forward_tokens = 100
state_every_steps = 1
threads = 1
"""


class Work:
    """A synthetic recording, a draft and a configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        policies = {1: Policy(0, 4.0), 2: Policy(0, 4.0)}
        samples = policies[1].samples(64)
        record_synthetic(folder / "states", samples, policies, shard_bytes=50_000)
        write_draft(folder / "draft")
        (folder / "fit.toml").write_text(CONFIG)

    def arguments(self, out: str, **changes: object) -> list[str]:
        given: dict[str, object] = {
            "states": self.folder / "states",
            "draft": self.folder / "draft",
            "out": self.folder / out,
            "config": self.folder / "fit.toml",
        }
        pairs = {
            f"--{k.replace('_', '-')}": v for k, v in (given | changes).items() if v is not None
        }
        return ["fit", *(str(x) for pair in pairs.items() for x in pair if x is not True)]

    def events(self, out: str, kind: str) -> list[dict[str, Any]]:
        """Without what differs between two runs: the time."""
        found = read_log(self.folder / out / "training.jsonl")
        return [{k: v for k, v in e.items() if k != "seconds"} for e in found if e["event"] == kind]

    def weights(self, out: str) -> bytes:
        return (self.folder / out / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    """With one fit that was not disturbed, ``whole``."""
    threads = torch.get_num_threads()
    work = Work(tmp_path_factory.mktemp("fit"))
    assert main(work.arguments("whole")) == 0
    yield work
    torch.set_num_threads(threads)


def test_init_and_fit_raise_the_acceptance(
    tmp_path: Path, policy_dir: Path, tiny_states: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From nothing to a draft of the trained tiny policy, in two commands and 15,000 tokens."""
    given = ["--states", str(tiny_states), "--out"]
    initial, out = tmp_path / "initial", tmp_path / "draft"
    draft_vocab = ["--policy", str(policy_dir), "--draft-vocab", "96"]
    assert main(["init", *draft_vocab, *given, str(initial)]) == 0
    how = ["--epochs", "2", "--learning-rate", "3e-3", "--batch-tokens", "400", "--ttt-steps", "3"]
    assert main(["fit", "--draft", str(initial), *how, *given, str(out)]) == 0
    events = read_log(out / "training.jsonl")
    start, end = events[0], events[-1]
    assert (start["event"], end["event"]) == ("start", "end")
    steps = [e for e in events if e["event"] == "step"]
    lengths = [e["acceptance_length"] for e in events if e["event"] == "evaluation"]
    assert len(steps) == start["steps"] == end["step"] and len(lengths) == 11
    assert 1.0 <= lengths[0] < 1.1
    assert end["acceptance_length"] == max(lengths) > 1.35
    assert steps[-1]["tokens"] == end["tokens"] == 2 * start["tokens_per_epoch"]
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "training.jsonl",
        "training.svg",
    ]
    texts = [t.text for t in ElementTree.parse(out / "training.svg").iter() if t.text]
    assert "Estimated acceptance length, held out" in texts and "TTT step 2" in texts

    # What is said is of the weights that are served, on prompts that were not trained on.
    head = Eagle3().read(out).draft()
    recording = Recording(tiny_states)
    assert head.draft_vocab_ids is not None
    held_out = [
        recording[i] for i, group in enumerate(recording.groups()) if is_held_out(group, 0.05)
    ]
    assert len(held_out) == start["held_out_samples"] == len(recording) - start["samples"] > 2
    heads = recording.policy_heads(head.target_ids())
    again = expected_acceptance(head, held_out, heads, 3, "probabilistic")
    assert again.acceptance_length == pytest.approx(max(lengths), abs=1e-9)
    assert "expected acceptance length" in capsys.readouterr().err


def test_the_best_is_kept_not_the_last(tmp_path: Path, draft_dir: Path, tiny_states: Path) -> None:
    """A good draft that is ruined by a far too high rate comes out as it went in."""
    out = tmp_path / "draft"
    given = ["--states", str(tiny_states), "--draft", str(draft_dir), "--out", str(out)]
    how = ["--epochs", "1", "--learning-rate", "0.3", "--batch-tokens", "2000", "--ttt-steps", "3"]
    (tmp_path / "fit.toml").write_text("[training]\nwarmup_steps = 0\n[fit]\nevaluations = 1\n")
    assert main(["fit", *given, *how, "--config", str(tmp_path / "fit.toml")]) == 0
    first, last = (e for e in read_log(out / "training.jsonl") if e["event"] == "evaluation")
    assert first["acceptance_length"] > 3.3 and first["best"]
    assert last["acceptance_length"] < 2.0 and not last["best"]
    before, after = Eagle3().read(draft_dir).draft(), Eagle3().read(out).draft()
    for name, tensor in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], tensor), name


def end_at_rename(
    work: Work, number: int, rename: int, out: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(number)), str(rename), *work.arguments(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def killed(work: Work) -> Path:
    """What a fit leaves that is killed while it writes a training state. Copy it."""
    assert end_at_rename(work, signal.SIGKILL, 20, "killed").returncode == -signal.SIGKILL
    return work.folder / "killed"


@pytest.mark.parametrize(
    ("number", "rename"),
    [
        (signal.SIGKILL, 2),  # while the first evaluation puts the draft in place
        (signal.SIGKILL, 20),
        (signal.SIGTERM, 12),
    ],
)
def test_an_ended_fit_resumes_to_the_same_bits(
    work: Work, killed: Path, number: int, rename: int
) -> None:
    out = f"ended-{number}-{rename}"
    if rename == 20:
        shutil.copytree(killed, work.folder / out)
        code, said = -signal.SIGKILL, ""
    else:
        ended = end_at_rename(work, number, rename, out)
        code, said = ended.returncode, ended.stderr
    events = work.events(out, "step")
    total = len(work.events("whole", "step"))
    assert len(events) < total
    head = Eagle3().read(work.folder / out).draft()
    assert head.config.draft_vocab_size == 16
    states = sorted((work.folder / out / "state").glob("state-*"))
    newest = int(states[-1].stem.removeprefix("state-")) if states else 0
    if number == signal.SIGTERM:
        assert code == 128 + signal.SIGTERM
        assert f"stopped after step {newest} of {total}" in said
        assert newest == len(events)
    else:
        assert code == -signal.SIGKILL
        assert len(events) - newest <= 1  # at most the step at hand is lost
    assert main([*work.arguments(out), "--resume"]) == 0
    for kind in ("start", "step", "evaluation", "end"):
        assert work.events(out, kind) == work.events("whole", kind), kind
    assert work.weights(out) == work.weights("whole")
    assert not (work.folder / out / "state").exists()


def test_fit_killed_after_its_end_is_finished_by_resume(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its training states are removed one by one: none of them may be left."""
    out = work.folder / "cut-short"
    shutil.copytree(work.folder / "whole", out)
    (out / "state").mkdir()
    (out / "training.svg").unlink()
    assert main([*work.arguments("cut-short"), "--resume"]) == 0
    assert "is finished" in capsys.readouterr().err
    assert work.weights("cut-short") == work.weights("whole")
    assert work.events("cut-short", "end") == work.events("whole", "end")
    assert (out / "training.svg").is_file() and not (out / "state").exists()


def test_refusals_by_name(
    work: Work,
    killed: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun = killed.name
    write_draft(work.folder / "other-draft", seed=5)
    before = sorted(work.folder.iterdir())
    for arguments, text in (
        (work.arguments("whole"), "found something there, expected a free name"),
        (work.arguments("states", resume=True), "remove it, or choose another"),
        (work.arguments(begun), "give --resume to go on"),
        (
            [*work.arguments(begun, learning_rate=0.5), "--resume"],
            "training state training.learning_rate: found 0.01 in",
        ),
        (
            [*work.arguments(begun, draft=work.folder / "other-draft"), "--resume"],
            "training state sha256 of draft",
        ),
        (work.arguments("new", draft=work.folder), "model.safetensors"),
        (work.arguments("new", draft_length=4), "training.ttt_steps: found 3, expected at least"),
        (
            work.arguments("new", batch_tokens=10_000),
            "training.warmup_steps: found 5, expected fewer than",
        ),
    ):
        assert main(arguments) == 2, arguments
        (line,) = [x for x in capsys.readouterr().err.splitlines() if "verifying" not in x]
        assert line.startswith("draft-trainer: ") and text in line and "Next step: " in line, line
    assert sorted(work.folder.iterdir()) == before


def test_samples_past_a_sliding_window_are_left_out(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three TTT steps reach two tokens past a row: those up to 22 tokens stay."""
    draft, lengths = work.folder / "windowed-draft", Recording(work.folder / "states").lengths()
    draft.mkdir()
    Eagle3().save(draft, head(0, sliding_window=24))
    assert main(work.arguments("windowed", draft=draft, epochs=1)) == 0
    long = sum(length > 22 for length in lengths)
    assert 0 < long < len(lengths) == 64
    said = f"{long} of 64 samples are left out: too long for the draft's sliding_window"
    assert said in capsys.readouterr().err
    (start,) = work.events("windowed", "start")
    assert start["samples"] + start["held_out_samples"] == 64 - long


def test_too_few_prompts_are_refused(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    folder = work.folder / "few"
    record_synthetic(folder, Policy(0, 4.0).samples(2), {1: Policy(0, 4.0)})
    assert main(work.arguments("new", states=folder)) == 2
    assert "fit.held_out_fraction: found 0.2: 2 samples to train on" in capsys.readouterr().err
