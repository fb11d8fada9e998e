"""A sound call of each method, to be damaged. None of them changes what a server serves or trains:
the tensors that they bring are not those of their hashes, and what they name does not exist."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import rollout_server_pb2 as rollout_pb
from slipstream.v1 import tensor_pb2
from tests.robustness import traffic
from tests.robustness.caller import Method
from tests.robustness.mutate import filled

_STREAMS = 64

Make = Callable[[], Sequence[Message]]


def _foreign(specs: Sequence[tensor_pb2.TensorSpec]) -> None:
    """Give them hashes that nothing has."""
    for spec in specs:
        if spec.name in ("d2t", "t2d"):
            # Another vocabulary is refused before anything else is looked at.
            continue
        spec.sha256 = hashlib.sha256(b"another " + spec.sha256).digest()


class Calls:
    """Sound calls.

    Args:
        session_id: open, of a trainer.
        version: that was announced there.
    """

    def __init__(self, session_id: str = "", version: int = 1) -> None:
        self._session_id = session_id
        self._version = version
        self._streams: list[Sequence[Message]] = []
        self._turn = 0
        draft = traffic.draft()
        self._stage = traffic.stage("fuzz", draft)
        _foreign(self._stage[0].header.tensors)
        self._announcement = traffic.announcement(session_id, version + 1)
        _foreign(self._announcement[0].header.tensors)
        fc = {"fc.weight": draft["fc.weight"][:4].clone()}
        import_header = pb.ImportHeader(config_json='{"architectures": ["x"]}', origin="/nowhere")
        staged = traffic.stage("import", fc)
        import_header.tensors.extend(staged[0].header.tensors)
        self._import = [
            pb.ImportReleaseRequest(header=import_header),
            *(pb.ImportReleaseRequest(chunk=each.chunk) for each in staged[1:]),
        ]
        self._made: dict[str, Make] = {
            "OpenRun": lambda: [traffic.open_run()],
            "StreamStates": self._stream,
            "AnnouncePolicy": lambda: self._announcement,
            "ImportRelease": lambda: self._import,
            "Stage": lambda: self._stage,
            "PrepareSync": lambda: [pb.PrepareSyncRequest(session_id=session_id, policy_version=1)],
            "Abort": lambda: [rollout_pb.AbortRequest(stage_ids=["a", "b"])],
            "Commit": lambda: [rollout_pb.CommitRequest(stage_ids=["unknown"])],
            "Check": lambda: [health_pb2.HealthCheckRequest(service="")],
            "Watch": lambda: [health_pb2.HealthCheckRequest(service="")],
            "ServerReflectionInfo": lambda: [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_by_filename="slipstream/v1/x.proto"),
            ],
        }

    def of(self, method: Method, rng: random.Random) -> Sequence[Message]:
        """The messages of a call; drawn at random for a method that is not known here."""
        made = self._made.get(method.name)
        return made() if made else [filled(method.request(), rng)]

    def _stream(self) -> Sequence[Message]:
        # Made once: later ones are duplicates, whose states the trainer looks at all the same.
        if len(self._streams) < _STREAMS:
            self._streams.append(
                [
                    traffic.header(self._session_id),
                    traffic.batch([traffic.sample(self._version) for _ in range(3)]),
                    traffic.batch([traffic.sample(self._version)]),
                ]
            )
            return self._streams[-1]
        self._turn += 1
        return self._streams[self._turn % _STREAMS]
