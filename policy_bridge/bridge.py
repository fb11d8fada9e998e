"""``PolicyBridge``: the one object that a training loop holds."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from policy_bridge.announce import PolicySnapshot, take_snapshot
from policy_bridge.batch import check_temperature
from policy_bridge.capture import Capture, CapturePlan
from policy_bridge.config import BridgeConfig
from policy_bridge.fleet import RolloutFleet
from policy_bridge.modules import find_modules
from policy_bridge.null import DisabledBridge, NullCapture
from policy_bridge.outbox import Outbox
from policy_bridge.selection import Selector, UniformRandom
from policy_bridge.session import Session
from policy_bridge.shipper import Shipper
from policy_bridge.stats import BridgeStats, Counters, SyncResult
from policy_bridge.sync import SyncParties, SyncWindow
from slipstream.channel import open_channel
from slipstream.refusal import RefusedError
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc


class PolicyBridge:
    """Feeds a draft trainer from a policy's own forward passes and brackets its weight syncs.

    Used from one thread, the training loop's. Owns one background thread and
    its connections; ``close`` (or leaving ``with``) ends them. Neither the
    construction nor any call waits for the trainer beyond its deadline.

    Args:
        model: a Hugging Face causal language model, recognised by structure.
        config: addresses, bounds and deadlines.
        selector: which sequences to ship; uniform random by default.

    Raises:
        RefusedError: the model's parts are not found, or it cannot be captured.
    """

    def __init__(
        self, model: nn.Module, config: BridgeConfig, selector: Selector | None = None
    ) -> None:
        self._model = model
        self._config = config
        self._modules = find_modules(model, config.modules)
        self._selector = selector or UniformRandom(config.seed)
        self._counters = Counters()
        self._outbox = Outbox(config.outbox_bytes, self._counters)
        self._channel = open_channel(config.trainer)
        self._trainer = pb_grpc.DraftTrainerStub(self._channel)
        self._fleet = RolloutFleet(config.policy_seconds, config.rpc_seconds)
        # Unique over processes and restarts that continue one run.
        prefix, numbers = uuid.uuid4().hex[:12], itertools.count()
        self._next_id = lambda: f"{prefix}-{next(numbers)}"
        self._version: int | None = None
        self._stamp = 0
        self._captured_for: Session | None = None
        self._last_sync: SyncResult | None = None
        self._window_open = False
        self._closed = False
        self._shipper = Shipper(self._channel, self._modules, self._outbox, config, self._counters)

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
        return self._version

    @contextmanager
    def sync(self, version: int) -> Iterator[SyncWindow]:
        """A window around the policy's weight sync. Enter it when the weights are final.

        On entry the policy's matrices are copied for the trainer and the draft is staged;
        inside, ``window.push_policy()`` or the framework's own sync; on a clean exit policy
        and draft are committed. An exception inside aborts the policy's stage.

        Args:
            version: higher than every version whose sync ended well.

        Raises:
            RefusedError: a version that does not rise, a window inside another, or a
                closed bridge.
            PolicySyncError: (on exit) a rollout server did not take the policy.
        """
        self._check_open()
        if self._window_open:
            raise RefusedError("sync", "an open window", "none", "leave the other window first")
        if (self._version is not None and version <= self._version) or version < 0:
            raise RefusedError(
                "version",
                version,
                "a whole number >= 0 that rises" if self._version is None else f"> {self._version}",
                "count the policy's versions up",
            )
        self._shipper.wait_first_attempt(self._config.connect_seconds)
        session = self._shipper.session
        wanted = session is not None and self._config.bytes_per_step > 0
        snapshot = take_snapshot(self._modules, session, version) if session and wanted else None
        window = SyncWindow(
            version,
            self._model,
            SyncParties(
                trainer=self._trainer,
                session=session if self._shipper.connected else None,
                servers=self._config.rollout_servers
                or (session.rollout_servers if session else ()),
                fleet=self._fleet,
            ),
            self._config,
        )
        self._window_open = True
        try:
            with window:
                yield window
        finally:
            self._window_open = False
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
            ``Capture``; or, while no trainer has been reached at this version's sync or
            when the budget is 0, a ``NullCapture``.

        Raises:
            RefusedError: a bad argument, no ``sync`` yet, or a closed bridge.
        """
        self._check_open()
        check_temperature(temperature)
        if forwards is not None and forwards < 1:
            raise RefusedError("forwards", forwards, "at least 1, or None", "count the passes")
        if self._version is None:
            raise RefusedError(
                "policy_version", "none", "a version", "leave a bridge.sync(version) window first"
            )
        session, wanted = self._captured_for, self._shipper.session
        if session is None or wanted is None or not session.same_shape(wanted):
            self._counters.add(captures_skipped=1)
            return NullCapture()
        name = self._config.states_dtype
        plan = CapturePlan(
            modules=self._modules,
            session=session,
            policy_version=self._version,
            weights_stamp=self._stamp,
            temperature=temperature,
            budget_bytes=self._config.bytes_per_step,
            forwards=forwards,
            states_dtype=getattr(torch, name) if name else None,
            selector=self._selector,
            next_id=self._next_id,
            offer=lambda sample: self._outbox.offer(sample, self._config.offer_seconds),
        )
        return Capture(plan, self._counters)

    def wait_connected(self, timeout: float) -> bool:
        """Wait for the trainer. A loop that must not lose its first step may call this."""
        return self._shipper.wait_connected(timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until everything captured was acknowledged or shed. False: not in time."""
        return self._outbox.wait_empty(timeout)

    def stats(self) -> BridgeStats:
        """Every counter at this moment."""
        return self._counters.snapshot(
            connected=self._shipper.connected,
            policy_version=self._version,
            outbox_samples=len(self._outbox),
            outbox_bytes=self._outbox.nbytes,
            last_sync=self._last_sync,
        )

    def close(self) -> None:
        """Drain for ``drain_seconds`` if the trainer is there, then stop. Idempotent.

        Raises:
            TimeoutError: the background thread did not end.
        """
        if self._closed:
            return
        self._closed = True
        if self._shipper.connected:
            self._outbox.wait_empty(self._config.drain_seconds)
        self._shipper.stop()
        self._outbox.close()
        self._channel.close()
        self._fleet.close()
        if not self._shipper.join():
            raise TimeoutError("the bridge's shipping thread did not end")

    def _synced(
        self, result: SyncResult, snapshot: PolicySnapshot | None, session: Session | None
    ) -> None:
        self._version = result.policy_version
        self._last_sync = result
        self._counters.add(syncs=1)
        self._captured_for = session if snapshot is not None else None
        # Taken now: merging adapters inside the window is part of the sync.
        self._stamp = self._modules.stamp()
        if snapshot is not None:
            self._shipper.offer_policy(snapshot)

    def _check_open(self) -> None:
        if self._closed:
            raise RefusedError("bridge", "closed", "open", "build another PolicyBridge")
