"""Hooks in the engine core: prefix-cache salt with vLLM's own block hashes, commits, switches."""

from __future__ import annotations

import functools
import re
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

import rollout_server.vllm.engine_core
from rollout_server.control.changes import Change, Result
from rollout_server.control.stages import WeightSource
from rollout_server.vllm.engine_core import WITHOUT_DRAFT, EngineHooks, PrefixCacheSalt
from rollout_server.vllm.worker import slipstream_forget
from slipstream.economics.costs import OFF
from slipstream.errors import RefusedError

TOKENS = list(range(12))


class Caching:
    """The part of vLLM's engine core that hashes prompts and keeps requests, with its ``Request``.

    ``prepare`` is what its thread for input does, ``scheduler.add_request`` what the engine does.
    With ``schedule``, that of vLLM's scheduler, there is a KV connector.
    """

    def __init__(self, schedule: Any = None) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.request_block_hasher = get_request_block_hasher(4, sha256)
        kind = type("Scheduler", (SimpleNamespace,), {"schedule": schedule})
        self.scheduler = kind(requests={}, add_request=self._add, connector=schedule and object())
        self.salt = PrefixCacheSalt(self)

    def _add(self, request: Any) -> None:
        self.scheduler.requests[request.request_id] = request

    def prepare(self, tokens: list[int], salt: str | None = None) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        name = f"request {len(self.scheduler.requests)}"
        how = SamplingParams(max_tokens=99)
        return Request(
            name, tokens, how, None, cache_salt=salt, block_hasher=self.request_block_hasher
        )

    def enter(self, tokens: list[int], salt: str | None = None) -> Any:
        request = self.prepare(tokens, salt)
        self.scheduler.add_request(request)
        return request


def test_block_hashes_differ_across_policy_commit() -> None:
    core = Caching()
    before = core.enter(TOKENS).block_hashes
    assert core.enter(TOKENS).block_hashes == before and len(before) == 3
    running, short = core.enter(TOKENS[:4]), core.enter(TOKENS[:2])
    for request in (running, short):
        request.num_computed_tokens = request.num_tokens

    core.salt.advance()
    after = core.enter(TOKENS).block_hashes
    assert not set(after) & set(before)
    assert core.enter(TOKENS).block_hashes == after
    assert core.enter(TOKENS, "tenant").block_hashes[0] != after[0]

    # What was in flight fills its later blocks on its own side of the commit.
    for late in (running, short):
        late.append_output_token_ids(TOKENS[late.num_tokens :])
        assert late.block_hashes == before


@pytest.mark.parametrize("own", [None, "tenant"])
def test_waiting_request_is_rehashed_at_policy_commit(own: str | None) -> None:
    core = Caching()
    arriving, waiting = core.prepare(TOKENS, own), core.enter(TOKENS, own)
    before = waiting.block_hashes
    for _ in range(2):
        core.salt.advance()
        new = core.enter(TOKENS, own)
        assert not set(new.block_hashes) & set(before)
        assert waiting.block_hashes == new.block_hashes
        assert waiting.cache_salt == new.cache_salt
    core.scheduler.add_request(arriving)
    assert (arriving.block_hashes, arriving.cache_salt) == (new.block_hashes, new.cache_salt)


def test_preempted_request_is_rehashed_only_without_output() -> None:
    core = Caching()
    preempted, answering = core.enter(TOKENS), core.enter(TOKENS[:8])
    answering.append_output_token_ids(TOKENS[8:])
    before = answering.block_hashes[:]
    core.salt.advance()
    assert preempted.block_hashes == core.enter(TOKENS).block_hashes
    assert answering.block_hashes == before and answering.cache_salt is None


def skips(request: Any) -> bool:
    return bool(request.skip_reading_prefix_cache)


def test_waiting_request_skips_prefix_cache_with_connector() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    core = Caching(AsyncScheduler.schedule)
    waiting, answering = core.enter(TOKENS), core.enter(TOKENS[:8])
    answering.append_output_token_ids(TOKENS[8:])
    core.salt.advance(policy=False)
    assert not skips(waiting), "what the connector found is of the live policy"
    core.salt.advance()
    assert skips(waiting) and not skips(answering)
    new = core.enter(TOKENS)
    assert not skips(new) and waiting.block_hashes == new.block_hashes


def test_waiting_request_keeps_salt_if_connector_cannot_skip() -> None:
    core = Caching(lambda self: None)
    waiting = core.enter(TOKENS)
    before = waiting.block_hashes[:]
    core.salt.advance()
    assert waiting.block_hashes == before and not skips(waiting)
    assert not set(core.enter(TOKENS).block_hashes) & set(before)


def test_block_hashes_differ_across_engine_cores() -> None:
    """A store behind a KV connector is shared by servers, and outlives one that restarts."""
    hashes = []
    for _ in range(2):
        core = Caching()
        core.salt.advance()
        hashes.append(core.enter(TOKENS).block_hashes)
    assert not set(hashes[0]) & set(hashes[1])


def test_no_salt_without_prefix_caching() -> None:
    scheduler = SimpleNamespace(add_request="vLLM's")
    core = SimpleNamespace(request_block_hasher=None, scheduler=scheduler)
    PrefixCacheSalt(core).advance()
    assert core.request_block_hasher is None and scheduler.add_request == "vLLM's"


class Workers:
    """``collective_rpc`` of an engine core with two workers."""

    def __init__(self) -> None:
        self.errors = self.undo_errors = ["", ""]
        self.restored = self.answers = True
        self.applied: list[list[str]] = []
        self.encoders: list[Any] = []

    def __call__(self, method: str, timeout: Any = None, args: Any = ()) -> Any:
        if method == "slipstream_forget":
            return [slipstream_forget(worker, *args) for worker in self.encoders]
        if method == "slipstream_set_speculation":
            return [0.25, 0.5]
        if method != "slipstream_apply":
            return ["same", "same"]
        [messages] = args
        self.applied.append([message["new"]["directory"] for message in messages])
        if not self.answers:
            raise TimeoutError
        errors, self.errors = self.errors, self.undo_errors
        return [asdict(Result(0.01 * n, e, self.restored)) for n, e in enumerate(errors)]


class Hooks(EngineHooks):
    """Those of ``core``."""

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self.core = core


@pytest.fixture
def hooks() -> Hooks:
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.sched.interface import PauseState

    drafting = SimpleNamespace(spec_token_ids=[1, 2, 3])
    queued = SimpleNamespace(scheduled_spec_decode_tokens={"a": [1], "b": [2]})
    core = SimpleNamespace(
        collective_rpc=Workers(),
        request_block_hasher=lambda request: request.cache_salt,
        batch_queue=[("future", queued)],
        scheduler=SimpleNamespace(
            make_spec_decoding_stats=lambda *_: object(),
            dynamic_sd_lookup="as configured",
            max_num_running_reqs=2,
            schedule=lambda: core.planned,
            update_from_output=lambda output, result: result,
            has_requests=lambda: False,
            num_spec_tokens=3,
            kv_cache_config=SimpleNamespace(num_blocks=50),
            block_size=16,
            running=[drafting, SimpleNamespace(spec_token_ids=[])],
            requests={},
            add_request=lambda request: None,
            connector=None,
            encoder_cache_manager=EncoderCacheManager(100),
            pause_state=PauseState.UNPAUSED,
        ),
        async_scheduling=False,
        planned=None,
    )
    core.scheduler.set_pause_state = functools.partial(setattr, core.scheduler, "pause_state")
    return Hooks(core)


def change(kind: str) -> dict[str, Any]:
    return Change(kind, WeightSource("new"), WeightSource("old")).to_message()


def salt_of(hooks: Hooks) -> str | None:
    """Without the engine core's name."""
    salt = hooks.core.request_block_hasher(SimpleNamespace(cache_salt=None))
    return salt and re.sub("^slipstream-[0-9a-f]{12}-", "slipstream-", salt)


def test_commit_returns_steps_before_it_and_salts_policy_only(hooks: Hooks) -> None:
    hooks.core.scheduler.make_spec_decoding_stats()
    answer = hooks.apply([change("draft")], 1.0)
    # One verified, two scheduled, one proposed.
    assert answer == asdict(Result(0.01, steps_before=(4,)))
    assert salt_of(hooks) is None
    hooks.apply([change("draft"), change("policy")], 1.0)
    assert salt_of(hooks) == "slipstream-1:"


def test_policy_commit_returns_tokens_of_each_request(hooks: Hooks) -> None:
    scheduler = hooks.core.scheduler

    def enter(name: str, tokens: int) -> None:
        scheduler.add_request(SimpleNamespace(request_id=name))
        scheduler.requests[name] = SimpleNamespace(
            num_output_tokens=tokens, num_computed_tokens=tokens + 5
        )

    enter("runs", 7)
    enter("waits", 0)
    enter("ended", 9)
    del scheduler.requests["ended"]
    assert hooks.apply([change("draft")], 1.0)["requests"] == {}
    answer = hooks.apply([change("policy")], 1.0)
    assert answer["requests"] == {"runs": 7, "waits": 0, "ended": -1}
    scheduler.requests["runs"].num_output_tokens = 12
    del scheduler.requests["waits"]
    answer = hooks.apply([change("draft"), change("policy")], 1.0)
    assert answer["requests"] == {"runs": 12, "waits": -1}


def test_failed_policy_commit_keeps_noted_requests(hooks: Hooks) -> None:
    scheduler = hooks.core.scheduler
    scheduler.add_request(SimpleNamespace(request_id="a"))
    hooks.core.collective_rpc.errors = ["no memory", "no memory"]
    assert hooks.apply([change("policy")], 1.0)["requests"] == {}
    assert hooks.apply([change("policy")], 1.0)["requests"] == {"a": -1}


def test_noted_requests_are_bounded(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_server.vllm.engine_core.RequestsSeen, "MAX_REQUESTS", 2)
    for name in "abc":
        hooks.core.scheduler.add_request(SimpleNamespace(request_id=name))
    assert hooks.apply([change("policy")], 1.0)["requests"] == {"b": -1, "c": -1}


def test_failed_worker_reverts_other_workers(hooks: Hooks) -> None:
    workers = hooks.core.collective_rpc
    workers.errors = ["", "no memory"]
    answer = hooks.apply([change("policy")], 1.0)
    assert (answer["error"], answer["restored"]) == ("no memory", True)
    assert workers.applied == [["new"], ["old"]]
    assert salt_of(hooks) is None, "the old policy's blocks are still right"
    workers.errors = ["no memory", "no memory"]
    hooks.apply([change("policy")], 1.0)
    assert workers.applied[2:] == [["new"]], "each has put its own back"


def test_failed_worker_does_not_revert_external_policy(hooks: Hooks) -> None:
    workers = hooks.core.collective_rpc
    workers.errors = ["", "no memory"]
    external = Change("policy", WeightSource("new"), WeightSource(transfer="{}"))
    answer = hooks.apply([external.to_message()], 1.0)
    assert (answer["error"], answer["restored"]) == ("no memory", False)
    assert workers.applied == [["new"]]


@pytest.mark.parametrize(("refuses", "known"), [(1, True), (0, False)])
def test_unwritten_worker_without_room_counts_as_restored(
    hooks: Hooks, refuses: int, known: bool
) -> None:
    workers = hooks.core.collective_rpc
    workers.errors = ["", "no room"]
    workers.undo_errors = ["no room" if n == refuses else "" for n in range(2)]
    assert hooks.apply([change("policy")], 1.0)["restored"] is known


def test_engine_with_unknown_weights_is_paused(hooks: Hooks) -> None:
    from vllm.v1.core.sched.interface import PauseState

    scheduler, workers = hooks.core.scheduler, hooks.core.collective_rpc

    def paused() -> bool:
        state, scheduler.pause_state = scheduler.pause_state, PauseState.UNPAUSED
        return state is PauseState.PAUSED_ALL

    hooks.apply([change("policy")], 1.0)
    workers.errors = ["no memory", "no memory"]
    assert hooks.apply([change("policy")], 1.0)["error"] == "no memory"
    assert not paused(), "each has put its own back"
    workers.errors, workers.restored = ["torn", "torn"], False
    assert not hooks.apply([change("policy")], 1.0)["restored"]
    assert paused()
    workers.answers = False
    with pytest.raises(TimeoutError):
        hooks.apply([change("policy")], 1.0)
    assert paused()


def compute(hooks: Hooks, tokens: int) -> None:
    """One step that reads prompts."""
    output = SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens={"a": tokens},
        scheduled_spec_decode_tokens={},
        scheduled_new_reqs=["a"],
        num_spec_tokens_to_schedule=0,
    )
    scheduler = hooks.core.scheduler
    scheduler.schedule()
    scheduler.update_from_output(output, None)


def test_speculation_off_schedules_no_drafts(hooks: Hooks) -> None:
    core = hooks.core
    assert hooks.set_speculation(False, 1.0) == 0.5
    assert core.scheduler.dynamic_sd_lookup == [0, 0, 0] and not core.check_for_draft_tokens
    hooks.set_speculation(True, 1.0)
    assert core.scheduler.dynamic_sd_lookup == "as configured" and core.check_for_draft_tokens
    core.async_scheduling = True
    hooks.set_speculation(False, 1.0)
    assert core.check_for_draft_tokens, "a grammar has to see the drafts of a step in flight"


def test_draft_lengths_apply_by_requests_in_step(hooks: Hooks) -> None:
    """vLLM's scheduler looks up the entry at the number of requests; here at most two run."""
    scheduler = hooks.core.scheduler
    hooks.set_draft_lengths([0, 3, 1])
    assert [scheduler.dynamic_sd_lookup[requests] for requests in (1, 2)] == [3, 1]
    hooks.set_speculation(False, 1.0)
    hooks.set_draft_lengths([0, 2, 1])
    assert scheduler.dynamic_sd_lookup == [0, 0, 0], "drafting is off"
    hooks.set_speculation(True, 1.0)
    assert [scheduler.dynamic_sd_lookup[requests] for requests in (1, 2)] == [2, 1]
    for refused in ([3, 3], [3, 3, 4], [3, 3, -2]):
        with pytest.raises(RefusedError, match="draft lengths"):
            hooks.set_draft_lengths(refused)
    assert [scheduler.dynamic_sd_lookup[requests] for requests in (1, 2)] == [2, 1]


def test_length_off_marks_steps_without_draft(hooks: Hooks) -> None:
    scheduler = hooks.core.scheduler

    def marked(requests: int) -> bool:
        hooks.core.planned = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(range(requests), 1))
        return hasattr(scheduler.schedule(), WITHOUT_DRAFT)

    hooks.set_draft_lengths([0, 2, OFF])
    assert scheduler.dynamic_sd_lookup == [0, 2, 0]
    assert [marked(1), marked(2)] == [False, True]
    hooks.set_draft_lengths([0, 2, 0])
    assert not marked(2), "the draft runs, to fill its KV cache"


def test_policy_commit_evicts_encoder_outputs(hooks: Hooks) -> None:
    """Workers forget them at once: a step that needs one again tells none that it was evicted."""
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache

    outputs, v2 = dict.fromkeys(("seen", "in use")), EncoderCache()
    v2.encoder_outputs = outputs.copy()
    runners = [SimpleNamespace(encoder_cache=cache) for cache in (outputs, v2, None)]
    hooks.core.collective_rpc.encoders = [
        SimpleNamespace(model_runner=runner) for runner in runners
    ]
    manager = hooks.core.scheduler.encoder_cache_manager
    ended, reading, new = (
        SimpleNamespace(
            request_id=name,
            mm_features=[SimpleNamespace(identifier=image)],
            get_num_encoder_embeds=lambda _: 8,
        )
        for name, image in (("ended", "seen"), ("reading", "in use"), ("new", "seen"))
    )
    for request in (ended, reading):
        manager.allocate(request, 0)
    manager.free_encoder_input(ended, 0)
    hooks.apply([change("draft")], 1.0)
    assert manager.check_and_update_cache(new, 0)
    manager.free_encoder_input(new, 0)
    assert len(outputs) == len(v2) == 2
    hooks.apply([change("policy")], 1.0)
    assert list(outputs) == list(v2.encoder_outputs) == ["in use"]
    assert not manager.check_and_update_cache(new, 0) and manager.get_freed_mm_hashes() == ["seen"]
    assert manager.check_and_update_cache(reading, 0), "a request is reading it"


def test_undrafted_prefix_cache_is_salted_on_speculation_on(
    hooks: Hooks,
) -> None:
    """It holds 800 tokens."""
    for tokens, salt in ((60, None), (39, None), (2, "slipstream-1:"), (99, "slipstream-1:")):
        hooks.set_speculation(False, 1.0)
        compute(hooks, tokens)
        hooks.set_speculation(True, 1.0)
        assert salt_of(hooks) == salt
        compute(hooks, 1000)
    hooks.apply([change("policy")], 1.0)
    hooks.set_speculation(False, 1.0)
    compute(hooks, 2)
    hooks.set_speculation(True, 1.0)
    assert salt_of(hooks) == "slipstream-2:", "a commit leaves what was there before it"
