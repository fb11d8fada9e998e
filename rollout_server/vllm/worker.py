"""Methods that Slipstream adds to vLLM's workers.

Each is one ``collective_rpc`` call, which vLLM runs between two engine steps. They return plain
data and report failures as data: an exception inside a worker call does not say which ranks did
what.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from rollout_server.control.changes import Change, Result
from rollout_server.control.stages import WeightSource
from rollout_server.vllm.engine_core import WITHOUT_DRAFT
from rollout_server.vllm.patches import shared_parameters, shares_embedding, ties_lm_head
from rollout_server.vllm.reload import LiveModel, apply_all, refuse_lost
from rollout_server.vllm.served.derived import unaccounted
from rollout_server.vllm.standby import ASLEEP, DIFFERS, READY, SAME, ReadBack, Standby
from rollout_server.vllm.swap import LOAD_FAILURES, free_bytes, own_tensors, standby_bytes
from slipstream.errors import RefusedError

logger = logging.getLogger(__name__)

_HOOKS, _SLEEPS = "slipstream_hooks", "slipstream_sleeps"

SLEEPS = "the engine sleeps and has no memory for weights: wake it up first"


class DraftingSwitch:
    """Skips the draft's forward pass of one V1 model runner while drafting is off.

    vLLM would run it at length zero, to keep the draft's KV cache filled. Skipping it costs
    acceptance for requests that are decoded while it is off, never correctness: every proposed
    token is verified.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._speculative_config = runner.speculative_config
        self._execute = runner.execute_model
        self._propose = runner.propose_draft_token_ids
        self.enabled = True
        runner.execute_model = self._execute_model
        runner.propose_draft_token_ids = self._propose_unless_off

    def _skips(self, scheduler_output: Any) -> bool:
        return not self.enabled or getattr(scheduler_output, WITHOUT_DRAFT, False)

    def _execute_model(self, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        # With asynchronous scheduling the previous step's tokens are where only the speculative
        # path looks for them, so there the path stays.
        plain = (
            self._skips(scheduler_output)
            and not self._runner.use_async_scheduling
            and not scheduler_output.scheduled_spec_decode_tokens
        )
        self._runner.speculative_config = None if plain else self._speculative_config
        return self._execute(scheduler_output, *rest, **named)

    def _propose_unless_off(
        self, scheduler_output: Any, sampled_token_ids: Any, *rest: Any, **named: Any
    ) -> Any:
        if not self._skips(scheduler_output) or scheduler_output.num_spec_tokens_to_schedule > 0:
            return self._propose(scheduler_output, sampled_token_ids, *rest, **named)
        runner = self._runner
        runner._draft_probs = None
        runner._draft_prob_req_ids = None
        if isinstance(sampled_token_ids, torch.Tensor) and (
            runner.valid_sampled_token_count_event is not None
        ):
            # Asynchronous scheduling reads the next step's inputs from here.
            runner._copy_valid_sampled_token_count(
                *runner.drafter.prepare_next_token_ids_padded(
                    sampled_token_ids,
                    runner.requests,
                    runner.input_batch,
                    runner.discard_request_mask.gpu,
                )
            )
        rows = len(runner.input_batch.req_ids)
        return torch.empty(rows, 0, dtype=torch.int64, device=runner.device)


class SpeculatorSwitch:
    """Skips the draft's forward pass on Model Runner V2, whose drafts come from a speculator.

    Without this switch, that runner runs the draft once a step if the scheduler plans no tokens
    (from vLLM 0.32 on), or drafts all of them (before). While drafting is off this proposes what
    its speculators do then: -1, no token, in every place.
    """

    def __init__(self, runner: Any) -> None:
        self._speculator = runner.speculator
        self._execute = runner.execute_model
        self._propose = runner.speculator.propose
        self.enabled = True
        self._without_draft = False  # the step that runs
        runner.execute_model = self._execute_model
        runner.speculator.propose = self._propose_unless_off

    def _execute_model(self, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        self._without_draft = getattr(scheduler_output, WITHOUT_DRAFT, False)
        return self._execute(scheduler_output, *rest, **named)

    def _propose_unless_off(self, input_batch: Any, *rest: Any, **named: Any) -> Any:
        # Dummy runs warm up and capture graphs. Steps that were planned before the switch and run
        # after it still draft: the scheduler will verify those tokens.
        planned = (named.get("num_speculative_tokens") or 0) > 0
        drafts = self.enabled and not self._without_draft
        if drafts or planned or named.get("dummy_run"):
            return self._propose(input_batch, *rest, **named)
        speculator = self._speculator
        shape = input_batch.num_reqs, speculator.num_speculative_steps
        return torch.full(shape, -1, dtype=torch.int64, device=speculator.device)


def runner_version(worker: Any) -> str:
    """Return "V1" or "V2": which of vLLM's two model runners this worker has."""
    return "V2" if hasattr(worker.model_runner, "speculator") else "V1"


class WorkerHooks:
    """Slipstream's state in one worker with a draft.

    Made at the engine's start: the first fingerprint is taken while the draft is known to be what
    was loaded.
    """

    def __init__(self, worker: Any) -> None:
        self.read_back = ReadBack(worker.get_model, worker.get_draft_model)
        self.standby = Standby(
            worker.get_model, worker.get_draft_model, self.read_back, lambda: owed_bytes(worker)
        )
        self.drafting: DraftingSwitch | SpeculatorSwitch | None = None
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    @classmethod
    def of(cls, worker: Any) -> WorkerHooks:
        """Return the worker's own hooks, made at the first call."""
        if not hasattr(worker, _HOOKS):
            setattr(worker, _HOOKS, cls(worker))
        hooks: WorkerHooks = getattr(worker, _HOOKS)
        return hooks


def slipstream_describe(self: Any) -> dict[str, Any]:
    """Describe the models in memory.

    Returns:
        {"shares_embedding": bool, "shared": names of draft parameters in the verifier's memory,
        "dtype": of the served policy, "derived": ``unaccounted``, "runner": ``runner_version``,
        "tied": which of "policy" and "draft" have an lm_head that is their embeddings}.
    """
    draft, policy = self.get_draft_model(), self.get_model()
    models = {"policy": policy, "draft": draft}
    return {
        "shares_embedding": draft is not None and shares_embedding(policy, draft),
        "shared": [] if draft is None else shared_parameters(policy, draft),
        "derived": [] if draft is None else unaccounted(policy, draft),
        "dtype": str(self.model_config.dtype).removeprefix("torch."),
        "runner": runner_version(self),
        "tied": [
            kind for kind, model in models.items() if model is not None and ties_lm_head(model)
        ],
    }


def slipstream_apply(self: Any, messages: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Apply every change (``Change.to_message``), or none. Returns ``Result`` as a dict."""
    from vllm.config import set_current_vllm_config

    if _sleeps(self):
        return asdict(Result(0.0, SLEEPS))
    config = self.vllm_config
    changes = []
    for change in map(Change.from_message, messages):
        if change.kind == "draft":
            draft_config = config.speculative_config.draft_model_config
            standby = WorkerHooks.of(self).standby
            live = LiveModel(self.get_draft_model(), draft_config, standby)
        else:
            receive = functools.partial(_receive, self)
            live = LiveModel(self.get_model(), config.model_config, receive=receive)
        changes.append((change, live))
    # Last: weights from a weight-transfer engine, new or old, cannot be put back from here.
    changes.sort(key=lambda each: bool(each[0].new.transfer or each[0].old.transfer))
    try:
        for change, live in changes:
            if live.reloads(change.new):
                if live.standby is not None:
                    live.standby.drop()  # The reload would, and what it frees counts as room.
                draft = change.kind == "draft"
                without = {*self.get_model().modules()} if draft else ()
                buffers = _packed_bytes(self) if change.new.transfer else 0
                check_room(live.model, without, buffers)
    except RefusedError as error:
        return asdict(Result(0.0, str(error)))
    with set_current_vllm_config(config):
        result = apply_all(changes)
    if config.lora_config and any(change.kind == "policy" for change, _ in changes):
        self.model_runner.reset_lora_state()
    return asdict(result)


def _packed_bytes(worker: Any) -> int:
    """The bytes of the buffers into which vLLM's engine for NCCL receives many tensors at a time,
    each with the one tensor by which it may exceed its size."""
    engine = worker.weight_transfer_engine
    if not getattr(engine, "packed", False):
        return 0
    largest = max((p.nbytes for p in worker.get_model().parameters()), default=0)
    return int(engine.packed_num_buffers * (engine.packed_buffer_size_bytes + largest))


def _sleeps(worker: Any) -> bool:
    # Not in the hooks: a server without a draft has none, and its policy sleeps as well.
    return bool(getattr(worker, _SLEEPS, False))


def _receive(worker: Any, transfer: str) -> None:
    """Run one session of vLLM's weight-transfer engine, from its start to its end.

    Raises RefusedError (``refuse_lost``) or one of ``LOAD_FAILURES``; the session is then over, and
    the model may be torn.
    """
    model = worker.get_model()
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        # vLLM may load on another stream than that of a step that still runs.
        torch.cuda.synchronize()
    try:
        worker.start_weight_update()
        with _names_loaded(model) as loaded:
            worker.update_weights(_own_update(worker, transfer))
        refuse_lost(model, loaded)
        worker.finish_weight_update()
    except (RefusedError, *LOAD_FAILURES):
        worker._weight_update_active = False
        worker.weight_transfer_engine.reset_weight_update_target()
        raise


@contextlib.contextmanager
def _names_loaded(model: Any) -> Iterator[set[str]]:
    """Collect what a model's ``load_weights`` reports, which engines call and do not pass on."""
    names: set[str] = set()
    original, own = model.load_weights, vars(model).get("load_weights")

    def load_weights(*given: Any, **named: Any) -> Any:
        loaded = original(*given, **named)
        names.update(loaded or ())
        return loaded

    model.load_weights = load_weights
    try:
        yield names
    finally:
        del model.load_weights
        if own is not None:
            model.load_weights = own


def _own_update(worker: Any, transfer: str) -> Any:
    """Read an update; of a list, with an entry for each worker of all data-parallel ranks, this
    worker's entry.

    Before 0.31, vLLM itself gives every rank of a dense policy the entries of rank 0.
    """
    update = json.loads(transfer)
    if isinstance(update, list):
        parallel = worker.vllm_config.parallel_config
        update = update[parallel.data_parallel_index * parallel.world_size + worker.rank]
    return update


def slipstream_check_transfer(self: Any, transfer: str) -> str:
    """Return why the weight-transfer engine could not take an update; empty if it could."""
    engine = self.weight_transfer_engine
    if engine is None:
        return "no weight-transfer engine: start the server with --weight-transfer-config"
    try:
        update = engine.parse_update_info(_own_update(self, transfer))
    except (ValueError, TypeError, KeyError, IndexError) as error:
        return f"{type(engine).__name__}: {type(error).__name__}: {error}"
    # From vLLM 0.33 on, an empty update over NCCL names the tensors of the one before it. If there
    # was none it would load nothing, and the old weights would count as the new version.
    before = getattr(engine, "_last_update_info", None)
    if before is not None and not update.names and self.get_model() not in before:
        return (
            f"{type(engine).__name__}: an update without names, and none before it since the "
            "engine was initialised: send names, dtype_names and shapes"
        )
    return ""


def slipstream_prepare(self: Any, source: Mapping[str, Any], keep: Mapping[str, Any] | None) -> str:
    """Begin to make a draft's standby copy, or say how far that is (``Standby.prepare``)."""
    if self.get_draft_model() is None:
        return READY
    if _sleeps(self):
        return SLEEPS
    kept = None if keep is None else WeightSource.from_message(keep)
    return WorkerHooks.of(self).standby.prepare(WeightSource.from_message(source), kept)


def slipstream_read_back(self: Any) -> str:
    """Check the draft in this worker's memory (``ReadBack.check``)."""
    if self.get_draft_model() is None:
        return SAME
    return ASLEEP if _sleeps(self) else WorkerHooks.of(self).read_back.check()


def slipstream_forget(self: Any, evicted: list[str]) -> None:
    """Drop the encoder's outputs with these hashes, which no request refers to."""
    cache = self.model_runner.encoder_cache
    # Model Runner V1's is the dict itself, V2's has one, or is None if there is no encoder.
    outputs = getattr(cache, "encoder_outputs", cache) or {}
    for name in evicted:
        outputs.pop(name, None)


def slipstream_set_speculation(self: Any, enabled: bool) -> float:
    """Skip the draft's forward pass or run it. Returns the seconds that this took."""
    start = time.perf_counter()
    if self.get_draft_model() is not None:
        hooks = WorkerHooks.of(self)
        if hooks.drafting is None:
            # Made when first needed: a server that always speculates runs unhooked.
            switch = SpeculatorSwitch if runner_version(self) == "V2" else DraftingSwitch
            hooks.drafting = switch(self.model_runner)
        hooks.drafting.enabled = enabled
    return time.perf_counter() - start


_RESERVED = "slipstream_reserved_bytes"


def owed_bytes(worker: Any) -> int:
    """The bytes of its share of the device (``--gpu-memory-utilization``) that the engine may still
    ask for: CUDA graphs, the sampler, peaks of the activations. Memory set aside for the standby
    copies (``reserve_standby``) is not the engine's."""
    engine = worker.requested_memory - getattr(worker, _RESERVED, 0)
    return max(0, int(engine) - torch.cuda.memory_reserved(worker.device))


def reserve_standby(worker_class: type) -> None:
    """Make vLLM's ``Worker`` leave the standby copies' memory out of the KV cache.

    They then fit inside ``--gpu-memory-utilization``. A cache whose size was given in bytes
    (``--kv-cache-memory-bytes``) keeps that size. vLLM asks once, after the models are loaded; its
    workers for CPUs have a method of their own.
    """
    determine = worker_class.determine_available_memory  # type: ignore[attr-defined]

    def leaving_room(self: Any) -> int:
        # Read before the call: with VLLM_ENABLE_STARTUP_PLAN vLLM sets it to what an earlier start
        # measured, the copies' memory included.
        given = self.cache_config.kv_cache_memory_bytes
        available = int(determine(self))
        draft = self.get_draft_model()
        if draft is None or given:
            return available
        reserved = standby_bytes(self.get_model(), draft)
        setattr(self, _RESERVED, reserved)
        left = available - reserved
        logger.info("%d MiB are excluded from the KV cache for standby drafts", reserved >> 20)
        return left

    worker_class.determine_available_memory = leaving_room  # type: ignore[attr-defined]


def check_room(
    model: torch.nn.Module, without: Container[torch.nn.Module] = (), buffers: int = 0
) -> None:
    """Refuse to begin a reload for which there is too little memory.

    A layer-wise reload holds one layer twice, and also as loaded where vLLM converts it then. If
    that fails, the old weights cannot be loaded either, and the server would have to stop.

    Args:
        model: the live policy or draft.
        without: modules that are not reloaded: those of a draft that are the verifier's.
        buffers: bytes that receiving takes besides.

    Raises RefusedError: naming the bytes.
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    reloaded = (module for module in model.modules() if module not in without)
    needed = buffers + max(map(_reload_bytes, reloaded), default=0)
    for device in devices:
        free = free_bytes(device)
        if free < needed:
            raise RefusedError(
                f"memory of {device}",
                f"{free} bytes free",
                f"{needed} bytes, for the largest layer once more"
                + (" and what receives it" if buffers else ""),
                "lower --gpu-memory-utilization; nothing was changed",
            )


def _reload_bytes(module: torch.nn.Module) -> int:
    """The bytes of a module's own parameters while they are reloaded, beside the live ones."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    live = dict(module.named_parameters(recurse=False))
    loaded = get_layerwise_info(module).restore_metadata[0] if live else {}
    # Quantized after loading: the loaded ones stay until the converted ones are made.
    converted = any(name in live and live[name].dtype != t.dtype for name, t in loaded.items())
    both = (*live.values(), *(loaded.values() if converted else ()))
    return sum(tensor.nbytes for tensor in both)


@torch.no_grad()
def _blank(policy: torch.nn.Module, draft: torch.nn.Module) -> None:
    """Zero a lost draft, so that all its logits are zero.

    Lost memory can make them NaN, and for a token that was drafted from such logits vLLM's
    rejection sampler emits one that the policy did not choose.
    """
    for tensor in own_tensors(policy, draft):
        if tensor.is_floating_point():
            tensor.zero_()


def watch_sleep(worker_class: type) -> None:
    """Make vLLM's ``Worker`` note that it sleeps, and that level 2 loses the draft.

    The vocabulary map is kept; the rest is zero until the trainer has put it right.
    """
    sleep, wake_up = worker_class.sleep, worker_class.wake_up  # type: ignore[attr-defined]

    def noted_sleep(self: Any, level: int = 1) -> None:
        setattr(self, _SLEEPS, True)
        hooks: WorkerHooks | None = getattr(self, _HOOKS, None)
        if hooks is not None:
            hooks.standby.drop()  # sleep frees memory
            if level >= 2:
                hooks.read_back.lost = True
                # d2t: random offsets can be out of bounds, which ends the engine if it drafts
                # before the trainer has put the draft right.
                own = self.get_draft_model().parameters()
                hooks.kept = [(p, p.cpu().clone()) for p in own if not p.is_floating_point()]
        sleep(self, level)

    def noted_wake_up(self: Any, tags: list[str] | None = None) -> None:
        wake_up(self, tags)
        if tags is not None and "weights" not in tags:
            return
        setattr(self, _SLEEPS, False)
        hooks: WorkerHooks | None = getattr(self, _HOOKS, None)
        if hooks is not None:
            for parameter, value in hooks.kept:
                parameter.data.copy_(value)
            hooks.kept = []
            state = hooks.read_back
            if state.lost:
                # vLLM can be told to keep parameters over a sleep (sleep_preserve_parameter_names).
                state.lost = False
                state.lost = state.check() == DIFFERS
                if state.lost:
                    _blank(self.get_model(), self.get_draft_model())

    worker_class.sleep = noted_sleep  # type: ignore[attr-defined]
    worker_class.wake_up = noted_wake_up  # type: ignore[attr-defined]


def install(worker_class: type) -> None:
    """Add the methods to vLLM's ``Worker``; not to be called twice."""
    for method in (
        *(slipstream_describe, slipstream_apply, slipstream_prepare),
        *(slipstream_read_back, slipstream_set_speculation, slipstream_check_transfer),
        slipstream_forget,
    ):
        setattr(worker_class, method.__name__, method)
    watch_sleep(worker_class)
    reserve_standby(worker_class)
