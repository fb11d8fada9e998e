"""The trainer's publishing half in a process of its own: registry, publisher, reconciler.

Answers commands over a pipe. Faults are put between the product's own functions, so that the
process dies, or a byte flips, exactly there.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import slipstream.client
from draft_trainer.config import PublishConfig, TrialConfig
from draft_trainer.counters import Counters
from draft_trainer.releases import commits
from draft_trainer.releases.commits import Payloads
from draft_trainer.releases.fleet import Fleet
from draft_trainer.releases.pointer import PointerStore
from draft_trainer.releases.publisher import Publisher
from draft_trainer.releases.reconcile import Reconciler
from draft_trainer.releases.registry import Registry, open_pointer
from draft_trainer.releases.rollout_client import DraftPayload, RolloutClient
from draft_trainer.releases.trial import Trials
from draft_trainer.releases.watch import AcceptanceWatch
from slipstream.errors import RefusedError
from slipstream.tensors import spec_of
from slipstream.v1 import tensor_pb2


def run(
    root: str,
    addresses: tuple[str, ...],
    pipe: Connection,
    trial_config: TrialConfig,
    publish: Mapping[str, Any],
) -> None:
    """Publish as told until the pipe closes: all that this process does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    registry = Registry(Path(root))
    try:
        registry.hold()
        pointer = open_pointer(registry)
    except RefusedError as error:
        pipe.send({"refused": str(error)})
        return
    fleet = Fleet(
        PublishConfig(
            rollout_servers=addresses,
            **{
                **{"state_timeout_s": 2.0, "stage_timeout_s": 10.0, "commit_timeout_s": 5.0},
                "reconcile_s": 0.1,
                **publish,
            },
        )
    )
    watch = AcceptanceWatch(fleet)
    trials = Trials(trial_config, lambda: 3, watch) if trial_config.enabled else None
    publisher = Publisher(fleet, registry, pointer, Counters(), trials)
    reconciler = Reconciler(publisher, watch)
    reconciler.start()
    pipe.send({"ready": pointer.now.live})
    try:
        while True:
            name, *arguments = pipe.recv()
            pipe.send(_COMMANDS[name](publisher, *arguments))
    except EOFError:
        pass
    finally:
        reconciler.stop(5)
        fleet.close()
        watch.stop(5)
        registry.close()


def _promote(publisher: Publisher, version: int) -> dict[str, Any]:
    try:
        published = publisher.promote(version, pin=False)
    except RefusedError as error:
        return {"refused": str(error)}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    return {
        "version": published.draft_version,
        "errors": [o.error for o in published.outcomes.values() if o.error],
    }


def _promote_both(publisher: Publisher, first: int, second: int) -> dict[str, Any]:
    other: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: other.update(_promote(publisher, second)))
    thread.start()
    answer = _promote(publisher, first)
    thread.join()
    return {"first": answer, "second": other}


def _wanted(publisher: Publisher) -> dict[str, Any]:
    return {"wanted": publisher.pointer.now.live}


def _sent(publisher: Publisher) -> dict[str, Any]:
    return {
        "bytes": publisher.counters.staged_bytes._value.get(),
        "size": publisher.payloads.get(publisher.pointer.now.live).nbytes,
    }


def _pointer(publisher: Publisher) -> dict[str, Any]:
    now = publisher.pointer.now
    return {
        "live": now.live,
        "good": now.good_versions,
        "figures": len(now.figures),
        "trial": now.live if now.on_trial else None,
        "undecided": now.undecided,
    }


def _roll_back(publisher: Publisher) -> dict[str, Any]:
    try:
        return {"version": publisher.roll_back("a drill").draft_version}
    except RefusedError as error:
        return {"refused": str(error)}


def _arm(publisher: Publisher, fault: str, *arguments: Any) -> dict[str, Any]:
    _ARMS[fault](*arguments)
    return {"armed": fault}


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _patched(
    owner: Any, name: str, after: Callable[..., None] | None, before: bool = False
) -> None:
    """Have ``owner.name`` die once it is called: at its beginning, or when it is done."""
    real = getattr(owner, name)
    lock = threading.Lock()

    def patched(*arguments: Any, **named: Any) -> Any:
        # One at a time: "between two servers" needs a first and a second.
        with lock:
            if before:
                _die()
            answer = real(*arguments, **named)
            if after is not None:
                after()
            return answer

    setattr(owner, name, patched)


def _flip() -> None:
    real = slipstream.client.chunks_of
    left = [1]

    def flipped(tensors: Mapping[str, torch.Tensor]) -> Iterator[tensor_pb2.TensorChunk]:
        for chunk in real(tensors):
            if left and len(chunk.data) > 100:
                left.clear()
                data = bytearray(chunk.data)
                data[50] ^= 4
                chunk.data = bytes(data)
            yield chunk

    slipstream.client.chunks_of = flipped


def _bad(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[], None]:
    """Return what has the next payload changed when it is read, with specs that fit it."""

    def arm() -> None:
        real = Payloads.get

        def get(self: Payloads, version: int) -> DraftPayload:
            Payloads.get = real  # type: ignore[method-assign]
            payload = real(self, version)
            tensors = dict(payload.tensors)
            change(tensors)
            specs = [spec_of(name, tensor) for name, tensor in sorted(tensors.items())]
            return replace(payload, tensors=tensors, specs=specs)

        Payloads.get = get  # type: ignore[method-assign]

    return arm


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].clone()
    tensors["fc.weight"][3, 5] = float("nan")


def _shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()


def _other_policy(tensors: dict[str, torch.Tensor]) -> None:
    """Make it another policy's draft, which drafts another part of the vocabulary."""
    tensors["d2t"] = tensors["d2t"] + 1


def _full() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def _clock(seconds: float) -> Callable[[], None]:
    def arm() -> None:
        real = time.time

        def jumped() -> float:
            # gRPC turns this clock into deadlines for its core, whose own clock did not jump: a
            # day back would mean to it that every deadline has passed.
            caller = sys._getframe(1).f_globals["__name__"]
            return real() + (0.0 if caller.startswith("grpc") else seconds)

        time.time = jumped

    return arm


def _strike(when: str, address: str, pids: Sequence[int]) -> None:
    """Kill processes of the server at ``address`` at one instant of its next publish.

    Args:
        when: "before stage", "during stage", "before commit", "during commit", "after commit".
        address: of its control plane.
        pids: the processes that die.
    """
    left = list(pids)

    def signalled(number: int) -> None:
        for pid in left:
            os.kill(pid, number)

    def kill() -> None:
        signalled(signal.SIGKILL)
        left.clear()

    moment, phase = when.split()
    real = getattr(RolloutClient, phase)

    def struck(self: RolloutClient, *arguments: Any, **named: Any) -> Any:
        if self.address != address or not left:
            return real(self, *arguments, **named)
        if moment == "before":
            kill()
        elif when == "during stage":
            _after_first_chunk(kill)
        elif when == "during commit":
            # It has the call and does not answer it; then it is gone.
            signalled(signal.SIGSTOP)
            threading.Timer(0.5, kill).start()
        answer = real(self, *arguments, **named)
        if moment == "after":
            kill()
        return answer

    setattr(RolloutClient, phase, struck)


def _after_first_chunk(then: Callable[[], None]) -> None:
    real = slipstream.client.chunks_of

    def chunks(tensors: Mapping[str, torch.Tensor]) -> Iterator[tensor_pb2.TensorChunk]:
        for number, chunk in enumerate(real(tensors)):
            if number == 1:
                slipstream.client.chunks_of = real
                then()
            yield chunk

    slipstream.client.chunks_of = chunks


_COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "promote": _promote,
    "promote-both": _promote_both,
    "arm": _arm,
    "wanted": _wanted,
    "pointer": _pointer,
    "sent": _sent,
    "roll-back": _roll_back,
}

_ARMS: dict[str, Callable[..., None]] = {
    "strike": _strike,
    "die-before-stage": lambda: _patched(RolloutClient, "stage", None, before=True),
    "die-during-stage": lambda: _patched(RolloutClient, "stage", _die),
    "die-before-commit": lambda: _patched(PointerStore, "begin_commit", _die),
    "die-between-commits": lambda: _patched(commits, "commit_on", _die),
    "die-after-commits": lambda: _patched(PointerStore, "begin_trial", None, before=True),
    "flip": _flip,
    "nan": _bad(_nan),
    "shape": _bad(_shape),
    "other-policy": _bad(_other_policy),
    "full": _full,
    "clock-forward": _clock(86400.0),
    "clock-back": _clock(-86400.0),
}
