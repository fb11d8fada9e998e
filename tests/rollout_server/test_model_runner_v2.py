"""Model Runner V2, which needs a GPU: vLLM's own classes, with stubs where a device would be."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rollout_server import app, launch, vllm_patches
from rollout_server.launch import settings_of
from rollout_server.reload import Change
from rollout_server.standby import READY, SAME, WORKING
from rollout_server.vllm_versions import Sources, installed_source
from rollout_server.worker import (
    slipstream_apply,
    slipstream_describe,
    slipstream_prepare,
    slipstream_read_back,
    slipstream_set_speculation,
)
from slipstream.errors import RefusedError
from tests.rollout_server.test_swap import Drafts, join
from tests.rollout_server.test_vllm_patches import Model

K = 3


def worker_of(policy: nn.Module, draft: nn.Module, config: Any) -> Any:
    """A worker with vLLM's V2 runner around two loaded models; its speculator counts its calls."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
    from vllm.v1.worker.gpu_worker import Worker

    class Speculator(DraftModelSpeculator):
        def __init__(self) -> None:
            self.model, self.num_speculative_steps = draft, K
            self.device = torch.device("cpu")
            self.ran: list[int | None] = []

        def propose(self, input_batch: Any, *rest: Any, **named: Any) -> torch.Tensor:
            self.ran.append(named.get("num_speculative_tokens"))
            return torch.ones(input_batch.num_reqs, K, dtype=torch.int64)

    Speculator.__abstractmethods__ = frozenset()
    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.model, runner.speculator = policy, Speculator()
    worker = Worker.__new__(Worker)
    worker.model_runner, worker.vllm_config = runner, config
    worker.model_config = config.model_config
    return worker


def test_off_is_off_and_what_was_planned_before_is_still_drafted(drafts: Drafts) -> None:
    worker = worker_of(drafts.policy, drafts.draft, drafts.config)
    assert slipstream_describe(worker)["runner"] == "V2"
    speculator, batch = worker.model_runner.speculator, types.SimpleNamespace(num_reqs=2)

    def step(**named: Any) -> list[list[int]]:
        # Both forms of the call: vLLM passes the length from 0.32 on.
        return speculator.propose(batch, {}, **named).tolist()  # type: ignore[no-any-return]

    assert step(num_speculative_tokens=K) == step() == [[1] * K] * 2
    slipstream_set_speculation(worker, False)
    assert step(num_speculative_tokens=0) == step() == [[-1] * K] * 2
    assert speculator.ran == [K, None], "no forward pass of the draft"
    assert step(num_speculative_tokens=K) == step(dummy_run=True) == [[1] * K] * 2
    slipstream_set_speculation(worker, True)
    assert step(num_speculative_tokens=0) == [[1] * K] * 2, "keeps the draft's KV cache filled"


def test_a_release_is_prepared_and_exchanged(drafts: Drafts) -> None:
    worker = worker_of(drafts.policy, drafts.draft, drafts.config)
    first, second, _ = drafts.sources
    addresses = {n: p.data_ptr() for n, p in drafts.draft.named_parameters() if p.numel() < 1000}
    before = drafts.outputs()
    assert slipstream_read_back(worker) == SAME
    while (state := slipstream_prepare(worker, second.to_message(), None)) == WORKING:
        join()
    assert state == READY
    for new, old in ((second, first), (first, second)):
        answer = slipstream_apply(worker, [Change("draft", new, old).to_message()])
        assert answer["error"] == "" and answer["restored"]
        join()
        now = drafts.outputs()
        assert (new is second) is any(not torch.equal(now[n], before[n]) for n in before)
        assert slipstream_read_back(worker) == SAME
    assert addresses == {n: drafts.draft.get_parameter(n).data_ptr() for n in addresses}


def test_vllms_loader_shares_equal_heads_and_ours_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first half fails on a vLLM that stopped sharing: then the workaround can go."""
    from vllm.v1.worker.gpu.spec_decode.eagle import utils

    weight = torch.randn(6, 4)
    config: Any = types.SimpleNamespace(load_config=None)
    config.speculative_config = types.SimpleNamespace(
        draft_model_config=None,
        draft_lm_head_quantization=None,
        apply_draft_overrides=lambda config: config,
    )
    monkeypatch.setattr(utils, "get_draft_load_config", lambda config: None)
    monkeypatch.setattr(utils, "get_pp_safe_draft_load_config", lambda config: config)
    monkeypatch.setattr(utils, "get_pp_group", lambda: types.SimpleNamespace(world_size=1))
    monkeypatch.setattr(utils, "get_model", lambda **named: Model(weight))
    monkeypatch.setattr(utils, "_should_share", utils._should_share)
    policy = Model(weight)
    assert utils.load_eagle_model(policy, config).lm_head is policy.lm_head
    vllm_patches.keep_own_lm_head_v2(utils)
    draft = utils.load_eagle_model(policy, config)
    assert vllm_patches.shared_parameters(policy, draft) == []
    # Whatever is not an lm_head of the draft's own is shared as before.
    assert draft.model.embed_tokens is policy.model.embed_tokens
    monkeypatch.setattr(Model, "has_own_lm_head", False)
    assert utils.load_eagle_model(policy, config).lm_head is policy.lm_head


@pytest.mark.parametrize(
    ("triton", "speculation", "lengths"),
    [
        (True, "fixed", [0, 4]),
        (True, "off", [0, 4]),
        (True, "auto", [0, 1, 2, 3, 4]),
        (False, "auto", [0, 1, 2, 3, 4]),
        (False, "fixed", None),
    ],
)
def test_every_length_in_use_is_named_so_that_graphs_are_captured(
    triton: bool,
    speculation: str,
    lengths: list[int] | None,
    policy_dir: Path,
    draft_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    monkeypatch.setattr(launch, "find_spec", lambda name: triton or None)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    options = ["--draft-length", "4", "--port", "0", "--control-port", "0"]
    args = launch.build_parser().parse_args(
        [str(policy_dir), "--draft", str(draft_dir), "--speculation", speculation, *options]
    )
    settings_of(args)
    schedule = args.speculative_config.get("num_speculative_tokens_per_batch_size")
    if lengths is None:
        assert schedule is None, "runner V1 would give up full graphs for it"
        return
    table = build_dynamic_sd_schedule_lookup(
        schedule, vllm_max_batch_size=64, vllm_num_speculative_tokens=4
    )
    assert sorted(set(table[1:])) == lengths


def test_lengths_are_not_chosen_where_the_runner_drafts_the_longest_always() -> None:
    def older(module: str) -> str | None:
        text = installed_source(module)
        return text and text.replace("num_spec_tokens_to_schedule", "of_another_name")

    app.refuse_fixed_lengths("V1", Sources(older), "0.31.0")
    app.refuse_fixed_lengths("V2", Sources(installed_source), "0.32.0")
    with pytest.raises(RefusedError, match=r"auto.*V2 of vLLM 0\.31\.0.*fixed"):
        app.refuse_fixed_lengths("V2", Sources(older), "0.31.0")


@pytest.mark.parametrize(
    ("positions", "given", "next_step"),
    [(64, None, "--max-model-len 64, or raise .* to 256"), (512, 128, "out of --draft-config")],
)
def test_a_draft_of_shorter_sequences_than_the_policys_is_refused(
    positions: int,
    given: int | None,
    next_step: str,
    policy_dir: Path,
    draft_dir: Path,
    tmp_path: Path,
) -> None:
    """vLLM's own configuration: it raises the positions of such a draft, and not its length."""
    from vllm.engine.arg_utils import EngineArgs

    draft = tmp_path / "draft"
    shutil.copytree(draft_dir, draft)
    changed = json.loads((draft / "config.json").read_text()) | {
        "max_position_embeddings": positions
    }
    (draft / "config.json").write_text(json.dumps(changed))

    def config(length: int, **more: int) -> Any:
        speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": K}
        return EngineArgs(
            str(policy_dir), max_model_len=length, speculative_config=speculative | more
        ).create_engine_config()

    found = given or positions
    short = config(256, **({} if given is None else {"max_model_len": given}))
    with pytest.raises(RefusedError, match=rf"max_model_len.*found {found}, .*256.*{next_step}"):
        app.refuse_short_draft("V1", short)
    app.refuse_short_draft("V2", short)
    app.refuse_short_draft("V1", config(64))
    # On V2 from 0.33 on, the policy's length is the draft's by now where it cannot be longer.
    for lengthened, method in ((lambda: False, "dflash"), (None, "draft_model")):
        lowered = SimpleNamespace(max_model_len=given, method=method)
        lowered.draft_model_config = short.speculative_config.draft_model_config
        if lengthened:
            lowered.draft_shares_target_positions = lengthened
        policy = SimpleNamespace(max_model_len=found, original_max_model_len=256)
        policy.get_and_verify_max_len = short.model_config.get_and_verify_max_len
        config_of_v2 = SimpleNamespace(speculative_config=lowered, model_config=policy)
        with pytest.raises(RefusedError, match=rf"found {found}, .*256.*V2.*{next_step}"):
            app.refuse_short_draft("V2", config_of_v2)
        policy.original_max_model_len = -1
        app.refuse_short_draft("V2", config_of_v2)
    short.speculative_config = None
    app.refuse_short_draft("V1", short)
