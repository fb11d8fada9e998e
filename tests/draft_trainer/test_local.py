"""A trainer in the policy's own process: fed by a bridge, and gone when its block ends."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import grpc
import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draft_trainer.local import LocalTrainer
from examples.local_services import ROOT
from policy_bridge import BridgeConfig, PolicyBridge
from slipstream.client import open_channel
from slipstream.errors import RefusedError
from slipstream.serving.server import serving
from slipstream.v1 import console_pb2
from tests.draft_trainer.rig import Client
from tests.waiting import until

NOTEBOOK = ROOT / "examples" / "notebook" / "local_trainer.ipynb"


@pytest.fixture
def model(policy_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)  # type: ignore[no-any-return]


def threads() -> set[threading.Thread]:
    """Those of this process, but gRPC's own poller, which all of a process's channels share."""
    return {one for one in threading.enumerate() if "_poll_wrapper" not in one.name}


def assert_ended(threads: set[threading.Thread]) -> None:
    """Or about to end."""
    for one in threads:
        one.join(60)
        assert not one.is_alive(), one.name


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which temporary folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def bridge_to(trainer: LocalTrainer, model: PreTrainedModel) -> PolicyBridge:
    return PolicyBridge(model, BridgeConfig(trainer.address, run_id="mine", strict=True))


def feed(bridge: PolicyBridge, model: PreTrainedModel, version: int = 0) -> None:
    with bridge.sync(version):
        pass
    ids = torch.randint(17, 27, (16, 24))
    mask = torch.arange(24).expand_as(ids) >= 6
    with torch.no_grad(), bridge.capture(temperature=1.0) as capture:
        model(ids)
        capture.ship(ids, loss_mask=mask)
    assert bridge.flush(30.0)


def test_local_trainer_trains_on_bridge_and_leaves_nothing(
    model: PreTrainedModel, draft_dir: Path, state: Path
) -> None:
    before = threads()
    # Nothing generates here, so nothing could pay.
    config = {"training": {"batch_tokens": 64}, "economy": {"mode": "always"}}
    with (
        LocalTrainer(draft_dir, config) as trainer,
        bridge_to(trainer, model) as bridge,
    ):
        assert trainer.releases.is_relative_to(state)
        feed(bridge, model)
        assert bridge.stats().accepted == 16
        with open_channel(trainer.address) as channel:
            status = Client(channel).wait_for(lambda found: found.train_steps > 0)
        assert status.run_id == "mine"
        assert httpx.get(trainer.url).status_code == 200
    assert list(state.iterdir()) == []
    assert_ended(threads() - before)
    with open_channel(trainer.address) as channel, pytest.raises(grpc.RpcError):
        Client(channel).status()
    trainer.close()


def test_resumed_job_feeds_its_run_and_the_job_before_is_refused(
    model: PreTrainedModel, draft_dir: Path, state: Path
) -> None:
    """Killed at version 12 and resumed at 9, with matrices that are frozen, as with adapters."""
    # What is not trained on stays in the store.
    with LocalTrainer(draft_dir, {"economy": {"mode": "never"}}) as trainer:
        config = BridgeConfig(trainer.address, run_id="mine", bytes_per_step=1 << 20)
        with PolicyBridge(model, config) as before:
            for version in (11, 12):
                feed(before, model, version)
            held = trainer.status()
            assert held.policy_version == 12 and before.stats().accepted > 0
            with PolicyBridge(model, config) as resumed:
                for version in (9, 10, 12):
                    feed(resumed, model, version)
                    status = trainer.status()
                    assert (status.policy_version, status.history) == (version, 1)
                stats = resumed.stats()
                assert stats.accepted == stats.sent_samples > 0 and stats.capture_off_reason == ""
                resident = status.samples_pending + status.samples_held_out
                assert resident == stats.accepted, "none of the job before"
                found = {one.part: one.found for one in status.diagnosis}["policy"]
                assert found.endswith("resumed from an older checkpoint 1 time(s)")
                # The job before still runs: what it sends changes nothing.
                with before.sync(13):
                    pass
                until(lambda: "history" in before.stats().last_error)
                feed(before, model, 14)
                assert "which another process has begun" in before.stats().capture_off_reason
                status = trainer.status()
                assert (status.policy_version, status.history) == (12, 1)
                assert status.samples_pending + status.samples_held_out == resident
        with open_channel(trainer.address) as channel:
            request = console_pb2.WatchEventsRequest(newest=100)
            kinds = [event.kind for event in Client(channel).stub.WatchEvents(request)]
        assert kinds.count("run_resumed") == 1


def test_local_trainer_under_bfloat16_default_dtype(
    model: PreTrainedModel, draft_dir: Path, state: Path
) -> None:
    """A loop may set one, and transformers does while it makes a model."""
    config = {"training": {"batch_tokens": 64}, "economy": {"mode": "always"}}
    torch.set_default_dtype(torch.bfloat16)
    try:
        with LocalTrainer(draft_dir, config) as trainer, bridge_to(trainer, model) as bridge:
            feed(bridge, model)
            assert bridge.stats().accepted == 16
            with open_channel(trainer.address) as channel:
                Client(channel).wait_for(lambda found: found.train_steps > 0)
    finally:
        torch.set_default_dtype(torch.float32)


def test_local_trainer_with_named_port_and_registry(
    draft_dir: Path, state: Path, tmp_path: Path
) -> None:
    named = {"draft": {"registry": str(tmp_path / "releases")}, "server": {"port": 0}}
    with LocalTrainer(draft_dir, named) as trainer:
        assert trainer.releases == tmp_path / "releases"
        # A port that is named is listened on, instead of a socket in a temporary folder.
        assert trainer.address.startswith("127.0.0.1:")
        with grpc.insecure_channel(trainer.address) as channel:
            assert serving(channel)
    assert list(trainer.releases.glob("*/model.safetensors")) and not list(state.iterdir())


def test_local_trainer_interrupted_stop_frees_registry(
    draft_dir: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's process goes on, and only its end would free what it holds."""
    named = {"draft": {"registry": str(tmp_path / "releases")}}

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    trainer = LocalTrainer(draft_dir, named)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("draft_trainer.server.app._ended", interrupt)
        trainer.close()
    with LocalTrainer(draft_dir, named):
        pass


ABANDONED = """
import sys
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM
from draft_trainer.local import LocalTrainer
from slipstream.client import open_channel
from tests.draft_trainer.rig import Client
from tests.draft_trainer.test_local import bridge_to, feed

policy, draft, registry = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
config = {"training": {"batch_tokens": 64}, "economy": {"mode": "always"}}
trainer = LocalTrainer(draft, config | {"draft": {"registry": registry}})
with bridge_to(trainer, model) as bridge:
    feed(bridge, model)
with open_channel(trainer.address) as channel:
    Client(channel).wait_for(lambda found: found.train_steps > 0)
"""


@pytest.mark.slow
def test_local_trainer_saves_state_at_interpreter_exit(
    policy_dir: Path, draft_dir: Path, tmp_path: Path
) -> None:
    """A thread that is inside torch then would abort the process."""
    script = [sys.executable, "-c", ABANDONED, str(policy_dir), str(draft_dir), str(tmp_path / "r")]
    ended = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert list((tmp_path / "r").rglob("state-*.safetensors"))


def test_local_trainer_keeps_torch_threads_of_process(draft_dir: Path, state: Path) -> None:
    def of_a_new_thread() -> int:
        found: list[int] = []
        one = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        one.start()
        one.join()
        return found[0]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with LocalTrainer(draft_dir, {"training": {"threads": 1}}):
            while of_a_new_thread() != 1:  # until the training thread has begun
                time.sleep(0.01)
        assert of_a_new_thread() == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_local_trainer_among_several_ranks_is_refused(
    draft_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RefusedError, match=r"WORLD_SIZE: found 2.*draft-trainer serve"):
        LocalTrainer(draft_dir)


def test_local_trainer_gpu_memory_fraction_is_refused(draft_dir: Path, state: Path) -> None:
    bounded = {"training": {"gpu_memory_fraction": 0.5}}
    with pytest.raises(RefusedError, match=r"gpu_memory_fraction: found 0\.5.*draft-trainer serve"):
        LocalTrainer(draft_dir, bounded)
    assert list(state.iterdir()) == []


@pytest.mark.slow
def test_local_trainer_notebook_raises_acceptance(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5 and not any(cell.get("outputs") for cell in cells)
    assert "\nSTEPS = 24\n" in "".join(code)
    variables: dict[str, object] = {"__name__": "notebook"}
    for text in code:
        # Fewer of the same: all of them share one interpreter lock with the training.
        shorter = text.replace("\nSTEPS = 24\n", "\nSTEPS = 10\n")
        exec(compile(shorter, str(NOTEBOOK), "exec"), variables)
    frozen, adapted = (float(variables[name]) for name in ("frozen", "adapted"))  # type: ignore[arg-type]
    # How much it gains depends on how many steps the machine takes beside the loop.
    assert adapted > frozen > 1.05, capsys.readouterr().out
    assert list(state.iterdir()) == []
