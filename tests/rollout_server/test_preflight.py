"""Every wrong input is refused before the engine starts, and says what to do."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout_server import cli
from rollout_server.control.draft_folder import read_draft_layout
from rollout_server.vllm import launch
from rollout_server.vllm.plugins import Settings
from rollout_server.vllm.preflight import check_metrics, check_paths, check_port_free
from rollout_server.vllm.served import SERVED
from slipstream.errors import RefusedError
from slipstream.tensors import spec_of
from tests.draft_trainer.rig import open_to_all
from tests.rollout_server.checkpoints import load, write_draft
from tests.rollout_server.test_served import plane


@pytest.fixture
def reduced(tmp_path: Path, policy_dir: Path) -> Path:
    return write_draft(tmp_path / "draft", policy_dir, draft_vocab_size=96)


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def nest_layers(directory: Path, layers: list[int]) -> None:
    """Layer ids as SpecForge writes them: in ``eagle_config`` only."""
    nested = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers}
    edit_config(directory, eagle_aux_hidden_state_layer_ids=None, eagle_config=nested)


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load(directory)
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_eagle3_check_accepts_fitting_drafts(
    tmp_path: Path,
    policy_dir: Path,
    reduced: Path,
    draft_dir: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    SERVED["eagle3"].check(policy_dir, reduced)
    SERVED["eagle3"].check(policy_dir, write_draft(tmp_path / "full", policy_dir))
    SERVED["eagle3"].check(policy_dir, draft_dir)
    # The default layers of 10, as vLLM counts them.
    nest_layers(reduced, [2, 5, 7])
    SERVED["eagle3"].check(policy_dir, reduced)
    # The state after the last layer is one, too.
    edit_config(reduced, eagle_aux_hidden_state_layer_ids=[2, 5, 10], eagle_config=None)
    SERVED["eagle3"].check(policy_dir, reduced)
    assert not caplog.messages
    # A stage of a later draft has no such buffer.
    buffer = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    names = read_draft_layout(reduced).keys()
    edit_tensors(reduced, lambda tensors: tensors.update(buffer))
    assert read_draft_layout(reduced).keys() == names
    edit_config(reduced, eagle_aux_hidden_state_layer_ids=None)
    SERVED["eagle3"].check(policy_dir, reduced)
    assert "names no eagle_aux_hidden_state_layer_ids: vLLM assumes [2, 5, 7]" in caplog.text


def test_shallow_policy_needs_draft_that_names_its_layers(
    tmp_path: Path, policy_dir: Path, reduced: Path
) -> None:
    """It needs a draft that names its layers, and takes one that does."""
    shallow = tmp_path / "shallow"
    shutil.copytree(policy_dir, shallow)
    edit_config(shallow, num_hidden_layers=3)
    edit_config(reduced, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    SERVED["eagle3"].check(shallow, reduced)
    nest_layers(reduced, [1, 2, 3])
    with pytest.raises(RefusedError, match=r"eagle_config.eagle_aux_hidden_state_layer_ids"):
        SERVED["eagle3"].check(shallow, reduced)
    edit_config(reduced, eagle_config=None)
    with pytest.raises(RefusedError, match="at least 8 for the default auxiliary layers"):
        SERVED["eagle3"].check(shallow, reduced)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda d: shutil.rmtree(d), "nothing there"),
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
        (lambda d: (d / "config.json").write_text("{"), "JSON"),
        (lambda d: (d / "model.safetensors").write_bytes(b"nonsense"), "safetensors"),
        (
            lambda d: edit_config(d, target_hidden_size=None, hidden_size=128),
            "hidden_size: found 128, expected 192",
        ),
        (lambda d: edit_config(d, eagle_aux_hidden_state_layer_ids=[2, 5, 11]), "10 layers"),
        (lambda d: edit_config(d, eagle_aux_hidden_state_layer_ids=[5, 2, 7]), "ascending"),
        (lambda d: edit_config(d, eagle_aux_hidden_state_layer_ids=[2, 5]), "fc.weight"),
        (lambda d: nest_layers(d, [1, 4, 6]), "eagle_config.eagle_aux_hidden_state_layer_ids"),
        (lambda d: edit_config(d, vocab_size=127), "vocab_size: found 127, expected 128"),
        (lambda d: edit_config(d, draft_vocab_size=95), "lm_head.weight"),
        (lambda d: edit_tensors(d, lambda t: t.pop("lm_head.weight")), "lm_head.weight: found abs"),
        (lambda d: edit_tensors(d, lambda t: t.pop("d2t")), "d2t: found nothing"),
        (
            lambda d: edit_tensors(d, lambda t: t.update({"model.fc.weight": t.pop("fc.weight")})),
            "found model.fc.weight, expected fc.weight, as vLLM has it. Next step: serve release 0",
        ),
        (lambda d: edit_tensors(d, lambda t: t["d2t"].add_(40)), "target ids"),
        (lambda d: edit_tensors(d, lambda t: t["t2d"].logical_not_()), "t2d"),
    ],
)
def test_eagle3_check_refuses_unfit_draft(
    reduced: Path, policy_dir: Path, spoil: Callable[[Path], object], text: str
) -> None:
    spoil(reduced)
    with pytest.raises(RefusedError) as refusal:
        SERVED["eagle3"].check(policy_dir, reduced)
    assert text in str(refusal.value)
    assert refusal.value.next_step


def test_eagle3_check_refuses_policy_as_draft(policy_dir: Path) -> None:
    with pytest.raises(RefusedError, match=r"language model \(10 layers.*draft-trainer init"):
        SERVED["eagle3"].check(policy_dir, policy_dir)


def test_control_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RefusedError, match=f"--control-port: found 127.0.0.1:{port}"):
            check_port_free("--control-port", "127.0.0.1", port)
    check_port_free("--control-port", "127.0.0.1", 0)


@pytest.mark.parametrize("port", [-1, 65536])
def test_control_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(RefusedError, match=f"--control-port: found {port}, expected 0 to 65535"):
        check_port_free("--control-port", "127.0.0.1", port)


def test_environment_at_path_with_space_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request for log-probs would end the engine; a link without a space will do."""
    check_paths()
    packages = tmp_path / "a b"
    (packages / "torch").mkdir(parents=True)
    (packages / "torch" / "__init__.py").touch()
    (tmp_path / "link").symlink_to(packages)
    monkeypatch.delitem(sys.modules, "torch")
    for path, refused in ((packages, True), (tmp_path / "link", False)):
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(path))
            if refused:
                with pytest.raises(RefusedError, match=r"path of torch: found .*a b/torch"):
                    check_paths()
            else:
                check_paths()
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR"):
        with monkeypatch.context() as patch:
            patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
            patch.setenv(variable, str(packages))
            patch.setattr(tempfile, "tempdir", None)
            with pytest.raises(RefusedError, match=f"{variable}: found .*a b"):
                check_paths()


@pytest.mark.parametrize("name", ["PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"])
def test_prometheus_multiproc_dir_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's ``/metrics`` would be without ours."""
    monkeypatch.delenv(name, raising=False)
    check_metrics()
    monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(RefusedError, match=f"{name}: found .*expected not set"):
        check_metrics()


def test_refused_command_line_exits_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(arguments: list[str]) -> int:
        raise RefusedError("MODEL", arguments[0], "a checkpoint", "name it after serve")

    monkeypatch.setattr(launch, "serve", refuse)
    monkeypatch.setattr(cli, "mark_process", lambda: None)
    assert cli.main(["serve", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("rollout-server: MODEL: found nothing")


def test_plugin_without_mark_imports_nothing() -> None:
    """The plugin must not even import torch in a user's own vLLM of the same environment."""
    code = (
        "import sys; from rollout_server.vllm import plugins; plugins.register_general();"
        "assert plugins.make_endpoint_plugin().required_tasks == ();"
        "assert not {'torch', 'vllm', 'grpc'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def quantized(policy_dir: Path, folder: Path, kind: str) -> Path:
    """The tiny policy as FP8, AWQ and nested checkpoints store theirs; for headers only."""
    shutil.copytree(policy_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    name = "model.layers.0.self_attn.q_proj.weight"

    def convert(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors.pop(name)
        if kind in ("fp8", "scales"):
            tensors[name] = weight.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(2, 2)
        if kind == "scales":
            tensors[f"{name}_scale_inv"] = torch.ones(2, 2).to(torch.float8_e8m0fnu)
        if kind == "awq":
            stem = name.removesuffix("weight")
            tensors[f"{stem}qweight"] = torch.zeros(8, 8, dtype=torch.int32)
            tensors[f"{stem}packed"] = torch.zeros(8, dtype=torch.uint8)
        if kind == "packed":
            tensors[f"{name}_packed"] = torch.zeros(8, 8, dtype=torch.int32)
        if kind in ("nested", "int8"):
            tensors[name] = weight if kind == "nested" else weight.to(torch.int8)

    edit_tensors(folder, convert)
    method = {"fp8": "fp8", "awq": "awq"}.get(kind)
    outer: dict[str, object] = {"architectures": ["Gemma3ForConditionalGeneration"]}
    (folder / "config.json").write_text(
        json.dumps({**outer, "text_config": config})
        if kind in ("nested", "scales")
        else json.dumps({**config, "quantization_config": {"quant_method": method}})
        if method
        else json.dumps(config)
    )
    return folder


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("fp8", "quantization_config (fp8)"),
        ("awq", "quantization_config (awq)"),
        ("int8", "model.layers.0.self_attn.q_proj.weight is I8"),
        ("scales", "is F8_E"),
        ("packed", "self_attn.q_proj.weight_packed is a part of a quantized weight"),
        ("nested", ""),
    ],
)
async def test_quantized_policy_takes_drafts_only(
    kind: str, found: str, tmp_path: Path, policy_dir: Path, reduced: Path
) -> None:
    model = quantized(policy_dir, tmp_path / kind, kind)
    SERVED["eagle3"].check(model, reduced)

    control, service = await plane(Settings(model, reduced, open_to_all()))
    draft = [spec_of(name, tensor) for name, tensor in load(reduced).items()]
    service._expected["draft"].check(draft)
    policy = [spec_of(name, tensor) for name, tensor in load(policy_dir).items()]
    if not found:
        service._expected["policy"].check(policy)
        return
    with pytest.raises(RefusedError, match=r"quantized.*drafts only") as refused:
        service._expected["policy"].check(policy)
    assert found in str(refused.value)
    assert control.state().draft_version == 0


def test_quantized_draft_and_policy_without_sizes_are_refused(
    tmp_path: Path, policy_dir: Path, reduced: Path
) -> None:
    edit_tensors(reduced, lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}))
    with pytest.raises(RefusedError, match=r"fc.weight is I8.*bfloat16"):
        SERVED["eagle3"].check(policy_dir, reduced)
    model = tmp_path / "vision"
    shutil.copytree(policy_dir, model)
    edit_config(model, num_hidden_layers=None, text_config={"hidden_size": 192})
    with pytest.raises(RefusedError, match=r"num_hidden_layers: found absent.*text_config"):
        SERVED["eagle3"].check(model, reduced)
