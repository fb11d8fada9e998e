"""``PolicyBridge``: the one object that a training loop holds."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from policy_bridge.announce import PolicySnapshot
from policy_bridge.batch import check_temperature
from policy_bridge.capture import Capture, CapturePlan
from policy_bridge.config import FLOAT8, BridgeConfig
from policy_bridge.fleet import RolloutFleet
from policy_bridge.gate import CaptureGate
from policy_bridge.matrices import PolicyMatrices
from policy_bridge.memory import sample_memory
from policy_bridge.modules import PolicyModules, find_modules, stamp_of
from policy_bridge.null import DisabledBridge, NullCapture
from policy_bridge.probe import TrainerProbe
from policy_bridge.selection import Selector, UniformRandom
from policy_bridge.session import Session
from policy_bridge.shipper import Shipper
from policy_bridge.stats import BridgeStats, Counters, SyncResult
from policy_bridge.switch import CaptureSwitch, Cause
from policy_bridge.sync import SyncParties, SyncWindow
from slipstream.channel import open_channel
from slipstream.refusal import RefusedError
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc


class PolicyBridge:
    """Feeds a draft trainer from a policy's own forward passes and brackets its weight syncs.

    Used from one thread, the training loop's. Owns one background thread and
    its connections; ``close`` (or leaving ``with``) ends them. Neither the
    construction nor any call waits for the trainer beyond its deadline.

    Unless ``config.strict``, what is wrong with the policy, the trainer's draft, a version or
    a call of ``ship`` turns capture off and is told by ``stats().capture_off_reason``: it never
    ends a training run. What raises in both modes are mistakes in how the bridge itself is
    handled: a bad configuration, a window inside another, a call after ``close``, a policy
    that did not reach the rollout servers.

    With a policy that is sharded over ranks (FSDP2) every rank has a bridge, built after
    ``fully_shard``, and enters ``sync`` alike: it gathers two matrices.

    Args:
        model: a Hugging Face causal language model, recognised by structure, or any module
            whose parts ``config.modules`` names; wrapped by DDP, PEFT or fully_shard, or not.
        config: addresses, bounds and deadlines.
        selector: which sequences to ship; uniform random by default.

    Raises:
        RefusedError: (strict) the model's parts are not found, or it cannot be captured.
    """

    def __init__(
        self, model: nn.Module, config: BridgeConfig, selector: Selector | None = None
    ) -> None:
        self._model = model
        self._config = config
        self._switch = CaptureSwitch(config.strict)
        self._modules = self._find_modules()
        self._matrices = PolicyMatrices(self._modules) if self._modules else None
        self._selector = selector or UniformRandom(config.seed)
        self._counters = Counters()
        self._outbox, self._runner = sample_memory(config, self._modules, self._counters)
        shown = config.trainer_credentials
        self._channel = open_channel(config.trainer, credentials=shown)
        # Weight syncs must not wait behind states that a slow trainer has not read yet.
        self._sync_channel = open_channel(config.trainer, credentials=shown, own_connection=True)
        self._trainer = pb_grpc.DraftTrainerStub(self._sync_channel)
        self._fleet = RolloutFleet(
            config.policy_seconds, config.rpc_seconds, config.rollout_credentials
        )
        # Unique over processes and restarts that continue one run.
        prefix, numbers = uuid.uuid4().hex[:12], itertools.count()
        self._next_id = lambda: f"{prefix}-{next(numbers)}"
        self._stamp = 0
        self._weights: list[torch.Tensor] = []
        self._last_sync: SyncResult | None = None
        self._window_open = False
        self._closed = False
        self._probe = TrainerProbe(self._trainer, config.rpc_seconds)
        # Without the policy's parts there is nothing to open a run with.
        self._shipper = (
            Shipper(self._channel, self._modules, self._outbox, config, self._counters)
            if self._modules
            else None
        )
        self._gate = CaptureGate(config, self._switch, self._counters, self._shipper)

    @staticmethod
    def disabled() -> DisabledBridge:
        """A bridge that is switched off, with the same surface."""
        return DisabledBridge()

    def __enter__(self) -> PolicyBridge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def policy_version(self) -> int | None:
        """The last version whose sync ended well; None before it."""
        return self._gate.version

    @contextmanager
    def sync(self, version: int, *, lead: bool = True) -> Iterator[SyncWindow]:
        """A window around the policy's weight sync. Enter it when the weights are final.

        On entry the policy's matrices are copied for the trainer and the draft is staged;
        inside, ``window.push_policy()`` or the framework's own sync; on a clean exit policy
        and draft are committed. An exception inside aborts the policy's stage.

        Args:
            version: higher than every version whose sync ended well.
            lead: False in all but one of the processes that train one policy together: that
                one stages the draft and brings the policy to the servers.

        Raises:
            RefusedError: a window inside another, a closed bridge, or (strict) a version that
                does not rise or a trainer that refused this policy.
            PolicySyncError: (on exit) a rollout server did not take the policy.
        """
        self._check_open()
        if self._window_open:
            raise RefusedError("sync", "an open window", "none", "leave the other window first")
        if version < 0:
            raise RefusedError("version", version, "a whole number >= 0", "count from 0 up")
        session = self._gate.session_for(version)
        snapshot = self._snapshot(session, version)
        trusted = self._probe.answers()
        window = SyncWindow(
            version,
            self._model,
            SyncParties(
                trainer=self._trainer,
                session=session if self._gate.connected and trusted else None,
                servers=self._config.rollout_servers
                or (session.rollout_servers if session else ()),
                fleet=self._fleet,
            ),
            self._config,
            lead,
        )
        self._window_open = True
        try:
            with window:
                yield window
        finally:
            self._window_open = False
            if window.trainer_silent:
                self._probe.send()
        if window.result is not None:
            self._synced(window.result, snapshot, session)

    def capture(
        self, *, temperature: float = 1.0, forwards: int | None = None
    ) -> Capture | NullCapture:
        """A window around forward passes whose states are to be shipped.

        Args:
            temperature: of the rollouts, > 0; the given log-probs must be at it too.
            forwards: how many passes the window will ship, if known; then each is
                chosen from and let go at once instead of at the window's end.

        Returns:
            ``Capture``; or, while capture is off, a ``NullCapture``.

        Raises:
            RefusedError: a closed bridge, or (strict) a bad argument, no ``sync`` yet, or what
                turned capture off.
        """
        self._check_open()
        try:
            check_temperature(temperature)
            if forwards is not None and forwards < 1:
                raise RefusedError("forwards", forwards, "at least 1, or None", "count the passes")
            if self.policy_version is None:
                raise RefusedError(
                    "policy_version", "none", "a version", "leave a bridge.sync(version) first"
                )
        except RefusedError as error:
            self._counters.add(captures_refused=1)
            self._switch.refuse(Cause.CALL, error)
            return NullCapture()
        self._gate.check_trainer()
        plan = None if self._gate.off_reason() else self._plan(temperature, forwards)
        if plan is None:
            self._counters.add(captures_skipped=1)
            return NullCapture()
        return Capture(plan, self._counters)

    def wait_connected(self, timeout: float) -> bool:
        """Wait for the trainer. A loop that must not lose its first step may call this."""
        return self._shipper is not None and self._shipper.wait_connected(timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until everything captured was acknowledged or shed. False: not in time."""
        deadline = time.monotonic() + timeout
        return self._runner.wait_idle(timeout) and self._outbox.wait_empty(
            max(0.0, deadline - time.monotonic())
        )

    def stats(self) -> BridgeStats:
        """Every counter at this moment."""
        return self._counters.snapshot(
            connected=self._gate.connected,
            policy_version=self.policy_version,
            outbox_samples=len(self._outbox),
            outbox_bytes=self._outbox.nbytes,
            outbox_capacity_bytes=self._config.outbox_bytes,
            ring_bytes=self._shipper.ring_bytes if self._shipper is not None else None,
            last_sync=self._last_sync,
            capture_off_reason=self._gate.off_reason() or self._switch.reason(),
        )

    def close(self) -> None:
        """Drain for ``drain_seconds`` if the trainer is there, then stop. Idempotent.

        Raises:
            TimeoutError: the background thread did not end.
        """
        if self._closed:
            return
        self._closed = True
        self._runner.close()
        if self._gate.connected:
            self._outbox.wait_empty(self._config.drain_seconds)
        if self._shipper is not None:
            self._shipper.stop()
        self._outbox.close()
        self._probe.close()
        self._channel.close()
        self._sync_channel.close()
        self._fleet.close()
        if self._shipper is not None and not self._shipper.join():
            raise TimeoutError("the bridge's shipping thread did not end")

    def _find_modules(self) -> PolicyModules | None:
        try:
            return find_modules(self._model, self._config.modules)
        except RefusedError as error:
            self._switch.refuse(Cause.MODEL, error)
            return None

    def _snapshot(self, session: Session | None, version: int) -> PolicySnapshot | None:
        if self._matrices is None:
            return None
        wanted = session if self._config.bytes_per_step else None
        try:
            return self._matrices.snapshot(wanted, version)
        except RefusedError as error:
            self._switch.refuse(Cause.MODEL, error)
            return None

    def _synced(
        self, result: SyncResult, snapshot: PolicySnapshot | None, session: Session | None
    ) -> None:
        self._last_sync = result
        self._counters.add(syncs=1)
        self._gate.synced(result.policy_version, session if snapshot is not None else None)
        if self._modules is not None:
            # Taken now: merging adapters inside the window is part of the sync.
            self._weights = self._modules.weights()
            self._stamp = stamp_of(self._weights)
        if snapshot is not None and self._shipper is not None:
            self._shipper.offer_policy(snapshot)

    def _plan(self, temperature: float, forwards: int | None) -> CapturePlan | None:
        config, modules, outbox = self._config, self._modules, self._outbox
        session, version = self._gate.session, self._gate.version
        if modules is None or session is None or version is None:
            return None
        name = "" if config.states_dtype == FLOAT8 else config.states_dtype
        return CapturePlan(
            modules=modules,
            session=session,
            policy_version=version,
            weights_stamp=self._stamp,
            weights=self._weights,
            temperature=temperature,
            budget_bytes=config.bytes_per_step,
            forwards=forwards,
            states_dtype=getattr(torch, name) if name else None,
            selector=self._selector,
            next_id=self._next_id,
            offer=lambda sample, rank: outbox.offer(sample, config.offer_seconds, rank),
            reserve=lambda size, rank: outbox.reserve(size, version, rank, config.offer_seconds),
            runner=self._runner,
            refuse=lambda error: self._switch.refuse(Cause.CALL, error),
            done=lambda: self._switch.clear(Cause.CALL),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise RefusedError("bridge", "closed", "open", "build another PolicyBridge")
