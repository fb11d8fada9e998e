"""Turns drafting off and on between two engine steps, without a restart.

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
"""

from __future__ import annotations

from typing import Any

import torch


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
