"""Slipstream's hooks in vLLM's engine core, and the calls that the control plane makes there.

The engine core handles calls only between two steps, so what must happen together (worker call,
prefix-cache salt, count of verification steps) happens in one of these.
"""

from __future__ import annotations

import functools
import inspect
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, replace
from types import SimpleNamespace
from typing import Any

from rollout_server.control.changes import Change, Result
from rollout_server.control.step_costs import MIXED, PLAIN, SPECULATIVE, StepSum
from slipstream.economics.costs import OFF
from slipstream.errors import RefusedError


class VerificationSteps:
    """Counts verification steps (one request each), so that a commit knows how many came before it.

    vLLM's statistics reach the API server through a queue that a commit's answer can overtake. The
    count makes the boundary independent of that: "the first N steps belong to the old release".
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
        """Count the steps so far, and those whose draft is proposed already and verified next.

        The latter drafts come from the weights before a commit that happens now. A request that
        ends before its draft is verified makes this too high by one; nothing makes it too low.
        """
        scheduler = self._core.scheduler
        queued = self._core.batch_queue or ()
        scheduled = sum(len(entry[1].scheduled_spec_decode_tokens) for entry in queued)
        waiting = sum(1 for request in scheduler.running if len(request.spec_token_ids) > 0)
        return self._observed + scheduled + waiting


_SALT = "_slipstream_salt"


class PrefixCacheSalt:
    """Keeps prefix-cache hits on one side of a policy commit.

    A cached block holds keys and values of the weights that computed it. vLLM can only drop the
    whole cache while no request runs, or by preempting all of them. Here every request gets the
    number of ``advance`` calls so far as a salt of its block hashes (vLLM's own ``cache_salt``):
    one that begins after a call never hits a block from before it, requests that have begun keep
    their blocks, also those that they fill later, and old blocks are evicted as usual.

    vLLM hashes a prompt in its input thread, before the engine core takes the request. A request
    that was hashed before a call and has not begun is hashed again: when it is added, or at the
    call if it waits. A KV connector may have looked up a request that waits, and keeps what it
    found by the old hashes: such a request is computed whole, or keeps its salt where vLLM would
    take those blocks anyway.

    Hashes are the same in every process, and stores behind KV connectors outlive this process or
    are shared: the salt also names this engine core. The number alone would stand for other weights
    after a restart and on another server.
    """

    def __init__(self, engine_core: Any) -> None:
        self._id = uuid.uuid4().hex[:12]
        self._calls = 0
        self._scheduler = engine_core.scheduler
        self._add = engine_core.scheduler.add_request
        self._hash = engine_core.request_block_hasher
        if self._hash is not None:
            engine_core.request_block_hasher = self._hash_salted
            engine_core.scheduler.add_request = self._add_salted

    def advance(self, policy: bool = True) -> None:
        """Keep requests that have not begun from hitting any block that exists now.

        Args:
            policy: the policy has changed, so what a KV connector found does not count either.
        """
        self._calls += 1
        if self._hash is None:
            return
        connected = policy and self._scheduler.connector is not None
        if connected and not _skips_connectors(type(self._scheduler).schedule):
            # What such a request reads from a connector must not be hit by others: it keeps its
            # old salt.
            return
        for request in self._scheduler.requests.values():
            # A preempted request with output has begun; its first tokens are the old policy's.
            if request.num_computed_tokens == 0 and request.num_output_tokens == 0:
                self._hash_again(request)
                request.skip_reading_prefix_cache |= connected

    def _hash_salted(self, request: Any) -> Any:
        if not hasattr(request, _SALT):
            self._salt(request)
        return self._hash(request)

    def _add_salted(self, request: Any) -> Any:
        calls, *_ = getattr(request, _SALT, (0,))
        if calls != self._calls:
            self._hash_again(request)
        return self._add(request)

    def _hash_again(self, request: Any) -> None:
        self._salt(request)
        request.block_hashes = []
        request.update_block_hashes()

    def _salt(self, request: Any) -> None:
        calls = self._calls  # read once: the engine core's thread may advance it meanwhile
        # The user's own salt still separates tenants.
        _, own = getattr(request, _SALT, (0, request.cache_salt))
        setattr(request, _SALT, (calls, own))
        if calls:
            request.cache_salt = f"slipstream-{self._id}-{calls}:{own or ''}"


@functools.cache
def _skips_connectors(schedule: Callable[..., Any]) -> bool:
    """Return whether vLLM takes nothing from a KV connector for requests that skip reading the
    cache (https://github.com/vllm-project/vllm/pull/57269)."""
    return "skip_reading_prefix_cache" in inspect.getsource(schedule)


MAX_UNDRAFTED = 1 / 8
"""The share of the prefix cache, in tokens, that may be computed while drafting is off and be hit
once it is on again. The draft has no keys and values there and is accepted less; but a new salt
makes vLLM compute the whole cache again."""

WITHOUT_DRAFT = "slipstream_without_draft"
"""The attribute of a scheduled step in which workers do not run the draft."""


class SchedulerSwitch:
    """Sets how many tokens are drafted, without a restart.

    Each step vLLM's scheduler looks up an entry of a list, by the number of requests (its dynamic
    speculative length). While drafting is off, that list is zeros, and the engine no longer asks
    the workers for draft tokens. Where a length is ``OFF``, the entry is 0 and the step's output is
    marked: the workers skip the draft in that step alone. ``worker.DraftingSwitch`` is the other
    half.

    Attributes:
        enabled: whether drafts are planned.
        undrafted: tokens computed while they were not, since the prefix cache's last salt.
    """

    def __init__(self, engine_core: Any) -> None:
        self._core = engine_core
        self._when_on = engine_core.scheduler.dynamic_sd_lookup
        self._without_draft: set[int] = set()  # numbers of requests
        self._plan = engine_core.scheduler.schedule
        engine_core.scheduler.schedule = self._schedule
        self.enabled = True
        self.undrafted = 0

    def _schedule(self, *args: Any, **named: Any) -> Any:
        output = self._plan(*args, **named)
        if self._without_draft and len(output.num_scheduled_tokens) in self._without_draft:
            setattr(output, WITHOUT_DRAFT, True)
        return output

    def drafts(self, output: Any) -> bool:
        """Return whether the draft runs in a scheduled step."""
        return self.enabled and not getattr(output, WITHOUT_DRAFT, False)

    def too_much_undrafted(self) -> bool:
        """Return whether drafts are better off without the prefix cache."""
        scheduler = self._core.scheduler
        cached = scheduler.kv_cache_config.num_blocks * scheduler.block_size
        return bool(self.undrafted > MAX_UNDRAFTED * cached)

    def set_lengths(self, lengths: list[int]) -> None:
        """Draft this many tokens, by the number of requests in the step, while drafting is on; with
        ``OFF``, do not run the draft.
        """
        most, least = (
            self._core.scheduler.num_spec_tokens,
            self._core.scheduler.max_num_running_reqs,
        )
        if len(lengths) <= least or not all(OFF <= k <= most for k in lengths):
            found = f"{len(lengths)} entries up to {max(lengths, default=0)}"
            expected = f"more than {least} entries of {OFF} to {most}"
            raise RefusedError(
                "draft lengths", found, expected, "give an entry for each batch size"
            )
        self._when_on = [max(k, 0) for k in lengths]
        self._without_draft = {requests for requests, k in enumerate(lengths) if k == OFF}
        self.set(self.enabled)

    def set(self, enabled: bool) -> None:
        """Plan drafts as configured, or none."""
        scheduler = self._core.scheduler
        self.enabled = enabled
        # With asynchronous scheduling vLLM asks for drafts of a step in flight only if a grammar
        # constrains them: not asked, they would evade the grammar.
        if not self._core.async_scheduling:
            self._core.check_for_draft_tokens = enabled
        zeros = [0] * (scheduler.max_num_running_reqs + 1)
        scheduler.dynamic_sd_lookup = self._when_on if enabled else zeros


class RequestsSeen:
    """Remembers requests, to say at a policy commit how many tokens the old policy sampled.

    With asynchronous scheduling the tokens of a step in flight count as sampled after it.
    """

    MAX_REQUESTS = 1 << 16
    """The most requests remembered between two policy commits; older ones are forgotten."""

    def __init__(self, engine_core: Any) -> None:
        self._scheduler = engine_core.scheduler
        self._add = engine_core.scheduler.add_request
        engine_core.scheduler.add_request = self._remember
        self._ids: dict[str, None] = {}

    def _remember(self, request: Any) -> Any:
        self._ids[request.request_id] = None
        if len(self._ids) > self.MAX_REQUESTS:
            del self._ids[next(iter(self._ids))]
        return self._add(request)

    def at_commit(self) -> dict[str, int]:
        """The tokens of each request so far; -1 if it has ended since the last policy commit."""
        present = self._scheduler.requests
        tokens = {
            name: present[name].num_output_tokens if name in present else -1 for name in self._ids
        }
        self._ids = dict.fromkeys(name for name in self._ids if name in present)
        return tokens


class StepClock:
    """Sums engine steps, their seconds and tokens by kind, number of requests and draft length.

    A step lasts from one step's output to the next, as long as the engine is busy: that is what a
    waiting request sees, with and without asynchronous scheduling. The interval around a worker
    call (a commit) or a pause is not counted.
    """

    def __init__(self, engine_core: Any, switch: SchedulerSwitch) -> None:
        self._core = engine_core
        self._scheduler = engine_core.scheduler
        self._switch = switch
        self._schedule = self._scheduler.schedule
        self._update = self._scheduler.update_from_output
        self._set_pause_state = self._scheduler.set_pause_state
        self._scheduler.schedule = self._on_schedule
        self._scheduler.update_from_output = self._on_output
        self._scheduler.set_pause_state = self._on_pause
        self._sums: dict[tuple[str, int, int], StepSum] = {}
        self._since: float | None = None
        self._untimed = 0

    def interrupted(self) -> None:
        """Do not count the present interval: the engine did something other than a step.

        Steps in flight are not counted either: their outputs wait for the engine now, and drafting
        may have been switched since they were planned.
        """
        self._since = None
        self._untimed = len(self._core.batch_queue or ())

    def sums(self) -> list[list[Any]]:
        """Return [kind, requests, draft length, *StepSum] of everything measured so far."""
        return [[*key, *astuple(total)] for key, total in self._sums.items()]

    def _on_schedule(self, *args: Any, **named: Any) -> Any:
        if self._since is None:
            self._since = time.perf_counter()
        return self._schedule(*args, **named)

    def _on_pause(self, *args: Any, **named: Any) -> Any:
        self.interrupted()
        return self._set_pause_state(*args, **named)

    def _on_output(self, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        result = self._update(scheduler_output, *rest, **named)
        since, self._since = self._since, None
        if self._untimed:
            since, self._untimed = None, self._untimed - 1
        if not self._switch.enabled:
            self._switch.undrafted += scheduler_output.total_num_scheduled_tokens
        if scheduler_output.total_num_scheduled_tokens:
            now = time.perf_counter()
            if since is not None:
                requests = len(scheduler_output.num_scheduled_tokens)
                kind, length = self._kind(scheduler_output, requests)
                key = kind, rounded_up(requests), length
                got = [
                    len(output.new_token_ids)
                    for outputs in result.values()
                    for output in outputs.outputs
                    if output.new_token_ids
                ]
                begun = len(scheduler_output.scheduled_new_reqs)
                step = StepSum(1, now - since, len(got), sum(got), begun)
                self._sums[key] = self._sums.get(key, StepSum()) + step
            if self._core.batch_queue or self._scheduler.has_requests():
                self._since = now
        return result

    def _kind(self, output: Any, requests: int) -> tuple[str, int]:
        drafts = output.scheduled_spec_decode_tokens
        decoded = requests + sum(map(len, drafts.values()))
        planned = output.num_spec_tokens_to_schedule
        drafting = self._switch.drafts(output) and self._scheduler.num_spec_tokens
        if output.scheduled_new_reqs or output.total_num_scheduled_tokens != decoded:
            return MIXED, planned if drafting else 0
        if not drafting:
            return (MIXED if drafts else PLAIN), 0
        # Every request verifies as many tokens as are drafted next; near its end, fewer.
        longest = max(map(len, drafts.values()), default=0)
        if longest == planned and len(drafts) == (requests if planned else 0):
            # With planned 0 the draft still runs: it is not a plain step.
            return SPECULATIVE, planned
        return MIXED, planned


def rounded_up(requests: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on: few labels, close enough to compare."""
    power = 1 << (requests - 1).bit_length()
    return power * 3 // 4 if power >= 4 and requests <= power * 3 // 4 else power


class EngineHooks:
    """Slipstream's part of one engine core. Public methods are calls of the control plane."""

    def __init__(self, engine_core: Any) -> None:
        self._rpc = engine_core.collective_rpc
        self._scheduler = engine_core.scheduler
        self._salt = PrefixCacheSalt(engine_core)
        self._steps = VerificationSteps(engine_core)
        self._requests = RequestsSeen(engine_core)
        self._switch = SchedulerSwitch(engine_core)
        self._clock = StepClock(engine_core, self._switch)
        # Takes the first fingerprint while the draft is known to be what was loaded.
        self.read_back()

    def describe(self) -> list[dict[str, Any]]:
        """Ask every worker about its models."""
        return list(self._rpc("slipstream_describe"))

    def read_back(self) -> list[str]:
        """Have every worker read its draft back; returns their findings (``standby.ReadBack``)."""
        found = self._rpc("slipstream_read_back")
        self._clock.interrupted()
        return list(found)

    def prepare(self, source: Mapping[str, Any], keep: Mapping[str, Any] | None) -> list[str]:
        """Have every worker prepare a standby copy; returns how far each is
        (``standby.Standby.prepare``)."""
        return list(self._rpc("slipstream_prepare", None, (source, keep)))

    def check_transfer(self, transfer: str) -> list[str]:
        """Ask every worker whether vLLM's weight-transfer engine could take an update."""
        return list(self._rpc("slipstream_check_transfer", None, (transfer,)))

    def apply(self, messages: list[Mapping[str, Any]], timeout: float) -> dict[str, Any]:
        """Apply changes in one worker call; when workers disagree, put the old weights back.

        Where the weights are unknown afterwards, no further step is taken: requests would be
        answered with them before the server ends.
        """
        from vllm.v1.core.sched.interface import PauseState

        known = False
        try:
            result = self._apply(messages, timeout)
            known = result.restored
        finally:
            if not known:
                self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        return asdict(result)

    def set_speculation(self, enabled: bool, timeout: float) -> float:
        """Switch drafting in workers and scheduler; returns the slowest worker's seconds."""
        seconds = self._rpc("slipstream_set_speculation", timeout, (enabled,))
        self._switch.set(enabled)
        if enabled and self._switch.too_much_undrafted():
            self._new_salt(policy=False)
        self._clock.interrupted()
        return float(max(seconds))

    def set_draft_lengths(self, lengths: list[int]) -> None:
        """Call ``SchedulerSwitch.set_lengths``."""
        self._switch.set_lengths(lengths)

    def step_sums(self) -> list[list[Any]]:
        """Return ``StepClock.sums``."""
        return self._clock.sums()

    def _apply(self, messages: list[Mapping[str, Any]], timeout: float) -> Result:
        steps_before = self._steps.proposed_so_far()
        changes = [Change.from_message(message) for message in messages]
        results = self._apply_on_each(messages, timeout)
        result, undo = Result.all_of(results, changes)
        if undo:
            undone = self._apply_on_each([change.to_message() for change in undo], timeout)
            result = result.taken_back(results, undone)
        requests: dict[str, int] = {}
        if not result.error and any(change.kind == "policy" for change in changes):
            self._new_salt(policy=True)
            requests = self._requests.at_commit()
        self._clock.interrupted()
        return replace(result, steps_before=(steps_before,), requests=requests)

    def _apply_on_each(self, messages: list[Mapping[str, Any]], timeout: float) -> list[Result]:
        return [Result(**r) for r in self._rpc("slipstream_apply", timeout, (messages,))]

    def _new_salt(self, policy: bool) -> None:
        self._salt.advance(policy)
        if policy:
            self._forget_encoder_outputs()
        self._switch.undrafted = 0

    def _forget_encoder_outputs(self) -> None:
        """Evict the embeddings of images and the like that no request refers to.

        They are the old policy's. vLLM's own reset would also drop those of running requests.
        Workers hear of an eviction with the next step, and never if that step needs the image
        again; Model Runner V2 would not encode it then. So they are told here.
        """
        manager = self._scheduler.encoder_cache_manager
        # The manager of encoder-decoder models keeps none.
        all_of_it = getattr(manager, "num_freeable_slots", 0)
        # Ask for an input that needs the room of them all.
        large = SimpleNamespace(get_num_encoder_embeds=lambda _: all_of_it)
        manager.can_allocate(large, 0, all_of_it, 0)
        evicted = list(getattr(manager, "freed", ()))
        if evicted:
            self._rpc("slipstream_forget", None, (evicted,))


def slipstream_call(self: Any, method: str, args: list[Any]) -> Any:
    """Call a public method of this engine core's hooks, which the first call installs."""
    if not hasattr(self, "slipstream_hooks"):
        self.slipstream_hooks = EngineHooks(self)
    return getattr(self.slipstream_hooks, method)(*args)


def install(engine_core_class: type) -> None:
    """Add the method to vLLM's ``EngineCore``."""
    engine_core_class.slipstream_call = slipstream_call  # type: ignore[attr-defined]
