"""Model Runner V2: its guard for heads, the lengths that it captures graphs for, short drafts.

Live tests serve with that runner: ``tests/runner_v2``.
"""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_server.vllm import api_server as app
from rollout_server.vllm import launch
from rollout_server.vllm import patches as vllm_patches
from rollout_server.vllm.engine_core import WITHOUT_DRAFT
from rollout_server.vllm.launch import settings_of
from rollout_server.vllm.versions import Sources, installed_source
from rollout_server.vllm.worker import SpeculatorSwitch
from slipstream.errors import RefusedError
from tests.rollout_server.test_vllm_patches import Model

K = 3


def test_speculation_off_skips_draft_forward() -> None:
    """A step without plans skips it; warm-ups and what the scheduler will verify still draft."""
    calls: list[dict[str, Any]] = []

    def propose(batch: Any, **named: Any) -> torch.Tensor:
        calls.append(named)
        return torch.ones(2, K, dtype=torch.int64)

    speculator = SimpleNamespace(propose=propose, num_speculative_steps=K, device="cpu")
    runner = SimpleNamespace(speculator=speculator, execute_model=lambda step: None)
    switch = SpeculatorSwitch(runner)
    batch = SimpleNamespace(num_reqs=2)
    switch.enabled = False
    for named in ({}, {"num_speculative_tokens": 0}):
        assert speculator.propose(batch, **named).tolist() == [[-1] * K] * 2
    assert calls == []
    for named in ({"num_speculative_tokens": 1}, {"dummy_run": True}):
        speculator.propose(batch, **named)
    switch.enabled = True
    speculator.propose(batch, num_speculative_tokens=0)  # It keeps the draft's KV cache filled.
    assert len(calls) == 3
    runner.execute_model(SimpleNamespace(**{WITHOUT_DRAFT: True}))
    assert speculator.propose(batch, num_speculative_tokens=0).tolist() == [[-1] * K] * 2
    runner.execute_model(SimpleNamespace())
    speculator.propose(batch, num_speculative_tokens=0)
    assert len(calls) == 4, "the mark is of one step"


def test_draft_with_own_lm_head_is_not_tied_to_policy(
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
def test_schedule_names_every_draft_length_for_graphs(
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


def test_auto_refused_where_runner_ignores_planned_length() -> None:
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
def test_draft_with_shorter_max_model_len_is_refused(
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
