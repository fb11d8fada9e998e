"""``PolicyBridge``, the training loop's entry point, and a disabled one with the same methods."""

from __future__ import annotations

import itertools
import logging
import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
from torch import nn

from policy_bridge.capture import Capture, NullCapture
from policy_bridge.config import BridgeConfig
from policy_bridge.connection import Connection
from policy_bridge.copier import Copier
from policy_bridge.fleet import RolloutFleet
from policy_bridge.guard import CaptureGuard, Cause, check_temperature, thread_ended
from policy_bridge.model import find_modules
from policy_bridge.outbox import Outbox
from policy_bridge.selection import Spent, bytes_per_token
from policy_bridge.session import PolicyMatrices, PolicySnapshot, Session
from policy_bridge.stats import BridgeStats, Counters, SyncResult, flat, flat_status
from policy_bridge.sync import NullSyncWindow, SyncWindow, TrainerProbe
from policy_bridge.weight_watch import WeightWatch
from slipstream import FORKS_DISTURBED
from slipstream.client import open_channel
from slipstream.errors import RefusedError
from slipstream.sampling import sampling_of
from slipstream.shortage import raise_unless_shortage
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from slipstream.v1 import release_pb2

logger = logging.getLogger(__name__)

T = TypeVar("T")
_FORK_WARNING = (
    "gRPC's fork handlers are on: child processes forked from this one can hang or end by SIGABRT "
    "(grpc/grpc#43055). Next step: start it with GRPC_ENABLE_FORK_SUPPORT=0, or import "
    "policy_bridge before grpc"
)
_STATUS_SECONDS = 1.0
_PUSH_DEFERRED = (
    "the push is left to the next sync: the draft trainer, which knows the rollout servers, was "
    "not reached yet; they serve an older policy. Next step: start it, or set "
    "BridgeConfig.rollout_servers"
)


class DisabledBridge(AbstractContextManager["DisabledBridge"]):
    """A bridge that does nothing: the methods of ``PolicyBridge``, no thread, no connection."""

    policy_version: int | None = None
    """The last version given to ``sync``."""

    def __init__(self) -> None:
        self._counters = Counters()

    def __exit__(self, *_: object) -> None:
        self.close()

    def sync(self, version: int, *, lead: bool = True) -> NullSyncWindow:
        """A window that does nothing."""
        self.policy_version = version
        return NullSyncWindow(version)

    def capture(
        self,
        *,
        temperature: float = 1.0,
        forwards: int | None = None,
        sampling: Mapping[str, object] | None = None,
        training: bool = False,
    ) -> NullCapture:
        """A window that captures nothing."""
        self._counters.add(captures_skipped=1)
        return NullCapture()

    def wait_connected(self, timeout: float) -> bool:
        """Return False: there is no trainer."""
        return False

    def flush(self, timeout: float) -> bool:
        """Return True: nothing waits."""
        return True

    def stats(self) -> BridgeStats:
        """Return zeros, and how many captures were skipped."""
        return self._counters.snapshot(
            policy_version=self.policy_version, capture_off_reason="the bridge is disabled"
        )

    def metrics(self) -> dict[str, float]:
        """Return ``stats`` as flat numbers."""
        return flat("bridge", self.stats())

    def close(self) -> None:
        """Do nothing."""


class PolicyBridge(AbstractContextManager["PolicyBridge"]):
    """Captures samples in a policy's own forward passes, and wraps its weight syncs.

    Used from the training loop's thread. Owns its background threads and connections; ``close`` (or
    leaving ``with``) ends them. No call waits for the trainer beyond its deadline.

    Unless ``config.strict``, an error in the policy, the trainer's draft, a version or a call of
    ``ship`` turns capture off with the reason in ``stats().capture_off_reason``; the training run
    goes on. Misuse of the bridge itself always raises: a bad configuration, a window in another, a
    call after ``close``, a policy that did not reach the rollout servers. So does a sharded policy
    whose matrices a rank has no device memory to gather.

    With a policy that is sharded over ranks (FSDP2) every rank has a bridge, built after
    ``fully_shard``, and every rank enters ``sync``, which gathers two matrices.

    Args:
        model: a Hugging Face causal language model, recognised by structure, or any module
            whose parts ``config.modules`` names; wrapped by DDP, PEFT or fully_shard, or not.
        config: addresses, bounds and deadlines.

    Raises:
        RefusedError: (strict) the model's parts are not found, or it cannot be captured.
    """

    def __init__(self, model: nn.Module, config: BridgeConfig) -> None:
        if FORKS_DISTURBED:
            logger.warning(_FORK_WARNING)
        self._process = os.getpid()
        self._model = model
        self._config = config
        self._counters = Counters()
        self._guard = CaptureGuard(config, self._counters)
        self._modules = self._guarded(
            find_modules, model, config.modules, config.logit_scale, config.logit_soft_cap
        )
        self._matrices = PolicyMatrices(self._modules) if self._modules is not None else None
        self._draw = random.Random(config.seed).random
        self._device = torch.device("cpu")
        self._copier = Copier(self._device)
        self._bytes_per_step, outbox_bytes = config.bounds(self._device.type)
        self._outbox = Outbox(outbox_bytes, self._counters)
        trainer, credentials = config.trainer, config.trainer_credentials
        self._channel = open_channel(trainer, credentials=credentials)
        # Weight syncs must not wait behind states that a slow trainer has not read yet.
        self._sync_channel = open_channel(trainer, credentials=credentials, own_connection=True)
        self._trainer = pb_grpc.DraftTrainerStub(self._sync_channel)
        self._fleet = RolloutFleet(config)
        # Unique over processes and restarts that continue one run.
        prefix, numbers = uuid.uuid4().hex[:12], itertools.count()
        self._next_id = lambda: f"{prefix}-{next(numbers)}"
        # What the windows of the version that was synced last have used.
        self._spent = Spent(self._bytes_per_step)
        self._probed = False
        self._weights = WeightWatch()
        self._last_sync: SyncResult | None = None
        # Keyed by session id: servers join and leave while a run is open.
        self._servers: dict[str, tuple[str, ...]] = {}
        self._window_open = False
        self._last_window: Capture | None = None
        self._closed = False
        # Two: a sync goes on without a trainer that has not answered its probe yet, and for
        # ``metrics`` a call is nearly always in flight.
        self._probe = TrainerProbe(self._trainer, config.rpc_seconds)
        self._status_probe = TrainerProbe(self._trainer, config.rpc_seconds)
        # A run is opened with the policy's parts: without them there is no connection.
        self._connection = (
            Connection(self._channel, self._modules, self._outbox, config, self._counters)
            if self._modules
            else None
        )
        self._guard.connection = self._connection

    @staticmethod
    def disabled() -> DisabledBridge:
        """A bridge that does nothing, with the same methods."""
        return DisabledBridge()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def policy_version(self) -> int | None:
        """The last version whose sync ended well; None before it."""
        return self._guard.version

    @contextmanager
    def sync(self, version: int, *, lead: bool = True) -> Iterator[SyncWindow]:
        """A window around the policy's weight sync. Enter it when the weights are final.

        On entry the policy's matrices are copied for the trainer and the draft is staged;
        inside, ``window.push_policy()`` or the framework's own sync; on a clean exit policy
        and draft are committed. An exception inside aborts the policy's stage.

        Args:
            version: higher than every version whose sync ended well. Count up by one: a draft
                trainer's ``replay.max_policy_lag`` is a difference of these numbers.
            lead: False in all but one of the processes that train one policy together: that
                one stages the draft, brings the policy to the servers and announces it to the
                trainer; samples of the others wait for that, ``announce_seconds`` at most.

        Raises:
            RefusedError: a window inside another, a closed bridge, or (strict) a version that
                does not rise or a trainer that refused this policy.
            PolicySyncError: (on exit) a rollout server did not take the policy.
            MemoryError: no device memory to gather the matrices of a sharded policy.
        """
        self._check_open()
        if self._window_open:
            raise RefusedError("sync", "an open window", "none", "leave the other window first")
        if version < 0:
            raise RefusedError("version", version, "a whole number >= 0", "count from 0 up")
        session = self._guard.session_for(version)
        snapshot = self._snapshot(session if self._bytes_per_step else None, version, lead)
        waited = self._last_sync is not None and self._last_sync.policy_waits
        window = self._new_sync_window(version, lead)
        self._window_open = True
        try:
            with window:
                yield window
        finally:
            self._window_open = False
            if window.trainer_silent:
                self._probe.send()
        if window.result is None:
            return
        self._after_sync(window.result, snapshot, session)
        if window.result.policy_waits:
            self._counters.add(waiting_pushes=1)
            if not waited:
                logger.warning("policy version %d: %s", version, _PUSH_DEFERRED)

    def capture(
        self,
        *,
        temperature: float = 1.0,
        forwards: int | None = None,
        sampling: Mapping[str, object] | None = None,
        training: bool = False,
    ) -> Capture | NullCapture:
        """A window around forward passes whose states are sent to the trainer.

        Args:
            temperature: of the rollouts, > 0; the given log-probs must be at it too.
            sampling: what else they were sampled with, by vLLM's names: ``top_p``, ``top_k``,
                ``min_p``, ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``,
                ``logit_bias``. Log-probs are those before it.
            forwards: how many passes the window will have, if known; the choice among
                sequences and the copies are then made after each pass, not at the window's end,
                and less is held on the device. Without it the window holds
                ``config.device_bytes`` of states at most.
            training: the window is around the passes that the loop trains on, gradient
                accumulation and backward included: those without gradients are passed over. For
                loops that have no log-prob pass; states are of the version before the next
                optimizer step.

        Returns:
            ``Capture``; or a ``NullCapture`` while capture is off, when the windows of this version
            have used up ``config.bytes_per_step``, or when a trainer whose training is paused needs
            no more tokens.

        Raises:
            RefusedError: a closed bridge, or (strict) a bad argument, no ``sync`` yet, or what
                turned capture off.
        """
        self._check_open()
        try:
            temperature = check_temperature(temperature)
            sampled_with = sampling_of(sampling or {})
            if forwards is not None and forwards < 1:
                raise RefusedError("forwards", forwards, "at least 1, or None", "count the passes")
            if self.policy_version is None:
                raise RefusedError("policy_version", "none", "a version", "sync a version first")
        except RefusedError as error:
            self._counters.add(captures_refused=1)
            self._guard.refuse(Cause.CALL, error)
            return NullCapture()
        self._guard.check_trainer()
        if self._copier.died:
            self._guard.refuse(Cause.BRIDGE, thread_ended("that copies states"))
        off = bool(self._guard.off_reason())
        window = None if off else self._new_capture(temperature, forwards, training)
        if window is None:
            self._counters.add(captures_skipped=1)
            return NullCapture()
        window.sampling = sampled_with
        self._last_window = window
        return window

    def wait_connected(self, timeout: float) -> bool:
        """Wait for the trainer. A loop that must not lose its first step may call this."""
        return self._connection is not None and self._connection.wait_connected(timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until everything captured was acknowledged or shed. False: not in time."""
        deadline = time.monotonic() + timeout
        return self._copier.wait_idle(timeout) and self._outbox.wait_empty(
            max(0.0, deadline - time.monotonic())
        )

    def stats(self) -> BridgeStats:
        """Every counter at this moment."""
        return self._counters.snapshot(
            connected=self._guard.connected,
            policy_version=self.policy_version,
            outbox_samples=len(self._outbox),
            outbox_bytes=self._outbox.nbytes,
            outbox_capacity_bytes=self._outbox.capacity_bytes,
            last_sync=self._last_sync,
            capture_off_reason=self._guard.off_reason() or self._guard.refusal(),
        )

    def metrics(self) -> dict[str, float]:
        """Return every number of ``stats`` and of the trainer's status, for a loop's own logger.

        Never waits: the status is the newest that came, asked for in the background when this is
        called, at most once a second. ``trainer/status_age_seconds`` says how old it is; before the
        first answer there is nothing under ``trainer/``.

        Returns:
            By path: ``bridge/accepted``, ``bridge/shed/outbox_full``,
            ``bridge/last_sync/commit_seconds``, ``trainer/train_steps``,
            ``trainer/step_acceptance/0``, ...
        """
        if not self._closed:
            self._status_probe.poll(_STATUS_SECONDS)
        found = flat("bridge", self.stats())
        if (status := self._status_probe.status) is not None:
            found |= flat_status(status)
            found["trainer/status_age_seconds"] = time.monotonic() - self._status_probe.answered_at
        return found

    def close(self) -> None:
        """Drain for ``drain_seconds`` if the trainer is there, then stop. Idempotent.

        Raises:
            TimeoutError: the background thread did not end.
        """
        # In a child forked from the training process none of our threads run, and closing the
        # channels would block.
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        try:
            self._weights.close()
            if self._last_window is not None and self._last_window.is_open:
                # Otherwise its hooks stay on the model, and its states in memory.
                self._last_window.__exit__(RuntimeError)
            self._copier.close()
            if self._guard.connected:
                self._outbox.wait_empty(self._config.drain_seconds)
        finally:
            # Also after an interrupt: while a stream is open the trainer takes no other run.
            if self._connection is not None:
                self._connection.stop()
            self._outbox.close()
            self._probe.close()
            self._status_probe.close()
            self._channel.close()
            self._sync_channel.close()
            self._fleet.close()
            if self._connection is not None and not self._connection.join():
                raise TimeoutError("the bridge's sender thread did not end")

    def _guarded(self, call: Callable[..., T], *arguments: object) -> T | None:
        """Return what ``call`` returns; None, with capture turned off, if it refuses the model."""
        try:
            return call(*arguments)
        except RefusedError as error:
            self._guard.refuse(Cause.MODEL, error)
            return None

    def _snapshot(self, session: Session | None, version: int, lead: bool) -> PolicySnapshot | None:
        """Take the snapshot to announce; None where nothing of this version will be captured."""
        if self._matrices is None:
            return None
        try:
            # With a sharded policy this is a collective call: every process makes it.
            snapshot = self._guarded(self._matrices.snapshot, session if lead else None, version)
        except RuntimeError as error:
            raise_unless_shortage(error)
            self._counters.error(f"no device memory to copy the matrices of version {version}")
            return None
        return snapshot if lead or session is None else PolicySnapshot(version, {})

    def _after_sync(
        self, result: SyncResult, snapshot: PolicySnapshot | None, session: Session | None
    ) -> None:
        self._last_sync = result
        self._counters.add(syncs=1, servers_left_out=len(result.left_out))
        if result.left_out:
            logger.warning("rollout servers are left out: %s", dict(result.left_out))
        # A new object: a window before this sync that chooses late still counts in the old one.
        self._spent = Spent(self._bytes_per_step)
        self._guard.synced(result.policy_version, session if snapshot is not None else None)
        if self._modules is not None:
            # Read after the window: merging adapters inside it is part of the sync.
            self._modules.look_again()
            self._weights.synced(self._modules.weights())
        if snapshot is not None and self._connection is not None:
            self._connection.offer_policy(snapshot)

    def _new_sync_window(self, version: int, lead: bool) -> SyncWindow:
        known = None if self._connection is None else self._connection.session
        trainer_servers: tuple[str, ...] = ()
        if known is not None:
            trainer_servers = self._servers.get(known.session_id, known.rollout_servers)
        answers = self._probe.answers()
        return SyncWindow(
            version,
            self._model,
            self._config,
            trainer=self._trainer,
            # Also for a version that is not captured: servers join, and releases wait for a sync.
            session=known if self._guard.connected and answers else None,
            servers=self._config.rollout_servers or trainer_servers,
            told=self._servers,
            fleet_known=known is not None or self._connection is None,
            fleet=self._fleet,
            lead=lead,
        )

    def _new_capture(
        self, temperature: float, forwards: int | None, training: bool
    ) -> Capture | None:
        config, modules, outbox = self._config, self._modules, self._outbox
        session, version = self._guard.session, self._guard.version
        if modules is None or session is None or version is None:
            return None
        states_dtype = getattr(torch, config.states_dtype) if config.states_dtype else None
        budget, spent = sys.maxsize, self._spent
        if self._connection is not None and (tokens := self._connection.wanted_tokens):
            dtype = states_dtype or modules.head_weight.dtype
            token = bytes_per_token(len(session.aux_layers), modules.hidden_size, dtype)
            budget = tokens * token
        # Skip capture if less than one average sample is left of the budget.
        if spent.samples * (min(budget, self._bytes_per_step) - spent.nbytes) < spent.nbytes:
            return None
        return Capture(
            modules=modules,
            session=session,
            policy_version=version,
            moved=self._weights.moved,
            temperature=temperature,
            budget_bytes=budget,
            spent=spent,
            device_bytes=config.device_bytes,
            forwards=forwards,
            draw=self._draw,
            states_dtype=states_dtype,
            next_id=self._next_id,
            offer=lambda sample, rank: outbox.put(sample, rank),
            takes=lambda size, rank: outbox.takes(size, version, rank),
            copier=self._copier,
            copier_for=self._copier_for,
            training=training,
            probe=not self._probed,
            refuse=self._refuse,
            done=self._window_done,
            counters=self._counters,
        )

    def _refuse(self, error: RefusedError) -> None:
        # No later call can mend what the first window finds wrong with the policy itself.
        model = error.reason == release_pb2.REFUSAL_REASON_MODEL
        self._guard.refuse(Cause.MODEL if model else Cause.CALL, error)

    def _window_done(self, probed: bool) -> None:
        # A window that had nothing to compare is no probe.
        self._probed = self._probed or probed
        self._guard.clear(Cause.CALL)

    def _copier_for(self, device: torch.device) -> tuple[Copier, int]:
        """The copier for states on ``device``, and the bound on a version's bytes there: the policy
        may move after the bridge was built."""
        if self._device != device:
            self._copier.close()
            self._device, self._copier = device, Copier(device)
            self._bytes_per_step, outbox_bytes = self._config.bounds(device.type)
            self._outbox.grow(outbox_bytes)
        return self._copier, self._bytes_per_step

    def _check_open(self) -> None:
        if self._closed:
            raise RefusedError("bridge", "closed", "open", "build another PolicyBridge")
