"""Methods that Slipstream adds to vLLM's engine core.

The engine core handles calls only between two steps. What must happen together
(worker call, prefix epoch, draft count) happens in one of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_server.draft_count import DraftCount
from rollout_server.prefix_epoch import PrefixEpoch
from rollout_server.speculation_switch import SchedulerSwitch
from rollout_server.step_clock import StepClock


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
