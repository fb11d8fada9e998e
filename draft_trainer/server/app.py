"""Builds the trainer from its configuration, starts it, and stops it in order."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from draft_trainer.config import HELD_OUT_LEAST, TrainerConfig, access_of, credentials_of
from draft_trainer.counters import Counters
from draft_trainer.drafters import Draft, DraftShape
from draft_trainer.drafters.compiled_score import compile_score
from draft_trainer.ingest.checks import Expected
from draft_trainer.ingest.folder import SampleFolder
from draft_trainer.ingest.ingest import Ingest
from draft_trainer.ingest.run import Runs
from draft_trainer.ingest.store import SampleStore
from draft_trainer.ingest.teacher import TeacherCheck
from draft_trainer.releases.fleet import Fleet
from draft_trainer.releases.gate import Gate
from draft_trainer.releases.imports import Imports
from draft_trainer.releases.publisher import Publisher
from draft_trainer.releases.reconcile import Reconciler
from draft_trainer.releases.registry import (
    Registry,
    newest_own,
    open_pointer,
    open_registry,
)
from draft_trainer.releases.trial import Trials
from draft_trainer.releases.watch import AcceptanceWatch
from draft_trainer.server.metrics import trainer_registry
from draft_trainer.server.service import (
    SERVICE,
    DraftTrainerService,
    limits_of,
    workers_for,
)
from draft_trainer.server.status import SNAPSHOT_SECONDS, FleetView, Status
from draft_trainer.server.web import serve_web
from draft_trainer.training.cores import core_seconds, training_nice
from draft_trainer.training.device import own_stream, training_device
from draft_trainer.training.economy import Economy
from draft_trainer.training.learner import Learner
from draft_trainer.training.loop import TrainingLoop
from draft_trainer.training.training_state import LearnerStates, head_facts
from slipstream.client import MAX_MESSAGE_BYTES
from slipstream.errors import RefusedError
from slipstream.metrics import code_version
from slipstream.sample import Layout
from slipstream.serving.limits import Guard, Limit
from slipstream.serving.server import GrpcServer, LoopThread, Workers
from slipstream.shm import remove_stale
from slipstream.shortage import raise_unless_shortage
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

_MESSAGE_OVERHEAD = 64 << 10
_STOP_SECONDS = 5.0


class TrainerServer:
    """The running trainer. Owns every thread, connection and port of it.

    Raises:
        RefusedError: the device, the draft, the registry or a port cannot be used; nothing is left
            running.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        device = training_device(config.training.device)
        self.died = threading.Event()
        """Set when the training thread ended by itself."""
        self._stopped_cleanly: bool | None = None
        self._history: asyncio.Task[None] | None = None
        self._counters = Counters()
        self._access = access_of(config)
        self._credentials = credentials_of(config)
        self._registry = registry = open_registry(config.draft)
        self._close_samples: Callable[[], None] = lambda: None
        try:
            self._build(registry, device)
        except BaseException as error:
            self._close_samples()
            registry.close()
            if isinstance(error, RuntimeError):
                raise_unless_shortage(error)
                raise RefusedError(
                    "training.device",
                    f"{device} with too little free memory ({error})",
                    "room for the draft, its moments and their average",
                    "free some of its memory, or choose another device",
                ) from error
            raise

    def _build(self, registry: Registry, device: torch.device) -> None:
        config = self._config
        newest = newest_own(registry)
        self._counters.newest_release = newest.draft_version
        state = registry.hold()
        self._pointer = open_pointer(registry, self._run_id)
        # Before anything else is written: the disk may be full, and the bounds lowered to free it.
        registry.retain(config.draft)
        head = registry.drafter.read(registry.path(newest.draft_version)).draft()
        draft = head.config
        # The share that training takes of a shared GPU cannot be measured.
        cores = partial(core_seconds, nice=training_nice(config.training.nice))
        economy = Economy(
            config.economy, cores=cores if config.training.device == "cpu" else lambda: None
        )
        expected = Expected(
            hidden_size=draft.target_hidden_size,
            vocab_size=draft.vocab_size,
            aux_layer_ids=draft.aux_layer_ids,
            max_tokens=_max_tokens(config, head),
        )
        _check_capacity(config, expected.longest)
        self._open_samples(economy)
        states = LearnerStates(
            config.draft.registry,
            states_belong_to(registry, draft, config.training.optimizer),
            config.training.state_every_steps,
            config.training.state_seconds,
            self._store.saved,
        )
        stream = own_stream(device)
        with torch.cuda.stream(stream):
            learner = Learner(head.to(device), config.training)
            resumed = states.resume(learner, newest.draft_version)
            if device.type == "cuda" and config.training.compile == "auto":
                steps, target = config.training.ttt_steps, config.training.target
                said = compile_score(device, steps, draft.draft_vocab_size, target)
                how = f"not compiled: {said}" if said else "compiled"
                logger.info("the score function is %s", how)
        self._store.rewind(resumed.draws, newest.draft_version)
        arrived = threading.Event()
        self.runs = Runs(
            draft, self._store, config.replay.max_policy_lag, config.server.max_sessions
        )
        publish = config.publish
        fleet_view = FleetView(state.events)
        self._fleet = Fleet(publish, fleet_view.looked, self._credentials, state.owner)
        self._watch = AcceptanceWatch(self._fleet, economy.served)
        server = config.server
        ids = head.target_ids().cpu()
        memory = Path(server.shared_memory) if server.shared_memory else None
        for name in remove_stale(memory) if memory else ():
            logger.warning("removed %s, which a killed bridge left", name)
        ingest = Ingest(
            *(expected, self._store, self._counters, TeacherCheck(ids), arrived, memory),
            wanted=lambda held: _wanted_tokens(
                config, economy, self._fleet, self._policy_version(), held
            ),
        )
        self.status = Status(
            self._counters,
            self.runs,
            self._store,
            ingest,
            registry,
            self._pointer,
            state,
            fleet_view,
            self._watch,
            economy,
            config,
        )
        self.publisher = Publisher(
            self._fleet,
            registry,
            self._pointer,
            self._counters,
            Trials(
                *(config.trial, lambda: self._fleet.drafting()[0], self._watch),
                run=lambda: self.runs.current,
            )
            if config.trial.enabled
            else None,
        )
        self._reconciler = Reconciler(self.publisher, self._watch)
        drafting = self._fleet.drafting
        gate = Gate(config, registry, self._pointer, self._counters, drafting, stream)
        self.loop = TrainingLoop(
            learner,
            states,
            resumed,
            self.runs,
            *(config, registry, gate, self._pointer, economy),
            self._counters,
            arrived,
            on_release=self._reconciler.released,
            on_death=self._training_died,
            stream=stream,
        )
        self._workers = Workers(workers_for(server), "server")
        self._service = DraftTrainerService(
            config,
            draft,
            ids.to(torch.int32),
            self.runs,
            ingest,
            registry,
            self.publisher,
            Imports(
                *(registry, self.runs, gate, self._pointer, config.draft),
                on_promoted=self._reconciler.released,
                wake=arrived.set,
            ),
            self.status,
            self._workers,
            config.server.receive_window_bytes
            or max(MAX_MESSAGE_BYTES, expected.longest.nbytes + _MESSAGE_OVERHEAD),
        )
        self._listen()

    @property
    def ready_line(self) -> str:
        """The line that is printed once everything listens."""
        web = self._web.url
        return f"draft-trainer ready: grpc={self.address} metrics={web}/metrics web={web}/"

    def start(self) -> None:
        """Serve, train and publish until ``stop``."""
        self.status.events.note(
            "trainer_started",
            draft_version=self._pointer.now.promoted,
            policy_version=self._policy_version(),
            reason=f"version {code_version()}",
        )
        self._event_loop.run(self._serve())
        self.loop.start()
        self._reconciler.start()

    def stop(self) -> bool:
        """Drain, stop training, close everything. A second call changes nothing.

        Returns:
            True when every part ended within ``server.shutdown_timeout_s``.
        """
        if self._stopped_cleanly is None:
            self._stopped_cleanly = self._stop()
        return self._stopped_cleanly

    def _stop(self) -> bool:
        deadline = time.monotonic() + self._config.server.shutdown_timeout_s
        self.status.events.note("trainer_stopped")
        # Calls in progress get half of the time, and are then cancelled.
        stopped = self._event_loop.submit(self._stop_serving(_left(deadline) / 2))
        # All are told at once: a gate or a publish under way may take the rest of the time.
        self.loop.stop(0.0)
        self._reconciler.stop(0.0)
        try:
            clean = _ended(stopped, _left(deadline))
            clean = self._event_loop.close(_left(deadline)) and clean
            self._workers.close()
            clean = self._reconciler.stop(_left(deadline)) and clean
            self._fleet.close()
            clean = self._watch.stop(_left(deadline)) and clean
            self._web.close(_left(deadline))
        finally:
            # Also after an interrupt: the process may go on, and holds the registry's lock.
            trained = self.loop.stop(_left(deadline))
            self._close_samples()
            self._registry.close()
        return clean and trained

    def _run_id(self) -> str:
        run = self.runs.current
        return "" if run is None else run.run_id

    def _policy_version(self) -> int | None:
        run = self.runs.current
        return run.latest_policy_version if run is not None else None

    def _training_died(self) -> None:
        reason = self._counters.training_error
        self.status.events.note("training_failed", reason=reason)
        self.died.set()

    def _open_samples(self, economy: Economy) -> None:
        def evicted(reason: str, samples: int) -> None:
            # While training is paused, samples grow old and make room on purpose.
            unneeded = economy.paused and reason in ("capacity", "stale")
            self._counters.samples_evicted.labels("unneeded" if unneeded else reason).inc(samples)

        replay = self._config.replay
        folder = SampleFolder(replay.directory, self._config.draft.registry)
        try:
            self._store = SampleStore(folder.path, replay, self._config.training.seed, evicted)
        except BaseException:
            folder.close(keep=True)
            raise

        def close() -> None:
            keep = self._store.run is not None
            self._store.close()
            folder.close(keep)
            self._close_samples = lambda: None

        self._close_samples = close

    def _listen(self) -> None:
        server, access = self._config.server, self._access
        self._event_loop = LoopThread("grpc")
        try:
            self.address = self._event_loop.run(self._bind())
            metrics = trainer_registry(self._counters, self.status.read, access.refusals)
            self._web = serve_web(self.status, metrics, access, server.host, server.metrics_port)
        except BaseException:
            self._event_loop.run(self._grpc.stop(0.0))
            self._event_loop.close(_STOP_SECONDS)
            self._workers.close()
            self._fleet.close()
            raise

    async def _bind(self) -> str:
        server = self._config.server
        guard = Guard(
            self._access,
            limits_of(server),
            Limit(server.max_calls),
            message_seconds=server.message_timeout_s,
            calls_per_second=server.calls_per_s,
        )
        self._grpc = GrpcServer(guard, self._access, SERVICE, keepalive_s=server.keepalive_s)
        pb_grpc.add_DraftTrainerServicer_to_server(self._service, self._grpc.grpc)
        return self._grpc.bind(server.host, server.port, "server.port")

    async def _serve(self) -> None:
        await self._grpc.grpc.start()
        self._grpc.set_serving(True)
        self._history = asyncio.create_task(self._keep_history())

    async def _keep_history(self) -> None:
        while True:
            try:
                await self._workers.run(self.status.keep_snapshot)
            except RuntimeError:
                # No thread could be started; the next time one may be.
                logger.exception("a snapshot of the status was not kept")
            await asyncio.sleep(SNAPSHOT_SECONDS)

    async def _stop_serving(self, grace: float) -> None:
        if self._history is not None:
            self._history.cancel()
            await asyncio.wait({self._history})
        self._grpc.set_serving(False)
        self._service.drain()
        await self._grpc.stop(grace)


def states_belong_to(registry: Registry, draft: DraftShape, optimizer: str) -> dict[str, object]:
    """Return the facts a training state must carry to be resumed: this draft's first release, and
    whose moments it has."""
    first = registry.get(0).tensors
    total = hashlib.sha256(b"".join(spec.sha256 for spec in first))
    facts = head_facts(draft) | {"initial_sha256": total.hexdigest()}
    # States of versions that had no other do not name it.
    return facts if optimizer == "adamw" else facts | {"training.optimizer": optimizer}


def _max_tokens(config: TrainerConfig, head: Draft) -> int:
    """Return the longest sample: as configured, but in bf16 it must fit the windows."""
    longest = config.server.max_tokens_per_sample
    if (window := config.server.receive_window_bytes) is not None:
        per_token = 2 * (len(head.config.aux_layer_ids) + 1) * head.config.target_hidden_size + 21
        longest = min(longest, (window - _MESSAGE_OVERHEAD) // per_token)
    if head.config.max_row_tokens is not None:
        longest = min(longest, head.config.max_row_tokens - config.training.ttt_steps + 1)
    return max(3, longest)


def _check_capacity(config: TrainerConfig, longest: Layout) -> None:
    """Refuse a replay buffer in which one of the longest samples has no room beside another."""
    least, tokens = 2 * longest.nbytes, longest.tokens
    if config.replay.capacity_bytes < least:
        raise RefusedError(
            "replay.capacity_bytes",
            config.replay.capacity_bytes,
            f"at least {least}, two samples of {tokens} tokens: one comes while one is trained on",
            "raise it, or lower server.max_tokens_per_sample",
        )


def _wanted_tokens(
    config: TrainerConfig, economy: Economy, fleet: Fleet, version: int | None, held: int
) -> int:
    """Return the tokens wanted of policy version ``version``, of which ``held`` fill half of the
    store: the other half is of the version before, which is still trained on."""
    held_out = config.replay.held_out_fraction or HELD_OUT_LEAST
    if economy.wants_states:
        last, epochs = economy.last, config.replay.max_epochs
        # Training on this version makes room for more of it.
        if last is not None and last.policy_version == version:
            held += economy.tokens // epochs
        most = math.ceil(economy.trainable / epochs / (1 - held_out))
        return min(most, held) if most else held
    if config.economy.mode != "never":
        return 1  # the least that is bounded: a client still sends a sample
    # Without training, what the gate needs for an imported release.
    # A verification step yields up to one token more than are drafted. About half of a rollout's
    # tokens are the prompt's, where nothing is drafted.
    needed = math.ceil(2 * config.gate.needed_anchors(0) * (1 + fleet.drafting()[0]) / held_out)
    return min(needed, held)


def _ended(future: Future[None], timeout: float) -> bool:
    try:
        future.result(timeout)
    except TimeoutError:
        return False
    return True


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
