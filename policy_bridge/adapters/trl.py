"""TRL's ``GRPOTrainer`` (tested with 1.16.0) on rollout servers, with its passes captured.

    paths = ModulePaths(final_norm="model.norm")
    bridge = PolicyBridge(model, BridgeConfig(trainer=..., run_id=..., modules=paths))
    rollouts = TrlRollouts(bridge, CompletionsClient(["http://rollouts:8000"], "policy"))
    GRPOTrainer(model, ..., rollout_func=rollouts).train()

TRL calls ``rollout_func`` whenever it needs completions, with the weights final:
the policy is synced first, so the rollouts are of these weights. The log-prob or
training forward passes that TRL then does anyway are captured. TRL fuses lm_head
with the loss and never calls it, hence ``final_norm``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from policy_bridge.adapters.completions import Rollouts
from policy_bridge.bridge import DisabledBridge, PolicyBridge
from policy_bridge.capture import Capture, NullCapture
from policy_bridge.hooks import watch
from slipstream.errors import RefusedError
from slipstream.sampling import SAMPLING


def whole_policy(trainer: Any) -> Mapping[str, torch.Tensor]:
    """The trained policy's state dict, adapters beside their base; collective where it is sharded.

    Where it is gathered, it may be empty in all but the main process. DeepSpeed ZeRO-3 needs
    ``stage3_gather_16bit_weights_on_model_save`` and ``BridgeConfig.rollout_servers``.
    """
    # Only DeepSpeed's engine can gather; in other runs, what wraps the model changes names.
    model = trainer.model_wrapped if trainer.is_deepspeed_enabled else trainer.model
    return dict(trainer.accelerator.get_state_dict(model) or {})


class TrlRollouts:
    """TRL's ``rollout_func``: syncs the policy, generates, captures what TRL then computes.

    One per process, as the bridge: every process feeds its own sequences, the main
    one alone pushes the policy.

    Args:
        bridge: an open bridge on the trainer's model, ``modules.final_norm`` set.
        rollouts: generates with the policy that was pushed last.
        weights: what ``push_policy`` takes, LoRA adapters of PEFT included, called in every
            process. None: do not push.
    """

    def __init__(
        self,
        bridge: PolicyBridge | DisabledBridge,
        rollouts: Rollouts,
        weights: Callable[[Any], Mapping[str, torch.Tensor]] | None = whole_policy,
    ) -> None:
        self._bridge, self._rollouts, self._weights = bridge, rollouts, weights
        self._capture: Capture | NullCapture | None = None
        self._synced_step: int | None = None
        self._rows_left = 0
        self._skip_no_grad = self._hooked = False
        self._logits_dtype: torch.dtype | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Generate one completion of each prompt; TRL has repeated those of a group already.

        Returns:
            ``prompt_ids`` and ``completion_ids``: token ids. ``logprobs``: one per
            completion token, as the server reports them.

        Raises:
            PolicySyncError: a rollout server did not take the policy.
            httpx.HTTPError: a rollout server did not answer.
            RefusedError: it takes no request with these sampling parameters. With drafts, vLLM
                takes no ``min_p``: https://github.com/vllm-project/vllm/issues/42744. Or the
                trainer has tools or environments, or a prompt an image or a video.
        """
        _check_served(prompts, trainer)
        self._end_window()
        self._sync(trainer)
        ids = _prompt_ids(prompts, trainer)
        completions = self._rollouts.generate(ids, _sampling(trainer))
        if trainer.model.training:
            self._begin_window(trainer, len(ids))
        return {
            "prompt_ids": ids,
            "completion_ids": [completion.token_ids for completion in completions],
            "logprobs": [completion.logprobs for completion in completions],
        }

    def _sync(self, trainer: Any) -> None:
        step, known = trainer.state.global_step, self._bridge.policy_version
        if self._synced_step is None and known == step:
            self._synced_step = step
        if self._synced_step != step:
            # One generation may serve many optimizer steps, and the draft trainer's replay counts
            # a sample's age in versions. From the first step on, so that a resumed run rises too.
            version = step if self._synced_step is None or known is None else known + 1
            policy = self._weights(trainer) if self._weights is not None else None
            lead = trainer.accelerator.is_main_process
            with self._bridge.sync(version, lead=lead) as window:
                if lead and policy is not None:
                    window.push_policy(policy)
            # No process may generate before the main one has committed the policy.
            trainer.accelerator.wait_for_everyone()
            self._synced_step = step

    def _begin_window(self, trainer: Any, rows: int) -> None:
        """Capture each of the generation batch's ``rows`` once, in the next passes over them."""
        if not self._hooked:
            # Copies of the model that the loop makes are not watched.
            watch(trainer.model, partial(self._after_forward, trainer.model), after=True)
            self._hooked = True
        # TRL then leaves autocast for lm_head.
        self._logits_dtype = torch.float32 if trainer.args.cast_lm_head_to_fp32 else None
        # With PEFT and a KL term TRL runs the reference, adapters off, through the same module.
        self._skip_no_grad = bool(trainer.beta) and hasattr(trainer.model, "peft_config")
        self._rows_left = rows
        passes = -(-rows // trainer.args.per_device_train_batch_size)
        sampling = _sampling(trainer)
        capture = self._bridge.capture(
            temperature=trainer.args.temperature,
            forwards=passes,
            sampling={name: value for name, value in sampling.items() if name in SAMPLING},
        )
        self._capture = capture.__enter__()

    def _end_window(self) -> None:
        if self._capture is not None:
            self._capture.__exit__(None, None, None)
            self._capture = None

    def _after_forward(
        self, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any
    ) -> None:
        if self._capture is None or not module.training or not kwargs.get("fused_lm_head"):
            return
        if self._skip_no_grad and not torch.is_grad_enabled():
            return
        ids = kwargs["input_ids"]
        self._capture.ship(
            ids,
            attention_mask=kwargs["attention_mask"],
            # TRL labels the completion's tokens and only them.
            loss_mask=kwargs["labels"] != -100,
            # At the trainer's temperature, [B, S-1].
            sampled_logprobs=output.log_probs.detach(),
            logits_dtype=self._logits_dtype,
        )
        self._rows_left -= len(ids)
        if self._rows_left <= 0:
            self._end_window()


def _check_served(prompts: list[Any], trainer: Any) -> None:
    """Raise RefusedError for what a completions request of token ids cannot do."""
    for name, found in (
        ("tools", getattr(trainer, "tools", None)),
        ("environment_factory", getattr(trainer, "environment_factories", None)),
    ):
        if found:
            # After a tool's answer TRL generates with the trained model, not on the servers.
            step = "leave it out, or generate with a rollout_func of your own"
            raise RefusedError(name, f"{len(found)} of them", "none, single-turn rollouts", step)
    for prompt in prompts:
        contents = [] if isinstance(prompt, str) else [one.get("content") for one in prompt]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        others = {str(part["type"]) for part in parts} - {"text"}
        if others:
            step = "leave such prompts, and the images, out of the data set"
            raise RefusedError("prompts", f"content of type {sorted(others)}", "text", step)


def _prompt_ids(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """Token ids of prompts that are texts, or conversations for the chat template."""
    processing, extra = trainer.processing_class, trainer.args.chat_template_kwargs or {}
    if isinstance(prompts[0], str):
        return list(processing(text=prompts)["input_ids"])
    # None: the tokenizer's own template.
    extra = {"chat_template": getattr(trainer, "chat_template", None), **extra}
    settings = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    return list(processing.apply_chat_template(prompts, **settings, **extra)["input_ids"])


def _sampling(trainer: Any) -> dict[str, Any]:
    """TRL's generation settings as fields of a completions request."""
    args = trainer.args
    return {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "stop_token_ids": list(trainer.eos_token_ids),
        **(args.generation_kwargs or {}),
    }
