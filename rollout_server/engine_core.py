"""Methods that Slipstream adds to vLLM's engine core.

The engine core handles calls only between two steps. What must happen together
(worker call, prefix epoch, draft count) happens in one of these.

Counts verified drafts inside the engine, so that a commit knows how many came before it.

vLLM's statistics reach the API server through a queue that a commit's answer can
overtake. The count makes the boundary independent of that: "the first N drafts
belong to the old release".

Keeps prefix-cache hits on one side of a policy commit.

A cached block holds keys and values of the weights that computed it. vLLM can
only drop the whole cache while no request runs, or by preempting all of them.
Here every request gets the number of policy commits so far as a salt of its
block hashes (vLLM's own ``cache_salt``): a request that arrives after a commit
never hits a block from before it, requests in flight keep their blocks and go
on, and old blocks leave by the cache's usual eviction.

The salt is given once, when the engine takes the request, so that the blocks
that an older request fills later stay on its own side.

Turns drafting off and on between two engine steps, without a restart.

Off means two things, and both are switched in one engine call:

- the scheduler plans zero draft tokens (vLLM's own dynamic speculative length
  with a table of zeros), so that a decode step verifies one token per request;
- the worker skips the draft's forward pass, which vLLM would still run at length
  zero to keep the draft's KV cache filled. That costs acceptance for requests
  that were decoded meanwhile, never correctness: whatever a draft proposes from
  holes in its cache is verified.

What remains is overhead per step, which counts where a step takes milliseconds:
the engine no longer asks the workers for draft tokens, and where scheduling is
synchronous the runner takes the path of a server without speculation.

Times engine steps where they happen: in the engine core, from one step's output to the next.

That interval is what a step costs whoever waits for tokens, and it is the same thing where steps
overlap (asynchronous scheduling) and where they do not. It is taken only while the engine is busy
throughout; a worker call in between (a commit, say) spoils one interval, which is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from rollout_server.step_costs import MIXED, PLAIN, SPECULATIVE


class DraftCount:
    """Counts what the scheduler reports as one draft each.

    Args:
        engine_core: vLLM's ``EngineCore``.
    """

    def __init__(self, engine_core: Any) -> None:
        self._core = engine_core
        self._observed = 0
        self._make = engine_core.scheduler.make_spec_decoding_stats
        engine_core.scheduler.make_spec_decoding_stats = self._count

    def _count(self, *args: Any, **named: Any) -> Any:
        stats = self._make(*args, **named)
        if stats is not None:
            self._observed += 1
        return stats

    def proposed_so_far(self) -> int:
        """Drafts that were verified, plus those proposed already and verified next.

        The latter come from the weights before a commit that happens now. A
        request that ends before its draft is verified makes this too high by
        one; nothing makes it too low.
        """
        queued = sum(
            len(entry[1].scheduled_spec_decode_tokens) for entry in self._core.batch_queue or ()
        )
        waiting = sum(
            1 for request in self._core.scheduler.running if len(request.spec_token_ids) > 0
        )
        return self._observed + queued + waiting


_TAKEN = "_slipstream_epoch"


class PrefixEpoch:
    """Salts the block hashes of one engine core.

    Args:
        engine_core: vLLM's ``EngineCore``; nothing is hooked when it caches no prefixes.
    """

    def __init__(self, engine_core: Any) -> None:
        self.epoch = 0
        self._hash = engine_core.request_block_hasher
        if self._hash is not None:
            engine_core.request_block_hasher = self._hash_salted

    def advance(self) -> None:
        """From now on new requests hit no block that exists."""
        self.epoch += 1

    def _hash_salted(self, request: Any) -> Any:
        if not hasattr(request, _TAKEN):
            setattr(request, _TAKEN, self.epoch)
            if self.epoch:
                # The user's own salt still separates tenants within an epoch.
                request.cache_salt = f"slipstream-{self.epoch}:{request.cache_salt or ''}"
        return self._hash(request)


class SchedulerSwitch:
    """The engine-core half.

    Args:
        engine_core: vLLM's ``EngineCore``.
    """

    def __init__(self, engine_core: Any) -> None:
        self._core = engine_core
        self._scheduler = engine_core.scheduler
        self._when_on = self._scheduler.dynamic_sd_lookup
        self.enabled = True

    def set(self, enabled: bool) -> None:
        """Plan drafts as configured, or none."""
        self.enabled = enabled
        self._core.check_for_draft_tokens = enabled
        if enabled:
            self._scheduler.dynamic_sd_lookup = self._when_on
        else:
            slots = self._scheduler.max_num_running_reqs + 1
            self._scheduler.dynamic_sd_lookup = [0] * slots


class DrafterSwitch:
    """The worker half; hooks one V1 model runner when it is first switched off.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V1) or a subclass of it.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._speculative_config = runner.speculative_config
        self._execute = runner.execute_model
        self._propose = runner.propose_draft_token_ids
        self._enabled = True
        runner.execute_model = self._execute_model
        runner.propose_draft_token_ids = self._propose_unless_off

    def set(self, enabled: bool) -> None:
        """Run the draft, or skip it."""
        self._enabled = enabled

    def _execute_model(self, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        # Asynchronous scheduling keeps the previous step's tokens where only the
        # speculative path looks for them, so there the path stays.
        plain = (
            not self._enabled
            and not self._runner.use_async_scheduling
            and not scheduler_output.scheduled_spec_decode_tokens
        )
        self._runner.speculative_config = None if plain else self._speculative_config
        return self._execute(scheduler_output, *rest, **named)

    def _propose_unless_off(
        self, scheduler_output: Any, sampled_token_ids: Any, *rest: Any, **named: Any
    ) -> Any:
        if self._enabled or scheduler_output.num_spec_tokens_to_schedule > 0:
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


class StepClock:
    """Sums steps and seconds by kind and number of requests.

    Args:
        engine_core: vLLM's ``EngineCore``.
        switch: whether drafts are planned.
    """

    def __init__(self, engine_core: Any, switch: SchedulerSwitch) -> None:
        self._core = engine_core
        self._scheduler = engine_core.scheduler
        self._switch = switch
        self._schedule = self._scheduler.schedule
        self._update = self._scheduler.update_from_output
        self._sums: dict[tuple[str, int], list[float]] = {}
        self._since: float | None = None
        self._measuring = False

    def measure(self, on: bool) -> None:
        """Hook the scheduler, or let go of it."""
        if on == self._measuring:
            return
        self._measuring, self._since = on, None
        self._scheduler.schedule = self._scheduled if on else self._schedule
        self._scheduler.update_from_output = self._updated if on else self._update

    def interrupted(self) -> None:
        """The engine did something else than a step."""
        self._since = None

    def sums(self) -> list[list[Any]]:
        """[kind, requests, steps, seconds] of everything measured so far."""
        return [[*key, int(steps), seconds] for key, (steps, seconds) in self._sums.items()]

    def _scheduled(self, *args: Any, **named: Any) -> Any:
        if self._since is None:
            self._since = time.perf_counter()
        return self._schedule(*args, **named)

    def _updated(self, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        result = self._update(scheduler_output, *rest, **named)
        since, self._since = self._since, None
        if scheduler_output.total_num_scheduled_tokens:
            now = time.perf_counter()
            if since is not None:
                self._add(scheduler_output, now - since)
            if self._core.batch_queue or self._scheduler.has_requests():
                self._since = now
        return result

    def _add(self, scheduler_output: Any, seconds: float) -> None:
        requests = len(scheduler_output.num_scheduled_tokens)
        key = self._kind(scheduler_output, requests), rounded_up(requests)
        total = self._sums.get(key)
        if total is None:
            total = self._sums[key] = [0, 0.0]
        total[0] += 1
        total[1] += seconds

    def _kind(self, output: Any, requests: int) -> str:
        drafts = output.scheduled_spec_decode_tokens
        decoded = requests + sum(map(len, drafts.values()))
        if output.scheduled_new_reqs or output.total_num_scheduled_tokens != decoded:
            return MIXED
        if self._switch.enabled:
            # Without drafts to verify such a step still makes some: it is not a plain one.
            return SPECULATIVE if len(drafts) == requests else MIXED
        return MIXED if drafts else PLAIN


def rounded_up(requests: int) -> int:
    """To 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on: few enough for labels, close enough to compare."""
    power = 1 << (requests - 1).bit_length()
    return power * 3 // 4 if power >= 4 and requests <= power * 3 // 4 else power


class EngineHooks:
    """Slipstream's part of one engine core; lives as long as it."""

    def __init__(self, engine_core: Any) -> None:
        self.epoch = PrefixEpoch(engine_core)
        self.drafts = DraftCount(engine_core)
        self.switch = SchedulerSwitch(engine_core)
        self.clock = StepClock(engine_core, self.switch)
        self.clock.measure(True)


def slipstream_start(self: Any) -> dict[str, Any]:
    """Install the hooks; called once, before the first request. Answers as ``describe``."""
    self.slipstream_hooks = EngineHooks(self)
    # Takes the first fingerprint while the draft is known to be what was loaded.
    slipstream_read_back(self)
    return slipstream_describe(self)


def slipstream_describe(self: Any) -> dict[str, Any]:
    """What every worker says about its models (see ``worker_methods``)."""
    return {"workers": self.collective_rpc("slipstream_describe")}


def slipstream_read_back(self: Any) -> dict[str, Any]:
    """What every worker finds when it reads its draft back (see ``read_back``)."""
    found = self.collective_rpc("slipstream_read_back")
    self.slipstream_hooks.clock.interrupted()
    return {"workers": found}


def slipstream_step_sums(self: Any, measure: bool) -> list[list[Any]]:
    """What steps took so far, [kind, requests, steps, seconds] each; measured from now on if told.

    Args:
        self: vLLM's ``EngineCore``.
        measure: goes on to be measured.
    """
    hooks: EngineHooks = self.slipstream_hooks
    hooks.clock.measure(measure)
    return hooks.clock.sums()


def slipstream_apply(self: Any, plan: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Apply a plan in one worker call.

    Args:
        self: vLLM's ``EngineCore``.
        plan: {"changes": [{"kind", "new": source, "old": source}, ...]}.
        timeout: seconds for the worker call.

    Returns:
        {"outcomes": one per worker, "drafts_before": int}. When workers disagree
        the old weights were put back everywhere.
    """
    hooks: EngineHooks = self.slipstream_hooks
    drafts_before = hooks.drafts.proposed_so_far()
    outcomes = self.collective_rpc("slipstream_apply", timeout, (plan,))
    failed = [outcome for outcome in outcomes if outcome["error"]]
    if failed and len(failed) < len(outcomes):
        undo = {
            "changes": [
                {"kind": change["kind"], "new": change["old"], "old": change["old"]}
                for change in plan["changes"]
            ]
        }
        undone = self.collective_rpc("slipstream_apply", timeout, (undo,))
        for outcome in undone:
            if outcome["error"]:
                outcomes = [dict(o, restored=False) for o in outcomes]
    if not failed and any(change["kind"] == "policy" for change in plan["changes"]):
        hooks.epoch.advance()
    hooks.clock.interrupted()
    return {"outcomes": outcomes, "drafts_before": drafts_before}


def slipstream_prepare(self: Any, plan: Mapping[str, Any]) -> dict[str, Any]:
    """How far every worker is with laying a draft ready (see ``worker_methods``)."""
    return {"workers": self.collective_rpc("slipstream_prepare", None, (plan,))}


def slipstream_set_speculation(self: Any, enabled: bool, timeout: float) -> dict[str, Any]:
    """Switch drafting off or on in scheduler and workers. Answers the workers' seconds."""
    hooks: EngineHooks = self.slipstream_hooks
    seconds = self.collective_rpc("slipstream_set_speculation", timeout, (enabled,))
    hooks.switch.set(enabled)
    if enabled:
        # Blocks that were filled meanwhile have no keys and values of the draft.
        hooks.epoch.advance()
    hooks.clock.interrupted()
    return {"seconds": seconds}


def install(engine_core_class: type) -> None:
    """Add the methods to vLLM's ``EngineCore``."""
    for method in (
        slipstream_start,
        slipstream_describe,
        slipstream_read_back,
        slipstream_apply,
        slipstream_prepare,
        slipstream_set_speculation,
        slipstream_step_sums,
    ):
        setattr(engine_core_class, method.__name__, method)
