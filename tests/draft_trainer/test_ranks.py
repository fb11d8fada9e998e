"""Two real processes as ranks: the numbers of one, agreement, and an end when one is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from draft_trainer.training.followers import Followers
from draft_trainer.training.learner import DEVICE_MEMORY, Learner
from draft_trainer.training.ranks import RankLostError, Ranks
from draft_trainer.training.state import StateStore
from examples.arithmetic_grpo.processes import free_port
from slipstream.client import open_channel
from slipstream.errors import RefusedError
from tests.draft_trainer.rig import Client, train
from tests.draft_trainer.serving_process import CONFIG as SERVING
from tests.draft_trainer.serving_process import SILENCE_S, lead
from tests.draft_trainer.synthetic import Policy, head
from tests.draft_trainer.test_cli import PROGRAM, write_config
from tests.draft_trainer.training_process import train_here

pytestmark = pytest.mark.slow

_MODULE = "tests.draft_trainer.training_process"
_DEADLINE = 300
# Both runs add up the same float32 numbers in another order; the largest difference that was
# measured after these 27 steps is 1e-7.
_ROUNDING = 1e-6


@contextmanager
def _two_ranks(*command: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Both ranks without torchrun, which would end one when it sees the other die."""
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _losses(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "losses.txt").read_text().splitlines()]


def _newest(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(max(folder.glob("state-*.safetensors")))


def _assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        difference = (tensor.double() - second[name].double()).norm()
        assert difference <= _ROUNDING * tensor.double().norm(), name


def test_two_ranks_under_torchrun_train_as_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    train_here(one, 3)
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun is not None
    out = subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node", "2", "-m", _MODULE, str(two)],
        timeout=_DEADLINE,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    # A thread that is left aborts some processes at their end.
    assert "rank 0 leaves 0 threads" in out and "rank 1 leaves 0 threads" in out
    alone, together = _losses(one), _losses(two)
    assert len(alone) == len(together) == 28
    for (_, number, loss, anchors), other in zip(alone[1:], together[1:], strict=True):
        assert other[1] == number and other[3] == anchors
        assert float.fromhex(other[2]) == pytest.approx(float.fromhex(loss), rel=_ROUNDING)
    _assert_close(_newest(one / "states"), _newest(two / "states"))


def test_ranks_skip_together_and_a_dead_one_ends_the_other(tmp_path: Path) -> None:
    """The last rank alone computes NaN in step 3, and is killed before step 6."""
    with _two_ranks("-m", _MODULE, str(tmp_path), "--ruin", "3", "--lose", "6") as ranks:
        out, err = ranks[0].communicate(timeout=_DEADLINE)
        assert (ranks[0].returncode, ranks[1].wait(_DEADLINE)) == (1, -signal.SIGKILL)
        assert err.startswith("lost: rank 0 lost another rank at a gather: ")
        assert err.rstrip().endswith("group left: True")
        assert "rank 0 skipped 1" in out
        assert ranks[1].stdout is not None and "rank 1 skipped 1" in ranks[1].stdout.read()
    state = _newest(tmp_path / "states")
    assert (int(state["counter.steps"]), int(state["counter.steps_skipped"])) == (6, 1)
    assert all(tensor.isfinite().all() for tensor in state.values())


def test_silent_rank_ends_the_others_at_the_deadline(tmp_path: Path) -> None:
    command = ("-m", "tests.draft_trainer.serving_process", str(tmp_path), "--hang")
    with _two_ranks(*command) as ranks:
        _, err = ranks[1].communicate(timeout=_DEADLINE)
        assert ranks[1].returncode == 1
        lost = "rank 1 lost another rank at a receive: "
        assert lost in err and f"{SILENCE_S * 1000:.0f}ms" in err, err
        assert ranks[0].poll() is None


def test_followers_of_a_service_train_as_one_rank_would(tmp_path: Path) -> None:
    """Two policy versions, a forgotten one, more ranks than samples, another run."""
    alone = Learner(head(0), SERVING)
    losses = lead(alone, Followers(Ranks()))
    assert len(losses) == 10
    with _two_ranks("-m", "tests.draft_trainer.serving_process", str(tmp_path)) as ranks:
        for rank in ranks:
            _, err = rank.communicate(timeout=_DEADLINE)
            assert rank.returncode == 0, err
    state = StateStore(tmp_path, {}).load()
    assert state is not None
    assert state.position["losses"] == pytest.approx(losses, rel=_ROUNDING)
    _assert_close(alone.state_dict(), state.tensors)


def test_service_on_two_ranks_trains_waits_and_ends(tmp_path: Path) -> None:
    config = write_config(tmp_path, training={"rank_timeout_s": 30.0})
    with _two_ranks(*PROGRAM[1:], "serve", "--config", str(config)) as ranks:
        assert ranks[0].stdout is not None
        address = ranks[0].stdout.readline().split("grpc=")[1].split()[0]
        with open_channel(address) as channel:
            client = Client(channel)
            client.open()
            client.announce(1)
            steps = train(client, 0).train_steps
        # Nothing to train on for longer than the deadline: rank 1 is told that rank 0 is there.
        with pytest.raises(subprocess.TimeoutExpired):
            ranks[1].wait(31.0)
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        for rank in ranks:
            _, err = rank.communicate(timeout=_DEADLINE)
            assert rank.returncode == 0, err
    state = _newest(tmp_path / "registry" / "training-state")
    assert int(state["counter.steps"]) == steps > 0


class _Other(Ranks):
    """One of two ranks whose partner's row of a gather is known already."""

    def __init__(self, rank: int, row: torch.Tensor | None = None) -> None:
        super().__init__(rank, 2)
        self.own, self._row = torch.empty(0), row

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        self.own = row
        return torch.stack([row, torch.zeros_like(row) if self._row is None else self._row])


def test_a_refusal_of_another_rank_ends_training(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy()
    samples, heads = policy.samples(4), policy.heads()

    def refuses(version: int) -> None:
        raise RefusedError("policy_version", 1, "2", "none")

    ranks = _Other(1)
    with monkeypatch.context() as patch, pytest.raises(RefusedError) as own:
        patch.setattr(heads, "get", refuses)
        Learner(head(0), SERVING, ranks).step(samples, heads)
    assert own.value.field == "policy_version"
    with pytest.raises(RefusedError) as told:
        Learner(head(0), SERVING, _Other(0, ranks.own)).step(samples, heads)
    assert told.value.field == "samples" and "refused by rank 1" in told.value.found


def test_memory_that_another_rank_lacks_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 makes the step again later, as the rank does that has too little."""
    policy = Policy()
    samples, heads = policy.samples(4), policy.heads()

    class Summed(_Other):
        def sum(self, row: torch.Tensor) -> torch.Tensor:
            self.own = row
            return row if self._row is None else row + self._row

    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    ranks = Summed(1)
    with monkeypatch.context() as patch, pytest.raises(RefusedError) as own:
        patch.setattr(heads, "on", full)
        Learner(head(0), SERVING, ranks).step(samples, heads)
    assert own.value.field == DEVICE_MEMORY
    failed, ranks = ranks.own, Summed(0)
    ranks.gather = lambda row: torch.stack([row, row])  # type: ignore[method-assign]
    ranks._row = failed
    with pytest.raises(RefusedError) as told:
        Learner(head(0), SERVING, ranks).step(samples, heads)
    assert told.value.field == DEVICE_MEMORY and "another rank's" in told.value.found


def test_rank_does_not_wait_for_forgotten_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, told = Policy(), list[float]()
    samples, heads = policy.samples(4), policy.heads()

    class Both(_Other):
        def sum(self, row: torch.Tensor) -> torch.Tensor:
            told.append(float(row[-1]))
            return row

    def short(*arguments: object) -> torch.Tensor:
        def forgotten(version: int) -> None:
            raise RefusedError("policy_version", 1, "2", "none")

        monkeypatch.setattr(heads, "get", forgotten)
        raise torch.OutOfMemoryError("CUDA out of memory")

    learner = Learner(head(0), SERVING, Both(0))
    monkeypatch.setattr(learner, "_backward", short)
    with pytest.raises(RefusedError) as found:
        learner.step(samples, heads)
    assert found.value.field == DEVICE_MEMORY and told == [1.0]


class _Wire(Ranks):
    """Both ends: what rank 0 sends is received afterwards."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.messages: list[bytes] = []
        self.told: Callable[[], object] = lambda: None

    def send(self, message: bytes, to: int) -> None:
        self.messages.append(message)
        self.told()

    def receive(self, sender: int) -> bytes:
        return self.messages.pop(0)


def test_rank_lost_while_kept_waiting_ends_training() -> None:
    wire = _Wire()
    wire.timeout_s = 0.03
    lost = threading.Event()

    def gone() -> None:
        if len(wire.messages) > 2:
            lost.set()
            raise RankLostError("rank 1 is gone")

    wire.told = gone
    with pytest.raises(RankLostError), Followers(wire).kept_waiting():
        assert lost.wait(_DEADLINE)
    # What rank 0 does alone, as writing the last state, it does all the same.
    lost.clear()
    with pytest.raises(RankLostError), Followers(wire).kept_waiting():
        assert lost.wait(_DEADLINE)


def test_alone_where_the_environment_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks.join(5.0)
    assert (ranks.rank, ranks.size, ranks.device.type) == (0, 1, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RefusedError, match="RANK"):
        Ranks.join(5.0)
    if not torch.cuda.is_available():
        monkeypatch.setenv("WORLD_SIZE", "1")
        with pytest.raises(RefusedError, match=r"training\.device: .* torch sees no GPU"):
            Ranks.join(5.0, "cuda")


def test_only_rank_among_several_sets_cuda_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Ranks.join(5.0, "cuda").device == torch.device("cuda", 0)
    assert chosen == []
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert Ranks.join(5.0, "cuda").device == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
