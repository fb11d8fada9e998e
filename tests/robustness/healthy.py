"""Sound clients, which must be served whatever else is going on. Every call has a deadline."""

from __future__ import annotations

import queue

from slipstream.client import open_channel
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from slipstream.v1 import rollout_server_pb2 as rollout_pb
from slipstream.v1 import rollout_server_pb2_grpc as rollout_grpc
from tests.robustness import traffic


class Feeder:
    """A policy process: a session, a stream, and the status.

    Args:
        address: of the trainer.
        seconds: deadline of everything.
    """

    def __init__(self, address: str, seconds: float) -> None:
        self._channel = open_channel(address, own_connection=True)
        self._stub = pb_grpc.DraftTrainerStub(self._channel)
        self._seconds = seconds
        self.session_id = self._stub.OpenRun(traffic.open_run(), timeout=seconds).session_id
        self._requests: queue.SimpleQueue[pb.StreamStatesRequest | None] = queue.SimpleQueue()
        status = self.status()
        if not status.HasField("policy_version"):
            announcement = traffic.announcement(self.session_id, 1)
            self._stub.AnnouncePolicy(iter(announcement), timeout=seconds)
        self._requests.put(traffic.header(self.session_id))
        self._call = self._stub.StreamStates(iter(self._requests.get, None))
        assert next(self._call).credit.bytes > 0

    def serve(self, samples: int = 1) -> pb.TrainerStatus:
        """Have samples accepted and the status answered. Raises AssertionError otherwise."""
        self._requests.put(traffic.batch([traffic.sample() for _ in range(samples)]))
        # One without acks says how many tokens are wanted.
        acks = next(each.acks.acks for each in self._call if each.acks.acks)
        assert [ack.status for ack in acks] == [pb.ACK_STATUS_ACCEPTED] * samples, acks
        return self.status()

    def status(self) -> pb.TrainerStatus:
        """Ask for the trainer's status."""
        return self._stub.GetStatus(pb.GetStatusRequest(), timeout=self._seconds)

    def close(self) -> None:
        """End the stream and the connection."""
        self._requests.put(None)
        self._call.cancel()
        self._channel.close()


class Stager:
    """A trainer's side of a rollout server.

    Args:
        address: of its control plane.
        seconds: deadline of everything.
    """

    def __init__(self, address: str, seconds: float) -> None:
        self._channel = open_channel(address, own_connection=True)
        self._stub = rollout_grpc.RolloutServerStub(self._channel)
        self._seconds = seconds
        self._draft = traffic.draft()
        self._served = 0

    def serve(self) -> rollout_pb.ServerState:
        """Stage the served draft once more, abort that, and ask for the state."""
        name = f"sound-{self._served}"
        self._served += 1
        requests = traffic.stage(name, self._draft)[:1]
        answers = list(self._stub.Stage(iter(requests), timeout=self._seconds))
        assert answers[-1].staged.stage_id == name
        self._stub.Abort(rollout_pb.AbortRequest(stage_ids=[name]), timeout=self._seconds)
        return self._stub.GetState(rollout_pb.GetStateRequest(), timeout=self._seconds)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()
