"""vLLM's own drafts and policies outside an engine, and what swaps of every draft must do."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from rollout_server.control.changes import Change, Result
from rollout_server.control.stages import Key, StagedTensor, WeightSource
from rollout_server.vllm.reload import LiveModel, apply_all, load
from rollout_server.vllm.served.derived import derived
from rollout_server.vllm.standby import DIFFERS, READY, SAME, WORKING, ReadBack, Standby
from tests.policy_bridge.families import make


class Drafts:
    """vLLM's draft of the first release, loaded outside an engine, and releases for it."""

    def __init__(self, policy_dir: Path, releases: list[Path], method: str = "eagle3") -> None:
        from vllm.config import VllmConfig
        from vllm.engine.arg_utils import EngineArgs

        arguments = EngineArgs(
            model=str(policy_dir),
            dtype="bfloat16",
            max_model_len=256,
            enforce_eager=True,
            skip_tokenizer_init=True,
            speculative_config={
                "method": method,
                "model": str(releases[0]),
                "num_speculative_tokens": 3,
            },
        )
        # vLLM refuses DSpark where Model Runner V2 is not; its module runs everywhere.
        with patch.object(VllmConfig, "_validate_v1_model_runner"):
            self.config: Any = arguments.create_engine_config()
        self.model_config = self.config.speculative_config.draft_model_config
        self.sources = [WeightSource(str(path)) for path in releases]
        self.draft = load_model(self.config, self.model_config, self.sources[0])
        self.policy = nn.Module()
        # As a draft without embed_tokens gets it: the verifier's own module.
        self.policy.embed_tokens = self.draft.model.embed_tokens  # type: ignore[union-attr]

    def current(self) -> Any:
        """vLLM's configuration of the moment, as a worker call has it."""
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.config)

    def standby(self) -> Standby:
        """New copies, of none yet; the live draft counts as committed."""
        self.read_back = ReadBack(lambda: self.policy, lambda: self.draft)
        return Standby(lambda: self.policy, lambda: self.draft, self.read_back)

    def reload(self, release: int) -> None:
        """vLLM's own way."""
        with self.current():
            load(self.draft, self.model_config, self.sources[release].weights())

    def commit(self, new: WeightSource, old: WeightSource, standby: Standby) -> Result:
        """Commit as a worker does."""
        live = LiveModel(self.draft, self.model_config, standby)
        with self.current():
            return apply_all([(Change("draft", new, old), live)])

    def outputs(self) -> dict[str, torch.Tensor]:
        """Every parameter that packing leaves, what is derived, and what packed matrices give."""
        found = {
            name: tensor.detach().clone()
            for name, tensor in (*self.draft.named_parameters(), *derived(self.draft))
            if tensor.numel() and "embed_tokens" not in name
        }
        generator = torch.Generator().manual_seed(0)
        for name, module in self.draft.named_modules():
            if "cpu_linear" in module.__dict__ and "embed_tokens" not in name:
                sizes = (getattr(module, name, None) for name in ("input_size", "embedding_dim"))
                width = next(filter(None, sizes), self.model_config.get_hidden_size())
                # A router's is in float32.
                dtype = getattr(module, "params_dtype", torch.bfloat16)
                x = torch.randn(3, width, generator=generator).to(dtype)
                found[f"{name}(x)"] = module.cpu_linear(x, module.weight, None)  # type: ignore[operator]
        return found


class Policy:
    """vLLM's model of a family outside an engine, with the first of two checkpoints."""

    def __init__(self, family: str, folder: Path) -> None:
        model = make(family, torch.bfloat16)
        self.latent = hasattr(model.config, "kv_lora_rank")
        for seed in range(2):
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.add_(0.1 * torch.randn(tensor.shape))
            model.save_pretrained(folder / str(seed))
        self.sources = [WeightSource(str(folder / str(seed))) for seed in range(2)]
        self.config, self.model = self.load(0)
        self.model_config = self.config.model_config

    current = Drafts.current

    def load(self, checkpoint: int) -> tuple[Any, Any]:
        """vLLM's configuration and its model of a checkpoint."""
        from vllm.engine.arg_utils import EngineArgs

        config: Any = EngineArgs(
            model=self.sources[checkpoint].directory,
            dtype="bfloat16",
            max_model_len=32,
            enforce_eager=True,
            skip_tokenizer_init=True,
            # On a processor with AMX vLLM takes a backend for latents that no tiny model's fit.
            attention_backend="CPU_MLA" if self.latent else None,
        ).create_engine_config()
        return config, load_model(config, config.model_config, self.sources[checkpoint])


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, and what every packed matrix gives."""
    found = {n: p.detach().clone() for n, p in model.named_parameters() if p.numel()}
    for name, module in model.named_modules():
        width = getattr(module, "input_size", None)
        if "cpu_linear" in module.__dict__ and width:
            x = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
            # A router's is in float32.
            x = x.to(getattr(module, "params_dtype", torch.bfloat16))
            found[f"{name}(x)"] = module.cpu_linear(x, module.weight, None)  # type: ignore[operator]
    return found


def load_model(config: Any, model_config: Any, source: WeightSource) -> Any:
    """vLLM's module with these weights in bfloat16, in this process as the only rank."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    device = torch.device("cpu")
    with set_current_vllm_config(config), device, set_default_torch_dtype(torch.bfloat16):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        model = initialize_model(config, model_config=model_config)
        model.load_weights(source.weights())
        process_weights_after_loading(model, model_config, device)
    return model


def prepared(standby: Standby, source: WeightSource, keep: WeightSource | None = None) -> str:
    """Prepare and wait for the thread: ``READY``, or why not."""
    while (state := standby.prepare(source, keep)) == WORKING:
        join()
    return state


def ready(standby: Standby, source: WeightSource, keep: WeightSource | None = None) -> None:
    """Prepare these weights; they are ready."""
    state = prepared(standby, source, keep)
    assert state == READY, state


def join() -> None:
    """Wait for the threads that prepare."""
    for thread in threading.enumerate():
        if thread.name == "slipstream-prepare":
            thread.join(60)


def torn_weights(drafts: Drafts) -> WeightSource:
    """One of whose tensors is gone."""
    name, tensor = next(iter(drafts.sources[0].weights()))
    gone = drafts.sources[0].directory + "/gone"
    key = Key("0" * 64, "float32", 4 * tensor.numel())
    return WeightSource(tensors=(StagedTensor(name, key, tuple(tensor.shape), gone),))


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not bitwise equal."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def check_swaps(
    drafts: Drafts, expected: list[dict[str, torch.Tensor]], damaged: torch.Tensor
) -> None:
    """Every way to a release gives the draft that vLLM's own load of it gives.

    Args:
        drafts: the first of three releases is live, also at the end.
        expected: ``outputs`` of a load of each.
        damaged: a tensor of the live draft.
    """
    standby = drafts.standby()
    zero, one, two = drafts.sources
    objects = {name: id(parameter) for name, parameter in drafts.draft.named_parameters()}

    def check(release: int) -> None:
        assert not different(drafts.outputs(), expected[release])
        assert drafts.read_back.check() == SAME, "hashes taken before are those of what arrived"

    check(0)
    ready(standby, one)
    check(0)
    assert standby.swap(one, zero)
    check(1)
    join()
    assert standby.swap(zero, one), "what was live is ready again"
    check(0)
    standby.drop()
    result = drafts.commit(two, zero, standby)
    assert (result.error, result.restored) == ("", True), "without a copy"
    check(2)
    with torch.no_grad():
        damaged.view(-1)[0] += 1.0
    assert drafts.read_back.check() == DIFFERS
    ready(standby, zero)
    assert standby.swap(zero, two)
    check(0)
    assert {name: id(p) for name, p in drafts.draft.named_parameters()} == objects


def check_failed_commits(drafts: Drafts) -> None:
    """The draft stays where its weights are gone, and where the policy fails after its swap."""
    before, standby, gone = drafts.outputs(), drafts.standby(), torn_weights(drafts)
    zero, one, _ = drafts.sources
    result = drafts.commit(gone, zero, standby)
    assert "No such file" in result.error and result.restored
    assert not different(drafts.outputs(), before) and drafts.read_back.check() == SAME
    ready(standby, one)
    policy = nn.Module()
    policy.load_weights = lambda weights: [name for name, _ in weights]  # type: ignore[assignment]
    changes = [
        (Change("draft", one, zero), LiveModel(drafts.draft, drafts.model_config, standby)),
        (Change("policy", gone, zero), LiveModel(policy, drafts.model_config)),
    ]
    with drafts.current():
        result = apply_all(changes)
    assert result.error.startswith("policy: ") and result.restored
    assert not different(drafts.outputs(), before) and drafts.read_back.check() == SAME
