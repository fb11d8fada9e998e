"""The background thread that keeps a run open and drains the outbox into it."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Sequence

import grpc

from policy_bridge.announce import Announcer, PolicySnapshot
from policy_bridge.batches import Batches
from policy_bridge.config import BridgeConfig
from policy_bridge.errors import describe
from policy_bridge.modules import PolicyModules
from policy_bridge.outbox import Outbox
from policy_bridge.placement import Placement
from policy_bridge.sample import Sample
from policy_bridge.session import Session, decode_session
from policy_bridge.stats import Counters
from policy_bridge.stream import StateStream
from slipstream.refusal import RefusedError, refused_from
from slipstream.schema import SCHEMA_VERSION
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.05
_TICK = 0.2
_JOIN_SECONDS = 5.0
_DIED = "shipper_died"


class Shipper:
    """Connects, ships, connects again; owned and closed by the bridge.

    After any lost stream the run is opened anew, because a restarted trainer
    answers on the same address with another session. Unacknowledged samples are
    then sent again under their old ids, which the trainer de-duplicates.

    Args:
        channel: to the trainer; the caller closes it to interrupt calls.
        modules: the policy that is captured.
        outbox: where samples wait.
        config: deadlines and names.
        counters: where everything is counted.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        modules: PolicyModules,
        outbox: Outbox,
        config: BridgeConfig,
        counters: Counters,
    ) -> None:
        self._channel = channel
        self._stub = pb_grpc.DraftTrainerStub(channel)
        self._distrusted = ""
        self._announcer = Announcer(channel)
        self._modules = modules
        self._outbox = outbox
        self._config = config
        self._counters = counters
        self._changed = threading.Condition()
        self._session: Session | None = None
        self._placement: Placement | None = None
        self._connected = False
        self._attempted = False
        self._died = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slipstream-shipper", daemon=True)
        self._thread.start()

    @property
    def session(self) -> Session | None:
        """The last run that was opened, whether the trainer is up now or not."""
        with self._changed:
            return self._session

    @property
    def connected(self) -> bool:
        """Whether a run is open now."""
        with self._changed:
            return self._connected

    @property
    def died(self) -> bool:
        """Whether the thread ended of an error that nobody foresaw; it does not come back."""
        with self._changed:
            return self._died

    @property
    def ring_bytes(self) -> tuple[int, int] | None:
        """See ``Placement.ring_bytes``; None while no stream is open."""
        placement = self._placement
        return None if placement is None else placement.ring_bytes

    def wait_connected(self, timeout: float) -> bool:
        """Wait for an open run; False if there is none, or will be none, by then."""
        with self._changed:
            self._changed.wait_for(lambda: self._connected or self._died, timeout)
            return self._connected

    def wait_first_attempt(self, timeout: float) -> None:
        """Wait until the trainer was reached, or was found to be unreachable, once."""
        with self._changed:
            self._changed.wait_for(lambda: self._attempted, timeout)

    def offer_policy(self, snapshot: PolicySnapshot) -> None:
        """Announce this version in the background, before its first sample."""
        for version in self._announcer.offer(snapshot):
            self._outbox.shed("policy_not_announced", version)

    def stop(self) -> None:
        """Tell the thread to end; the caller then closes the channel and calls ``join``."""
        self._stop.set()

    def join(self) -> bool:
        """Wait for the thread's end. False if it did not come."""
        self._thread.join(_JOIN_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        try:
            while not self._stop.is_set():
                try:
                    if self._connect_and_ship():
                        pause = _FIRST_PAUSE
                except grpc.RpcError as error:
                    self._note(refused_from(error) or error)
                except RefusedError as error:
                    self._note(error)
                except ValueError:
                    # gRPC's answer to a call on a closed channel.
                    if not self._stop.is_set():
                        raise
                self._set_connected(False)
                # Jitter, so that many bridges do not knock in step.
                self._stop.wait(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, self._config.max_backoff_seconds)
        finally:
            self._set_connected(False)
            if not self._stop.is_set():
                self._mourn()

    def _mourn(self) -> None:
        """This thread ends of a mistake in the bridge: nobody may wait for what it held."""
        with self._changed:
            self._died = True
            self._changed.notify_all()
        self._counters.error("the bridge's thread to the trainer ended of an error; see the log")
        self._outbox.close(_DIED)

    def _connect_and_ship(self) -> bool:
        """One connection's life. Whether the trainer answered on its stream."""
        self._open_run()
        again = self._outbox.requeue_sent()
        session = self._require_session()
        placement = Placement(session, self._config, self._distrusted)
        self._placement = placement
        self._counters.transport(placement.name, placement.reason)
        header = pb.StreamHeader(session_id=session.session_id, transport=placement.transport)
        stream = StateStream(self._channel, header, lambda acks: self._on_acks(placement, acks))
        batches = Batches(
            *(stream, placement, self._outbox, self._config, self._counters),
            known=self._announcer.knows,
            stop=self._stop,
        )
        try:
            while stream.is_open and not self._stop.is_set():
                if stream.silent_seconds() > self._config.stall_seconds:
                    self._note(TimeoutError("the trainer does not answer on its stream of samples"))
                    break
                sample = self._outbox.peek(0.0)
                if sample is not None and sample.aux_layers != session.aux_layers:
                    # Of a window that was open, or was copied from, while the draft changed: the
                    # message would call its states those of the new one's layers.
                    self._outbox.give_up(sample, "draft_changed")
                    continue
                if self._announce_due(sample):
                    continue
                if sample is None:
                    # Round again with what comes: its version may have to be announced first.
                    self._outbox.peek(_TICK)
                else:
                    sent = batches.send(sample)
                    self._counters.add(resent_samples=len(again.intersection(sent)))
        except RefusedError as error:
            self._distrust(error)
            raise
        finally:
            stream.close(_JOIN_SECONDS)
            self._placement = None
            placement.close()
        if stream.error is not None and not self._stop.is_set():
            refusal = refused_from(stream.error)
            self._distrust(refusal)
            self._note(refusal or stream.error)
        return stream.answered

    def _distrust(self, refusal: RefusedError | None) -> None:
        if refusal is not None and refusal.field == "shared_memory":
            self._distrusted = str(refusal)

    def _open_run(self) -> None:
        config = self._config
        response = self._stub.OpenRun(
            pb.OpenRunRequest(
                run_id=config.run_id,
                policy=self._modules.spec(config.model_name),
                client="policy_bridge",
                schema_version=SCHEMA_VERSION,
            ),
            timeout=config.rpc_seconds,
        )
        session = decode_session(response, self._modules)
        before = self.session
        other = before is not None and not before.same_shape(session)
        self._announcer.open_session(session, forget=other)
        self._counters.add(connects=1)
        with self._changed:
            self._session = session
        if other:
            # A trainer with another draft came up: old states do not fit it. Only now,
            # when new captures see its session, is what waits all there is of them.
            self._outbox.shed("draft_changed")
        self._set_connected(True)

    def _announce_due(self, sample: Sample | None) -> bool:
        """Announce a version if ``sample`` waits for it, or if nothing waits. Whether it did."""
        version = self._announcer.due(None if sample is None else sample.policy_version)
        if version is None:
            if sample is not None and not self._announcer.knows(sample.policy_version):
                self._outbox.shed("policy_not_announced", sample.policy_version)
                return True
            return False
        try:
            self._announcer.announce(version, self._config.announce_seconds)
        except grpc.RpcError as error:
            refusal = refused_from(error)
            # A trainer that restarted does not know the session: a new run mends that. One that
            # has too much to do just now ("server.max_calls") is asked again.
            if refusal is None or refusal.field.endswith("session_id"):
                raise
            if refusal.field.startswith("server."):
                raise
            self._note(refusal)
            self._announcer.give_up(version)
            self._outbox.shed("policy_refused", version)
        else:
            self._counters.add(announced=1)
        return True

    def _on_acks(self, placement: Placement, acks: Sequence[pb.Ack]) -> None:
        accepted = duplicate = 0
        for ack in acks:
            if ack.status == pb.ACK_STATUS_ACCEPTED:
                accepted += 1
            elif ack.status == pb.ACK_STATUS_DUPLICATE:
                duplicate += 1
            else:
                # In their order: refusals in a row count.
                self._counters.add(accepted=accepted, duplicate=duplicate)
                accepted = duplicate = 0
                refusal = RefusedError.from_proto(ack.refusal)
                if self._counters.refused(refusal.field):
                    logger.error("the trainer refuses samples: %s", refusal)
        self._counters.add(accepted=accepted, duplicate=duplicate)
        # Counted first: who waits for an empty outbox then reads the counters.
        names = [ack.sample_id for ack in acks]
        placement.settled(*names)
        self._outbox.settle(*names)

    def _require_session(self) -> Session:
        session = self.session
        if session is None:
            raise RefusedError("session", "none", "an open run", "open the run first")
        return session

    def _set_connected(self, value: bool) -> None:
        with self._changed:
            self._connected = value
            self._attempted = True
            self._changed.notify_all()

    def _note(self, error: Exception) -> None:
        if self._stop.is_set():
            return
        text = describe(error)
        refusal = error if isinstance(error, RefusedError) else None
        if self._counters.error(text, refusal):
            logger.log(logging.ERROR if refusal else logging.WARNING, "draft trainer: %s", text)
