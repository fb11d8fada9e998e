"""The places in other frameworks that the recipes name and import, where installed.

A framework is read, not imported: most need a GPU's libraries for that. What moved in a new version
fails here by name. Packages for one run: ``pip install --no-deps --target DIR verl openrlhf
megatron-core``, SkyRL's with ``--python-version 3.12 --only-binary :all:``, and ``PYTHONPATH=DIR``;
prime-rl and NeMo RL are on no index: the ``src`` folder of the one's repository, the other's own.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.docs.test_snippet_imports import FRAMEWORKS, SNIPPETS

VERL_WORKER = "verl/workers/engine_workers.py"
VERL_ENGINE = "verl/workers/engine/fsdp/transformer_impl.py"
VERL_ROLLOUTS = "verl/trainer/ppo/v1/agent_loop_tq.py"
SKYRL_WORKER = "skyrl/backends/skyrl_train/workers/worker.py"
SKYRL_FSDP = "skyrl/backends/skyrl_train/workers/fsdp/fsdp_worker.py"
OPENRLHF_ACTOR = "openrlhf/trainer/ray/ppo_actor.py"
PRIME_LOOP = "prime_rl/trainer/rl/train.py"
PRIME_FILES = "prime_rl/transports/weights/filesystem.py"
NEMO_WORKERS = "nemo_rl/models/policy/workers"
NEMO_MEGATRON = f"{NEMO_WORKERS}/megatron_policy_worker.py"
TRL_ASYNC = "trl/experimental/async_grpo/async_grpo_trainer.py"

Hook = tuple[str, str, tuple[str, ...]]
HOOKS: Sequence[Hook] = (
    (VERL_WORKER, "ActorRolloutRefWorker.init_model", ()),
    ("verl/trainer/ppo/v1/trainer_base.py", "PPOTrainer.get_llm_client", ()),
    ("verl/workers/rollout/llm_server.py", "LLMServerClient.generate",
     ("request_id", "prompt_ids", "sampling_params", "image_data", "video_data", "audio_data")),
    (VERL_WORKER, "ActorRolloutRefWorker.compute_log_prob", ("data",)),
    (VERL_WORKER, "ActorRolloutRefWorker.compute_ref_log_prob", ("data",)),
    (VERL_WORKER, "ActorRolloutRefWorker.update_actor", ("data",)),
    (VERL_WORKER, "ActorRolloutRefWorker.update_weights", ("global_steps", "mode")),
    (VERL_ENGINE, "FSDPEngineWithLMHead.forward_step",
     ("micro_batch", "loss_function", "forward_only")),
    (VERL_ENGINE, "FSDPEngine.get_per_tensor_param", ()),
    ("verl/checkpoint_engine/base.py", "CheckpointEngineRegistry.register", ("backend",)),
    (SKYRL_WORKER, "PolicyWorkerBase.forward_backward", ("data", "loss_fn", "loss_fn_config")),
    (SKYRL_WORKER, "PolicyWorkerBase._forward_backward_micro",
     ("experience", "microbatch_weight", "loss_fn", "loss_fn_config")),
    (SKYRL_FSDP, "FSDPPolicyWorkerBase.broadcast_to_inference_engines",
     ("inference_engine_client", "inference_engine_cfg", "model_id")),
    (SKYRL_FSDP, "FSDPPolicyWorkerBase.init_weight_sync_state",
     ("inference_engine_client", "inference_engine_cfg")),
    (SKYRL_FSDP, "FSDPPolicyWorkerBase._build_weight_source", ("dtype", "backend")),
    ("skyrl/backends/skyrl_train/weight_sync/sources.py", "FsdpWeightSource.__iter__", ()),
    ("skyrl/train/entrypoints/main_base.py", "BasePPOExp._setup_trainer", ()),
    (OPENRLHF_ACTOR, "PolicyModelActor.init_model_from_pretrained",
     ("strategy", "pretrain", "max_steps", "vllm_engines")),
    ("openrlhf/trainer/ray/vllm_engine.py", "RolloutRayActor.generate",
     ("prompt_token_ids", "sampling_params", "multi_modal_data")),
    ("openrlhf/trainer/ray/vllm_engine.py", "create_vllm_engines",
     ("agent_func_path", "remote_rm_url")),
    (OPENRLHF_ACTOR, "PolicyModelActor.forward", ("sequences", "action_mask", "attention_mask")),
    (OPENRLHF_ACTOR, "PolicyModelActor.broadcast_to_vllm", ()),
    (OPENRLHF_ACTOR, "ActorPPOTrainer.broadcast_to_vllm", ()),
    ("openrlhf/models/actor.py", "Actor.forward", ()),
    (PRIME_LOOP, "train", ("config",)),
    (PRIME_LOOP, "main", ()),
    ("prime_rl/trainer/model.py", "forward",
     ("model", "input_ids", "position_ids", "labels", "temperature")),
    ("prime_rl/trainer/rl/data.py", "DataLoader.get_batch", ()),
    ("prime_rl/transports/weights/__init__.py", "setup_weight_broadcast",
     ("output_dir", "config", "parallel_dims", "lora_config")),
    (PRIME_FILES, "FileSystemWeightBroadcast.__init__", ("output_dir", "config")),
    (PRIME_FILES, "FileSystemWeightBroadcast.broadcast_weights", ("model", "step")),
    (PRIME_FILES, "FileSystemWeightBroadcast._notify_orchestrator", ("save_dir",)),
    ("prime_rl/utils/weights.py", "convert_state_dict_to_hf", ("model", "state_dict")),
    ("prime_rl/utils/weights.py", "resolve_fqn", ("model", "key")),
    ("prime_rl/utils/client.py", "update_weights", ("admin_clients", "weight_dir")),
    (NEMO_MEGATRON, "MegatronPolicyWorkerImpl.get_logprobs",
     ("data", "micro_batch_size", "require_router_replay")),
    (NEMO_MEGATRON, "MegatronPolicyWorkerImpl.get_reference_policy_logprobs", ()),
    (NEMO_MEGATRON, "MegatronPolicyWorkerImpl._iter_params_with_optional_kv_scales", ()),
    (f"{NEMO_WORKERS}/dtensor_policy_worker_v2.py", "DTensorPolicyWorkerV2Impl.get_logprobs",
     ("data", "micro_batch_size")),
    (f"{NEMO_WORKERS}/dtensor_policy_worker_v2.py", "dtensor_params_generator", ()),
    ("nemo_rl/models/megatron/data.py", "get_microbatch_iterator", ()),
    ("trl/trainer/grpo_trainer.py", "GRPOTrainer._generate", ()),
    ("trl/trainer/grpo_trainer.py", "GRPOTrainer._get_per_token_logps_and_entropies", ()),
    (TRL_ASYNC, "AsyncGRPOTrainer.__init__", ("rollout_worker", "weight_transfer")),
    (TRL_ASYNC, "AsyncGRPOTrainer.compute_loss", ("model", "inputs")),
    (TRL_ASYNC, "AsyncGRPOTrainer._sync_weight", ()),
    (TRL_ASYNC, "AsyncGRPOTrainer.training_step", ("model", "inputs")),
    (TRL_ASYNC, "WeightTransferProtocol.send_weights", ("iterator",)),
    (TRL_ASYNC, "WeightTransferProtocol.init_weight_transfer", ()),
    (TRL_ASYNC, "RolloutWorkerProtocol.update_model_version", ("model_version",)),
)  # fmt: skip
# Inside these, because a recipe replaces them or calls them from there.
TEXTS: Sequence[tuple[str, str]] = (
    (VERL_WORKER, "self.actor.infer_batch(data)"),
    (VERL_WORKER, "self.actor.train_mini_batch(data=data)"),
    (VERL_ROLLOUTS, 'field["extra_fields"].get("min_global_steps")'),
    (SKYRL_FSDP, "PolicyWorker = ray.remote(num_gpus=1)(FSDPPolicyWorkerBase)"),
    (PRIME_LOOP, "weight_broadcast = setup_weight_broadcast("),
    (PRIME_LOOP, "dataloader = DataLoader("),
    (PRIME_LOOP, "out = forward("),
    (PRIME_FILES, "self.world = get_world()"),
    (TRL_ASYNC, "fused_lm_head=True"),
)


def folder_of(package: str) -> Path:
    """Return the folder of a package's files; skip the test if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]).parent


def parameters_of(source: str, name: str) -> list[str] | None:
    """Return the parameters of a "function" or a "Class.method"; None where it is not there."""
    owner, _, wanted = name.rpartition(".")
    body = ast.parse(source).body
    if owner:
        classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == owner]
        body = [part for node in classes for part in node.body]
    for part in body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name == wanted:
            found = (*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs)
            return [parameter.arg for parameter in found]
    return None


@pytest.mark.parametrize(("file", "name", "parameters"), HOOKS, ids=lambda value: str(value)[:60])
def test_recipe_hook_exists_in_framework(file: str, name: str, parameters: tuple[str, ...]) -> None:
    path = folder_of(file.partition("/")[0]) / file
    assert path.is_file(), f"{file} moved"
    found = parameters_of(path.read_text(encoding="utf-8"), name)
    assert found is not None, f"{file}: no {name}"
    assert set(parameters) <= set(found), f"{file}: {name}({', '.join(found)})"


@pytest.mark.parametrize(("file", "text"), TEXTS)
def test_recipe_replaced_call_exists_in_framework(file: str, text: str) -> None:
    path = folder_of(file.partition("/")[0]) / file
    assert text in path.read_text(encoding="utf-8"), f"{file}: no {text}"


def imports() -> Iterator[tuple[str, str]]:
    """Module and name of each thing that a recipe imports from a framework."""
    for snippet in SNIPPETS.values():
        for node in ast.walk(ast.parse(snippet)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module is not None and module.partition(".")[0] in FRAMEWORKS:
                yield from ((module, alias.name) for alias in node.names)


def names_of(path: Path) -> set[str]:
    """Return the names at the top of a source file: made there, or imported."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


@pytest.mark.parametrize(("module", "name"), sorted({*imports()}))
def test_recipe_import_exists_in_framework(module: str, name: str) -> None:
    path = folder_of(module.partition(".")[0]) / module.replace(".", "/")
    inside = (path / f"{name}.py", path / name / "__init__.py")
    files = [each for each in (path / "__init__.py", path.with_suffix(".py")) if each.is_file()]
    assert files, f"{module} moved"
    assert any(map(Path.is_file, inside)) or name in names_of(files[0]), f"{module}: no {name}"
