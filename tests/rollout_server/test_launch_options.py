"""Options that reach vLLM, and those that are refused because they would undo a guarantee."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from draft_trainer.checkpoints import read_policy
from draft_trainer.drafters import DRAFTERS
from draft_trainer.drafters.initial import init_dflash
from examples.arithmetic_grpo.make_mtp import first_layers, new_head, policy_with_mtp
from rollout_server.vllm import launch
from rollout_server.vllm.launch import build_parser, serve, settings_of, share_with_ray
from rollout_server.vllm.plugins import MARK
from slipstream.errors import RefusedError

PORTS = ("--port", "0", "--control-port", "0")


@pytest.fixture
def parse(policy_dir: Path, draft_dir: Path) -> Any:
    """``parse(*options)``: vLLM's arguments after our checks."""

    def parsed(*options: str) -> Any:
        args = build_parser().parse_args(
            [str(policy_dir), "--draft", str(draft_dir), *PORTS, *options]
        )
        settings_of(args)
        return args

    return parsed


def connector(name: str, *inner: str) -> str:
    """A ``--kv-transfer-config``."""
    nested = [{"kv_connector": each, "kv_role": "kv_both"} for each in inner]
    config: dict[str, Any] = {"kv_connector": name, "kv_role": "kv_both"}
    if nested:
        config["kv_connector_extra_config"] = {"connectors": nested}
    return json.dumps(config)


def test_dspark_is_refused_where_runner_v2_cannot_run(
    policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would say so by a ValueError, once it has started."""
    draft = tmp_path / "draft"
    draft.mkdir()
    DRAFTERS["dspark"].save(draft, init_dflash(read_policy(policy_dir), 127, markov_rank=8))
    args = build_parser().parse_args([str(policy_dir), "--draft", str(draft), *PORTS])
    for triton, wanted in ((False, None), (True, "0")):
        monkeypatch.setattr(launch, "find_spec", lambda name, found=triton: found or None)
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        if wanted is not None:
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", wanted)
        with pytest.raises(RefusedError, match=r"found dspark.*V2, which needs Triton"):
            settings_of(args)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    assert settings_of(args).draft_kind == args.speculative_config["method"] == "dspark"


def test_kv_connector_ignoring_salt_is_refused_unless_allowed(parse: Any) -> None:
    option = "--kv-transfer-config"
    for known in (
        connector("NixlConnector"),
        connector("MultiConnector", "OffloadingConnector", "LMCacheMPConnector"),
    ):
        parse(option, known)
    for config, name in (
        (connector("LMCacheConnectorV1"), "LMCacheConnectorV1"),
        (connector("MultiConnector", "NixlConnector", "ExampleConnector"), "ExampleConnector"),
        (connector("HF3FSKVConnector"), "HF3FSKVConnector"),
        (connector("OfMyOwn"), "OfMyOwn"),
    ):
        with pytest.raises(RefusedError, match=rf"{option}.*{name}.*--allow-kv-connector"):
            parse(option, config)
        parse(option, config, "--allow-kv-connector")


def test_kv_connector_storing_rejected_drafts_is_refused(
    parse: Any, policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.version

    option, found = "--kv-transfer-config", r"OffloadingConnector.*0\.29\.1.*--draft-kind none"
    offloading = connector("MultiConnector", "NixlConnector", "OffloadingConnector")
    monkeypatch.setattr(vllm.version, "__version__", "0.29.1+cpu")
    for more in ((), ("--allow-kv-connector",)):
        with pytest.raises(RefusedError, match=rf"{option}.*{found}"):
            parse(option, offloading, *more)
    with pytest.raises(RefusedError, match=rf"--kv-offloading-size.*{found}"):
        parse("--kv-offloading-size", "1")
    parse("--kv-offloading-size", "1", "--kv-offloading-backend", "lmcache")
    parse(option, connector("NixlConnector"))
    alone = (str(policy_dir), "--draft-kind", "none", *PORTS, option, offloading)
    settings_of(build_parser().parse_args([*alone]))
    monkeypatch.setattr(vllm.version, "__version__", "0.30.0")
    parse(option, offloading)


def test_draft_config_passes_other_speculative_fields(parse: Any) -> None:
    given = {
        "draft_tensor_parallel_size": 1,
        "attention_backend": "FLASH_ATTN",
        "disable_eagle_block_drop": True,
    }
    passed = parse("--draft-config", json.dumps(given)).speculative_config
    assert given.items() <= passed.items() and passed["num_speculative_tokens"] == 3
    for refused in ('{"model": "another"}', '{"rejection_sample_method": "synthetic"}', "[1]"):
        with pytest.raises(RefusedError, match=r"--draft-config.*an object with some of"):
            parse("--draft-config", refused)


def test_data_parallel_uses_fixed_draft_length(parse: Any) -> None:
    parsed = parse("--data-parallel-size", "2")
    assert parsed.speculation == "fixed"
    assert "num_speculative_tokens_per_batch_size" not in parsed.speculative_config
    for option, value in (
        ("--speculation", "auto"),
        ("--data-parallel-rank", "0"),
        ("--data-parallel-size-local", "1"),
        ("--data-parallel-backend", "ray"),
    ):
        with pytest.raises(RefusedError, match=rf"{option}.*{value}"):
            parse("--data-parallel-size", "2", option, value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ("--enable-expert-parallel", "--enable-eplb"),
            "--enable-eplb: found True, expected not given",
        ),
        (
            ("--watermark-config", '{"key": 1}'),
            "--watermark-config: found .*expected not given.*samples of the policy",
        ),
        (("--load-format", "ipc_cache"), "--load-format: found ipc_cache"),
        (
            ("--ec-transfer-config", '{"ec_connector": "Own", "ec_role": "ec_both"}'),
            "--ec-transfer-config: found .*expected not given.*older policy's",
        ),
        (
            ("--speculative-config", '{"method": "ngram"}'),
            "--speculative-config: found .*expected not given",
        ),
    ],
)
def test_vllm_options_that_break_guarantees_are_refused(
    parse: Any, options: tuple[str, ...], text: str
) -> None:
    with pytest.raises(RefusedError, match=text):
        parse(*options)


@pytest.mark.parametrize(
    "changes",
    [{"target_hidden_size": [192]}, {"eagle_config": [1]}, {"draft_vocab_size": "many"}],
)
def test_wrong_types_in_a_drafts_config_are_refused(
    policy_dir: Path, draft_dir: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(draft_dir, draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | changes))
    args = build_parser().parse_args([str(policy_dir), "--draft", str(draft), *PORTS])
    with pytest.raises(RefusedError, match=r"config\.json: found .*fields of the types that vLLM"):
        settings_of(args)


def test_mtp_head_is_refused_with_online_quantization(
    parse: Any, policy_dir: Path, tmp_path: Path
) -> None:
    policy, head = policy_with_mtp(policy_dir, tmp_path / "policy"), tmp_path / "head"
    head.mkdir()
    DRAFTERS["mtp"].save(head, new_head(policy, seed=0))
    config = json.dumps({"linear": {"weight": "fp8_per_channel_static"}})
    given = [str(policy), "--draft", str(head), *PORTS]
    settings_of(build_parser().parse_args(given))
    for options in (("--quantization", "fp8_per_tensor"), ("--quantization-config", config)):
        parse(*options)  # An EAGLE-3 draft has its own.
        with pytest.raises(RefusedError, match=f"{options[0]}: found given.*MTP head"):
            settings_of(build_parser().parse_args([*given, *options]))


def test_parallel_drafting_uses_fixed_draft_length(policy_dir: Path, tmp_path: Path) -> None:
    draft = first_layers(policy_dir, tmp_path / "small", layers=2, parallel=127)
    given = [str(policy_dir), "--draft", str(draft), "--draft-kind", "draft_model", *PORTS]
    args = build_parser().parse_args(given)
    settings_of(args)
    assert args.speculation == "fixed"
    assert args.speculative_config["parallel_drafting"] is True
    assert "num_speculative_tokens_per_batch_size" not in args.speculative_config
    with pytest.raises(RefusedError, match=r"--speculation: found auto.*in parallel"):
        settings_of(build_parser().parse_args([*given, "--speculation", "auto"]))


@pytest.mark.parametrize("given", [("--peer-ca", "ca.pem"), ("--peer-ca=ca.pem",)])
def test_removed_option_is_refused_with_what_to_do(given: tuple[str, ...]) -> None:
    with pytest.raises(RefusedError, match=r"--peer-ca: .*removed.*the trainer sends releases"):
        serve(["policy", *given])


def test_ray_workers_inherit_plugin_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.ray.ray_env import get_env_vars_to_copy

    monkeypatch.setenv(MARK, "1")
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "MINE")
    assert MARK not in get_env_vars_to_copy()
    share_with_ray()
    share_with_ray()
    assert {MARK, "MINE"} <= get_env_vars_to_copy()
