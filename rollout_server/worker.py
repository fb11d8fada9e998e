"""Methods that Slipstream adds to vLLM's workers.

Each is one ``collective_rpc`` call, which vLLM runs between two engine steps.
They answer plain data and report failures as data: an exception inside a worker
call says nothing about which ranks did what.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rollout_server.engine_core import DrafterSwitch
from rollout_server.reload import Change, WeightSource, apply_all
from rollout_server.swap import READY, SAME, ReadBack, Spares, watch_sleep
from rollout_server.vllm_patches import shared_parameters, shares_embedding


def slipstream_describe(self: Any) -> dict[str, Any]:
    """How the draft lies in memory beside the verifier.

    Returns:
        {"has_draft": bool, "shares_embedding": bool, "shared": names of draft
        parameters in the verifier's memory, "dtype": of the served policy}.
    """
    draft = self.get_draft_model()
    dtype = str(self.model_config.dtype).removeprefix("torch.")
    if draft is None:
        return {"has_draft": False, "shares_embedding": False, "shared": [], "dtype": dtype}
    policy = self.get_model()
    return {
        "has_draft": True,
        "shares_embedding": shares_embedding(policy, draft),
        "shared": shared_parameters(policy, draft),
        "dtype": dtype,
    }


def slipstream_apply(self: Any, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Apply every change of the plan, or none (``reload.apply_all``)."""
    from vllm.config import set_current_vllm_config

    changes = [_change(self, change) for change in plan["changes"]]
    with set_current_vllm_config(self.vllm_config):
        outcome = apply_all(changes)
    if any(change.kind == "policy" for change in changes) and self.vllm_config.lora_config:
        self.model_runner.reset_lora_state()
    return outcome.to_message()


def slipstream_prepare(self: Any, plan: Mapping[str, Any]) -> str:
    """Lay a draft ready beside the live one: begins it, or says how far it is.

    Args:
        self: vLLM's ``Worker``.
        plan: {"source": the draft, "keep": what stays ready if it is, or None}.

    Returns:
        As ``Spares.prepare``.
    """
    if self.get_draft_model() is None:
        return READY
    keep = None if plan["keep"] is None else WeightSource.from_message(plan["keep"])
    return _spares(self).prepare(WeightSource.from_message(plan["source"]), keep)


def slipstream_set_speculation(self: Any, enabled: bool) -> float:
    """Skip the draft's forward pass or run it. Answers seconds."""
    start = time.perf_counter()
    runner = self.model_runner
    # Model Runner V2 has no such hook; there the scheduler's half suffices and
    # the draft's first forward pass goes on.
    if hasattr(runner, "drafter"):
        if not hasattr(self, "slipstream_drafter_switch"):
            self.slipstream_drafter_switch = DrafterSwitch(runner)
        self.slipstream_drafter_switch.set(enabled)
    return time.perf_counter() - start


def slipstream_read_back(self: Any) -> str:
    """``read_back``'s finding about the draft in this worker's memory."""
    return SAME if self.get_draft_model() is None else _read_back(self).check()


def _read_back(self: Any) -> ReadBack:
    if not hasattr(self, "slipstream_read_back_state"):
        self.slipstream_read_back_state = ReadBack(self)
    state: ReadBack = self.slipstream_read_back_state
    return state


def _spares(self: Any) -> Spares:
    if not hasattr(self, "slipstream_spares"):
        self.slipstream_spares = Spares(self.get_model, self.get_draft_model, _read_back(self))
    spares: Spares = self.slipstream_spares
    return spares


def _change(self: Any, change: Mapping[str, Any]) -> Change:
    draft = change["kind"] == "draft"
    return Change(
        kind=change["kind"],
        model=self.get_draft_model() if draft else self.get_model(),
        config=(
            self.vllm_config.speculative_config.draft_model_config
            if draft
            else self.vllm_config.model_config
        ),
        new=WeightSource.from_message(change["new"]),
        old=WeightSource.from_message(change["old"]),
        ready=_spares(self) if draft else None,
    )


def install(worker_class: type) -> None:
    """Add the methods to vLLM's ``Worker``."""
    for method in (
        slipstream_describe,
        slipstream_apply,
        slipstream_prepare,
        slipstream_set_speculation,
        slipstream_read_back,
    ):
        setattr(worker_class, method.__name__, method)
    watch_sleep(worker_class)
