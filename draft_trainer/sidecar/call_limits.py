"""How many calls of each method the trainer answers at a time, how large and for how long."""

from __future__ import annotations

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from draft_trainer.config import ServerConfig
from draft_trainer.sidecar.admission import MAX_WAITING, Admission
from draft_trainer.sidecar.release_calls import MAX_IMPORT_SECONDS
from slipstream.limits import CHUNK_MESSAGE_BYTES, CallRate, Limit, RefusedCalls
from slipstream.v1 import draft_trainer_pb2

SERVICE = draft_trainer_pb2.DESCRIPTOR.services_by_name["DraftTrainer"].full_name

MAX_WATCHERS = 16
ANNOUNCE_SECONDS = 600.0
FETCH_SECONDS = 3600.0

_REFLECTION_SECONDS = 60.0
# A stream beyond server.max_streams is refused by that name.
_STREAMS_BEYOND = 8
# Of calls that take no time, over all methods together: beside the others' they find a thread.
_QUICK = 32


def limits_of(config: ServerConfig) -> dict[str, Limit]:
    """By method, ``/package.Service/Method``."""
    chunks, fleet = CHUNK_MESSAGE_BYTES, Limit(4)
    named = {
        "StreamStates": Limit(config.max_streams + _STREAMS_BEYOND, config.max_message_bytes),
        # Each holds the two matrices of its version until they are whole.
        "AnnouncePolicy": Limit(4, chunks, ANNOUNCE_SECONDS),
        "ImportRelease": Limit(2, chunks, MAX_IMPORT_SECONDS),
        "FetchRelease": Limit(8, call_seconds=FETCH_SECONDS),
        "WatchStatus": Limit(MAX_WATCHERS),
        "WatchEvents": Limit(MAX_WATCHERS),
        "PrepareSync": fleet,
        "CompleteSync": fleet,
        "PromoteRelease": fleet,
        "RollBackRelease": fleet,
    }
    found = {f"/{SERVICE}/{method}": limit for method, limit in named.items()}
    found[f"/{health.SERVICE_NAME}/Watch"] = Limit(MAX_WATCHERS)
    about = Limit(4, call_seconds=_REFLECTION_SECONDS)
    found[f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"] = about
    return found


def admission(config: ServerConfig, refused: RefusedCalls) -> tuple[Admission, int]:
    """The interceptor, and how many threads all calls that it admits may need at once."""
    limits = limits_of(config)
    rate = CallRate(config.calls_per_s)
    made = Admission(limits, Limit(config.max_calls), config.message_timeout_s, rate, refused)
    return made, sum(limit.calls for limit in limits.values()) + MAX_WAITING + _QUICK
