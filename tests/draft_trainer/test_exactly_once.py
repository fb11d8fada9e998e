"""kill -9 of a real trainer: what its weights have seen at the end is as if there had been none."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path

import grpc
import pytest
from safetensors.torch import load_file

from slipstream.client import open_channel
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.draft_trainer.rig import Client, Stream, feeding, make_config, rollouts
from tests.draft_trainer.test_cli import serving, write_config

pytestmark = pytest.mark.contract("exactly once")

EPOCHS = 2
OPTIONS = {
    "replay": {"max_epochs": EPOCHS},
    # Nothing is released: every restart resumes from a state.
    "gate": {"min_anchors": 100_000},
    "training": {"batch_tokens": 60, "state_every_steps": 3, "linger_s": 0.01},
}
COUNT = 120


def anchors_seen(folder: Path) -> int:
    """Return the positions trained on over the lineage of the newest training state."""
    newest = max((folder / "registry" / "training-state").glob("state-*.safetensors"))
    return int(load_file(newest)["counter.anchors_trained"])


def drained(status: pb.TrainerStatus) -> bool:
    return status.idle and status.samples_pending == 0


def test_trainer_killed_while_receiving_and_training(tmp_path: Path) -> None:
    messages = rollouts(COUNT)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for folder in (undisturbed, killed):
        folder.mkdir()
    with feeding(make_config(undisturbed, **OPTIONS)) as (_, client):  # type: ignore[arg-type]
        client.send(*messages)
        client.wait_for(drained)

    config = write_config(killed, **OPTIONS)  # type: ignore[arg-type]
    rng = random.Random(0)
    answers: dict[str, list[int]] = {message.sample_id: [] for message in messages}
    for number in range(4):
        with serving(config) as process, open_channel(process.address) as channel:
            client = Client(channel)
            opened = client.open()
            if number == 0:
                client.announce(1)
            else:
                assert opened.latest_policy_version == 1
            last = number == 3
            # Some of what was sent before, and some of what was not, in any order.
            sent = messages if last else rng.sample(messages, COUNT // 2)
            killer = threading.Timer(rng.uniform(0.0, 0.5), process.popen.kill)
            # The first one once something was accepted, which the last one is sent again.
            if 0 < number < 3:
                killer.start()
            try:
                with Stream(client) as stream:
                    for message in sent:
                        ack = stream.send(message)
                        answers[ack.sample_id].append(ack.status)
                        if number == 0 and killer.ident is None:
                            killer.start()
                client.wait_for(drained)
            except (grpc.RpcError, StopIteration):
                assert not last
            if last:
                code, errors = process.end(signal.SIGTERM)
                assert code == 0, errors
            else:
                killer.join(30)
                process.popen.kill()
                process.popen.wait(30)
    accepted, duplicate = pb.ACK_STATUS_ACCEPTED, pb.ACK_STATUS_DUPLICATE
    for statuses in answers.values():
        # At most once, and at the latest by the last run; its acknowledgement may be lost.
        assert set(statuses) <= {accepted, duplicate} and statuses.count(accepted) <= 1
        assert accepted not in statuses[1:]
    assert any(duplicate in statuses for statuses in answers.values())
    assert anchors_seen(killed) == anchors_seen(undisturbed) > EPOCHS * COUNT
