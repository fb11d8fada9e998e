"""Two real processes as ranks: the numbers of one, agreement, and an end when one is lost."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draft_trainer.ranks import Ranks, shares
from slipstream.refusal import RefusedError

_MODULE = "tests.draft_trainer.training_process"
_DEADLINE = 60
# Both runs add up the same float32 numbers in another order; the largest difference that was
# measured after these 27 steps is 1e-7.
_ROUNDING = 1e-6


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _two_ranks(*command: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Both ranks without torchrun, which would end one when it sees the other die."""
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
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


def _last_state(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(max((folder / "states").glob("state-*.safetensors")))


def test_two_ranks_under_torchrun_have_the_losses_and_weights_of_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    subprocess.run([sys.executable, "-m", _MODULE, str(one)], timeout=_DEADLINE, check=True)
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun is not None
    subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node", "2", "-m", _MODULE, str(two)],
        timeout=_DEADLINE,
        check=True,
    )
    alone, together = _losses(one), _losses(two)
    assert len(alone) == len(together) == 28
    for (_, number, loss, anchors), other in zip(alone[1:], together[1:], strict=True):
        assert other[1] == number and other[3] == anchors
        assert float.fromhex(other[2]) == pytest.approx(float.fromhex(loss), rel=_ROUNDING)
    first, second = _last_state(one), _last_state(two)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        difference = (tensor.double() - second[name].double()).norm()
        assert difference <= _ROUNDING * tensor.double().norm(), name


def test_ranks_agree_to_skip_what_is_not_finite_on_one_of_them(tmp_path: Path) -> None:
    with _two_ranks(_MODULE, str(tmp_path), "--at-step", "3", "--behaviour", "nan") as ranks:
        for number, rank in enumerate(ranks):
            out, err = rank.communicate(timeout=_DEADLINE)
            assert rank.returncode == 0, err
            assert f"rank {number} skipped 1" in out
            # One that is left aborts some processes at their end.
            assert f"rank {number} leaves 0 threads" in out
    state = _last_state(tmp_path)
    assert int(state["counter.steps"]) == 3
    assert state["head.fc.weight"].isfinite().all()


@pytest.mark.parametrize("behaviour", ["die", "hang"])
def test_lost_rank_ends_the_other_with_its_reason(tmp_path: Path, behaviour: str) -> None:
    """A death is noticed by the closed connection, silence by the deadline of 3 s."""
    options = ("--at-step", "3", "--behaviour", behaviour, "--timeout", "3")
    with _two_ranks(_MODULE, str(tmp_path), *options) as (first, second):
        _, err = first.communicate(timeout=_DEADLINE)
        assert first.returncode == 1
        assert err.startswith("lost: rank 0 lost another rank at a gather: ")
        if behaviour == "die":
            assert second.wait(_DEADLINE) == -signal.SIGKILL
        else:
            assert "3000ms" in err
    assert [line[1] for line in _losses(tmp_path)] == ["0", "1", "2", "3"]


def test_shares_are_whole_and_balanced() -> None:
    sizes = [7, 1, 9, 3, 3, 8, 2, 5]
    parts = shares(sizes, 3)
    assert sorted(i for part in parts for i in part) == list(range(8))
    loads = [sum(sizes[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= 2
    assert all(part == sorted(part) for part in parts)
    assert shares([4], 3) == [[0], [], []]
    assert shares(sizes, 1) == [list(range(8))]


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
        with pytest.raises(RefusedError, match=r"LOCAL_RANK.*below 0"):
            Ranks.join(5.0, "cuda")
