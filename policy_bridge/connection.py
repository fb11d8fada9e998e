"""The connection to the trainer: a background thread that keeps a run open and sends the outbox.

One StreamStates call at a time: samples up within credits, acknowledgements down. A sample whose
block the trainer can read in the stream's file of shared memory travels as its header alone; any
other is read into the message's payload.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc

from policy_bridge.config import BridgeConfig
from policy_bridge.fleet import describe
from policy_bridge.model import PolicyModules
from policy_bridge.outbox import LOST, BlockFile, Entry, Outbox, file_bytes, flight_bytes
from policy_bridge.session import Announcer, PolicySnapshot, Session, decode_session
from policy_bridge.stats import Counters
from policy_bridge.stream import StateStream
from slipstream.errors import OVERLOADED, RefusedError, clean, refused_from
from slipstream.shm import MemoryLostError, SharedFile, remove_stale
from slipstream.tensors import PIECE_BYTES, SCHEMA_VERSION
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from slipstream.v1 import release_pb2

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.05
_TICK = 0.2
_JOIN_SECONDS = 5.0

# Samples that wait are sent as one batch, whose fixed cost in the trainer is that of a MiB of
# states. Inline, a batch of more than one message is not faster.
_BATCH_SAMPLES = 128
_BATCH_BYTES = 16 << 20
# Upper bounds of what framing adds to a sample's header, and to a piece of a payload.
_HEADER_BYTES, _FIELD_BYTES = 64, 16

_OUTCOMES = {pb.ACK_STATUS_ACCEPTED: "accepted", pb.ACK_STATUS_DUPLICATE: "duplicate"}


class Connection:
    """Connects, sends, connects again; owned and closed by the bridge.

    After any lost stream the run is opened anew, because a restarted trainer answers on the same
    address with another session. Unacknowledged samples are then sent again under their old ids,
    which the trainer de-duplicates. Each stream has a file of its own, to which what is held moves;
    where that is lost, the stream goes on without one.

    Args:
        channel: to the trainer; the caller closes it to interrupt calls.

    Attributes:
        session: the last run that was opened, whether the trainer is up now or not.
        connected: whether a run is open now.
        died: whether the thread ended with an unexpected error; it does not come back.
        wanted_tokens: tokens of a policy version that the trainer last asked for; 0: it has not
            yet, or sets no bound.
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
        # Not the random module's generator, which a loop may have seeded.
        self._random = random.Random()
        self._stop = threading.Event()
        self._announcer = Announcer(channel, self._stop)
        self._modules = modules
        self._outbox = outbox
        self._config = config
        self._counters = counters
        self._changed = threading.Condition()
        self.session: Session | None = None
        self.connected = self.died = False
        self.wanted_tokens = 0
        self._shared: BlockFile | None = None
        self._attempted = False
        self._thread = threading.Thread(target=self._run, name="slipstream-sender", daemon=True)
        self._thread.start()

    def wait_connected(self, timeout: float) -> bool:
        """Wait ``timeout`` seconds for an open run. False: there is none, or will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self.connected or self.died, timeout)
            return self.connected

    def wait_first_attempt(self, timeout: float) -> None:
        """Wait until the trainer was reached, or was found to be unreachable, once."""
        with self._changed:
            self._changed.wait_for(lambda: self._attempted, timeout)

    def offer_policy(self, snapshot: PolicySnapshot) -> None:
        """Register this version with the trainer in the background, before its first sample."""
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
            if self._config.transport != "grpc":
                remove_stale(Path(self._config.shared_memory))
            while not self._stop.is_set():
                try:
                    if self._connect_and_send():
                        pause = _FIRST_PAUSE
                except grpc.RpcError as error:
                    self._record_error(refused_from(error) or error)
                except RefusedError as error:
                    self._record_error(error)
                except ValueError:
                    # gRPC's answer to a call on a closed channel.
                    if not self._stop.is_set():
                        raise
                self._set_connected(False)
                # Jitter, so that many bridges do not connect in step.
                self._stop.wait(pause * self._random.uniform(0.5, 1.0))
                pause = min(2 * pause, self._config.max_backoff_seconds)
        finally:
            self.died = not self._stop.is_set()
            self._set_connected(False)
            if self.died:
                # A bug in the bridge: shed the outbox so that no waiter blocks.
                text = "the bridge's connection thread ended with an error; see the log"
                self._counters.error(text)
                self._outbox.close("shipper_died")

    def _connect_and_send(self) -> bool:
        """Run one connection. True: the next may follow at once, the trainer took samples."""
        session = self._open_run()
        again = self._outbox.requeue_sent()
        file, why_inline = self._shared_file()
        if file is None and self._outbox.leave_file():
            file, why_inline = self._shared_file()
        header = pb.StreamHeader(session_id=session.session_id)
        try:
            self._counters.transport("grpc" if file is None else "shared_memory", why_inline)
            if file is not None:
                header.shared_memory.name = file.name
                header.shared_memory.bytes = file.nbytes
                header.shared_memory.nonce = file.nonce
                self._shared = self._outbox.move_to(file)
            return self._stream(header, session, again)
        finally:
            self._shared = None
            if file is not None:
                file.remove_name()

    def _stream(self, header: pb.StreamHeader, session: Session, again: set[str]) -> bool:
        """Send on one stream until it ends. True: the next connection may follow at once."""
        opened, ended_here = time.monotonic(), False
        stream = StateStream(self._channel, header, self._on_open, self._on_acks)
        try:
            while stream.is_open and not self._stop.is_set():
                if self._outbox.outgrown:
                    # A stream has one file: a larger one comes with the next.
                    ended_here = True
                    break
                if stream.silent_seconds() > self._config.stall_seconds:
                    self._record_error(
                        TimeoutError("the trainer does not answer on its stream of samples")
                    )
                    ended_here = True
                    break
                sent = self._send_next(stream, session)
                self._counters.add(resent_samples=len(again.intersection(sent)))
        finally:
            stream.close(_JOIN_SECONDS)
        # A stream that was idle for minutes may end; one that ends at once does not work.
        short = time.monotonic() - opened < self._config.max_backoff_seconds
        if not self._stop.is_set():
            if stream.error is not None:
                self._record_error(refused_from(stream.error) or stream.error)
            elif not ended_here and not stream.acknowledged and (short or len(self._outbox)):
                found = "a stream that the trainer ended without an acknowledgement"
                step = "see the trainer's log; the bridge goes on trying"
                self._record_error(
                    RefusedError("StreamStates", found, "one that takes samples", step)
                )
        return stream.acknowledged > 0 or not short

    def _on_open(self, inline_because: str) -> None:
        """The trainer answered: it has the file open by now, or never will."""
        shared = self._shared
        if shared is not None:
            # From now on a kill leaves no file behind.
            shared.file.remove_name()
        if inline_because:
            self._shared = None
            self._counters.transport("grpc", clean(inline_because))

    def _shared_file(self) -> tuple[SharedFile | None, str]:
        """Make a file for a stream; None, and why, where its states go inline."""
        config = self._config
        if config.transport == "grpc":
            return None, 'transport = "grpc"'
        try:
            nbytes = file_bytes(self._outbox.capacity_bytes)
            return SharedFile.create(Path(config.shared_memory), nbytes), ""
        except RefusedError as error:
            return None, str(error)

    def _send_next(self, stream: StateStream, session: Session) -> list[str]:
        """Give up what does not fit, register a version, or send a batch; returns the ids sent."""
        entry = self._outbox.peek(0.0)
        if entry is not None and tuple(entry.header.aux_layers) != session.aux_layers:
            # From a window that was open, or whose copies were not done, when the draft changed.
            self._outbox.give_up(entry, "draft_changed")
            return []
        if self._announce_due(entry):
            return []
        if entry is None:
            # Only wait for it here: its version may have to be registered first.
            self._outbox.peek(_TICK)
            return []
        if not self._wait_to_send(stream, entry):
            return []
        return self._send_batch(stream, entry)

    def _send_batch(self, stream: StateStream, first: Entry) -> list[str]:
        """Send ``first`` and what waits behind it, within the credit and the bounds of a batch."""
        credit, layers, knows = stream.credit, first.header.aux_layers, self._announcer.knows
        shared = self._readable_file()
        bound = PIECE_BYTES if shared is None else _BATCH_BYTES
        flight = flight_bytes(self._outbox.capacity_bytes) - self._outbox.flight
        message = size = lent = 0

        def fits(entry: Entry) -> bool:
            nonlocal message, size, lent
            most, before = _message_bytes(entry, shared), message
            # The first is checked too: it may have been superseded during the wait for credit.
            if entry.header.aux_layers != layers or not knows(entry.version):
                return False
            if before and (size + most > bound or lent + entry.nbytes > flight):
                return False
            message += most
            size += max(most, entry.nbytes)
            lent += entry.nbytes if entry.blocks is shared else 0
            return message <= credit

        request, payload, in_payload, in_file = pb.StreamStatesRequest(), [], 0, 0
        sent: list[str] = []
        for entry in self._outbox.take(fits, _BATCH_SAMPLES, shared):
            try:
                block = None if entry.lent else entry.read()
            except MemoryLostError as error:
                # A sample that was shed since may have other bytes in its place by now.
                if self._outbox.holds(entry):
                    self._outbox.lose(entry.blocks, str(error))
                    self._outbox.give_up(entry, LOST)
                continue
            header = request.batch.samples.add()
            header.CopyFrom(entry.header)
            header.packed.span.memory = pb.MEMORY_FILE if block is None else pb.MEMORY_PAYLOAD
            if block is None:
                in_file += entry.nbytes
            else:
                header.packed.span.offset = in_payload
                payload.append(block)
                in_payload += len(block)
            sent.append(entry.sample_id)
        if sent:
            nbytes = stream.send(request, payload) + in_file
            self._counters.add(sent_samples=len(sent), sent_bytes=nbytes)
        return sent

    def _readable_file(self) -> BlockFile | None:
        """The file that the trainer reads; None where every block goes inline."""
        shared = self._shared
        return None if shared is None or shared.lost else shared

    def _wait_to_send(self, stream: StateStream, entry: Entry) -> bool:
        """Wait until a sample may be sent: credit, and no more than its share in flight."""
        started, most = time.monotonic(), flight_bytes(self._outbox.capacity_bytes)
        while True:
            shared = self._readable_file()
            size = _message_bytes(entry, shared)
            flight = self._outbox.flight if entry.blocks is shared else 0
            room = flight == 0 or flight + entry.nbytes <= most
            if stream.wait_credit(size, _TICK if room else 0.0) and room:
                # The first credit says whether the trainer reads the file.
                if size >= _message_bytes(entry, self._readable_file()):
                    return True
                continue
            if not room:
                self._outbox.wait_flight(max(0, most - entry.nbytes), _TICK)
            if stream.silent_seconds() > self._config.stall_seconds or self._stop.is_set():
                return False
            if not self._outbox.holds(entry) or not stream.is_open:
                return False
            late = time.monotonic() - started > self._config.stall_seconds
            if late and stream.nothing_due():
                # Larger than the trainer's whole window: it would block those behind it for ever.
                self._outbox.give_up(entry, "no_credit")
                return False

    def _open_run(self) -> Session:
        config, history = self._config, self._announcer.history
        response = self._stub.OpenRun(
            pb.OpenRunRequest(
                run_id=config.run_id,
                policy=self._modules.spec(config.model_name),
                client="policy_bridge",
                schema_version=SCHEMA_VERSION,
                history=history,
            ),
            timeout=config.rpc_seconds,
        )
        session = decode_session(response, self._modules, joined=history is not None)
        before = self.session
        other = before is not None and not before.same_shape(session)
        self._announcer.open_session(session, forget=other)
        self._counters.add(connects=1)
        with self._changed:
            self.session = session
        if other:
            # A trainer with another draft: old states do not fit it. They are shed only now that
            # new captures see its session, so that none can follow.
            self._outbox.shed("draft_changed")
        self._set_connected(True)
        return session

    def _announce_due(self, entry: Entry | None) -> bool:
        """Register a version if ``entry`` waits for it, or if nothing waits. False: none is due."""
        version = self._announcer.due(None if entry is None else entry.version)
        if version is None:
            if entry is not None and not self._announcer.knows(entry.version):
                self._outbox.shed("policy_not_announced", entry.version)
                return True
            return False
        try:
            self._announcer.announce(version, self._config.announce_seconds)
        except grpc.RpcError as error:
            refusal = refused_from(error)
            if refusal is None:
                raise
            unannounced = refusal.reason == release_pb2.REFUSAL_REASON_NOT_ANNOUNCED
            # The trainer has too much to do just now, or the lead has yet to announce it.
            later = refusal.reason == release_pb2.REFUSAL_REASON_BUSY or (
                unannounced and self._announcer.awaits_lead(version, self._config.announce_seconds)
            )
            if later:
                # Jitter, so that many ranks do not ask in step.
                self._stop.wait(_TICK * self._random.uniform(0.5, 1.5))
                return True
            # A trainer that restarted does not know the session: a new run mends that.
            if refusal.reason in (release_pb2.REFUSAL_REASON_SESSION, *OVERLOADED):
                raise
            self._record_error(refusal)
            if not unannounced:
                # Otherwise later samples of it may find it announced.
                self._announcer.give_up(version)
            self._outbox.shed("policy_refused", version)
        else:
            self._counters.add(announced=1)
        return True

    def _on_acks(self, batch: pb.AckBatch) -> None:
        self.wanted_tokens = batch.wanted_tokens
        unread = []
        count: Callable[[], object]
        for ack in batch.acks:
            if outcome := _OUTCOMES.get(ack.status):
                count = partial(self._counters.add, **{outcome: 1})
            else:
                refusal = RefusedError.from_proto(ack.refusal)
                shared = self._shared
                lost = refusal.reason == release_pb2.REFUSAL_REASON_MEMORY_LOST
                if lost and shared is not None:
                    # The file was cut short: what is still whole in it goes inline.
                    self._outbox.lose(shared, str(refusal))
                    unread.append(ack.sample_id)
                    continue
                count = partial(self._refused, refusal)
            self._outbox.settle(ack.sample_id, count)
        self._outbox.requeue(*unread)

    def _refused(self, refusal: RefusedError) -> None:
        if self._counters.refused(refusal.field):
            logger.error("the trainer refuses samples: %s", refusal)

    def _set_connected(self, value: bool) -> None:
        with self._changed:
            self.connected = value
            self._attempted = True
            self._changed.notify_all()

    def _record_error(self, error: Exception) -> None:
        if self._stop.is_set():
            return
        text = describe(error)
        refusal = error if isinstance(error, RefusedError) else None
        if self._counters.error(text, refusal):
            logger.log(logging.ERROR if refusal else logging.WARNING, "draft trainer: %s", text)


def _message_bytes(entry: Entry, shared: BlockFile | None) -> int:
    """The most serialized bytes of a sample in a message, its block included if inline."""
    described = entry.header.ByteSize() + _HEADER_BYTES
    if entry.blocks is shared:
        return described
    pieces = entry.nbytes // PIECE_BYTES + 1
    return described + entry.nbytes + pieces * _FIELD_BYTES
