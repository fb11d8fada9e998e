"""A standby copy is, once swapped in, the draft that vLLM's own reload would have made."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rollout_server.reload import Change, LiveModel, apply_all, load
from rollout_server.standby import ASLEEP, DIFFERS, READY, SAME, WORKING, ReadBack, Standby
from rollout_server.store import Key, StagedTensor, WeightSource
from rollout_server.swap import NotSwappableError, StandbyCopy, pairs_of, swap_contents
from rollout_server.worker import WorkerHooks, slipstream_read_back, watch_sleep


class Drafts:
    """vLLM's draft of the first release, loaded outside an engine, and releases for it."""

    def __init__(self, policy_dir: Path, releases: list[Path], method: str = "eagle3") -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import (
            initialize_model,
            process_weights_after_loading,
        )
        from vllm.utils.torch_utils import set_default_torch_dtype

        self.config: Any = EngineArgs(
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
        ).create_engine_config()
        self.model_config = self.config.speculative_config.draft_model_config
        self.sources = [WeightSource(str(path)) for path in releases]
        with self.current(), torch.device("cpu"), set_default_torch_dtype(torch.bfloat16):
            _one_process()
            self.draft: nn.Module = initialize_model(self.config, model_config=self.model_config)
            self.draft.load_weights(self.sources[0].weights())  # type: ignore[operator]
            process_weights_after_loading(self.draft, self.model_config, torch.device("cpu"))
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

    def outputs(self) -> dict[str, torch.Tensor]:
        """Every parameter that is left after packing, and what every packed matrix gives."""
        found = {
            name: parameter.detach().clone()
            for name, parameter in self.draft.named_parameters()
            if parameter.numel() and "embed_tokens" not in name
        }
        generator = torch.Generator().manual_seed(0)
        for name, module in self.draft.named_modules():
            if "cpu_linear" in module.__dict__ and "embed_tokens" not in name:
                width = getattr(module, "input_size", None) or self.model_config.get_hidden_size()
                # A router's is in float32.
                dtype = getattr(module, "params_dtype", torch.bfloat16)
                x = torch.randn(3, width, generator=generator).to(dtype)
                found[f"{name}(x)"] = module.cpu_linear(x, module.weight, None)  # type: ignore[operator]
        return found


def _one_process() -> None:
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)


def ready(standby: Standby, source: WeightSource, keep: WeightSource | None = None) -> None:
    """Prepare and wait for the thread."""
    while (state := standby.prepare(source, keep)) == WORKING:
        join()
    assert state == READY, state


def join() -> None:
    """Wait for the threads that prepare."""
    for thread in threading.enumerate():
        if thread.name == "slipstream-prepare":
            thread.join(60)


def torn_weights(drafts: Drafts) -> WeightSource:
    """One of whose tensors is gone."""
    [fc] = [t for n, t in drafts.sources[0].weights() if n == "fc.weight"]
    gone = drafts.sources[0].directory + "/gone"
    key = Key("0" * 64, "float32", 4 * fc.numel())
    return WeightSource(tensors=(StagedTensor("fc.weight", key, tuple(fc.shape), gone),))


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not bitwise equal."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def test_contents_are_swapped_both_ways() -> None:
    """On both sides of the size up to which contents are copied, and for views of others."""
    for size in (1, 1 << 12, 1 << 15):
        base = torch.arange(2.0 * size)
        live, standby = base[::2], torch.full((2 * size,), -1.0)[::2]
        expected = live.clone()
        swap_contents([(live, standby)])
        assert torch.equal(live, torch.full((size,), -1.0)) and torch.equal(standby, expected)


def test_swap_equals_reload(drafts: Drafts) -> None:
    expected = []
    for release in range(3):
        drafts.reload(release)
        expected.append(drafts.outputs())
    assert len(different(expected[0], expected[1])) >= 6
    drafts.reload(0)
    objects = {name: id(parameter) for name, parameter in drafts.draft.named_parameters()}
    standby = drafts.standby()
    zero, one, two = drafts.sources
    ready(standby, one)
    assert not different(drafts.outputs(), expected[0]), "preparing changes nothing"
    assert standby.swap(one, zero)
    assert not different(drafts.outputs(), expected[1])
    assert drafts.read_back.check() == SAME, "the hashes taken before are those of what arrived"
    ready(standby, zero)
    # What was live is ready, whatever is prepared meanwhile.
    ready(standby, two, keep=zero)
    assert standby.swap(zero, one)
    assert not different(drafts.outputs(), expected[0])
    assert drafts.read_back.check() == SAME
    ready(standby, one)
    ready(standby, two, keep=one)
    assert standby.swap(two, zero)
    assert not different(drafts.outputs(), expected[2])
    assert {name: id(p) for name, p in drafts.draft.named_parameters()} == objects
    # Swap and reload can follow one another.
    drafts.reload(1)
    standby.drop()
    drafts.read_back.record()
    ready(standby, zero)
    assert standby.swap(zero, one) and not different(drafts.outputs(), expected[0])


def test_replaced_draft_is_ready_to_swap_back(drafts: Drafts) -> None:
    """Small tensors are copied, large ones exchange their memory; both go both ways."""
    drafts.reload(0)
    standby = drafts.standby()
    zero, one, _ = drafts.sources
    ready(standby, one)
    with torch.no_grad():
        # A release's own norms: those of the test's checkpoints are all ones.
        for name, parameter in drafts.draft.named_parameters():
            if parameter.ndim == 1 and parameter.numel():
                parameter.fill_(1.0 + len(name) / 64)
    drafts.read_back.record()
    before = drafts.outputs()
    assert standby.swap(one, zero)
    join()
    assert standby.prepare(zero, None) == READY, "what was live was read, not loaded"
    assert standby.swap(zero, one)
    assert not different(drafts.outputs(), before)


def test_standby_keeps_at_most_two_copies(drafts: Drafts) -> None:
    standby = drafts.standby()
    zero, one, two = drafts.sources
    for source in (one, two, zero):
        ready(standby, source, keep=one)
    assert [standby.swap(two, zero), standby.swap(one, zero)] == [False, True]
    assert not standby.swap(two, one)
    ready(standby, zero)
    assert standby.swap(zero, one)
    # The same once more repairs the memory: what it replaces is not kept.
    ready(standby, zero)
    standby.drop()
    ready(standby, zero)
    assert standby.swap(zero, zero) and not standby.swap(zero, zero)


def test_dropped_standby_copy_frees_memory_at_once(
    drafts: Drafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM freezes Python's collector: what waits for it stays on the device."""
    held: list[list[weakref.ref[torch.Tensor]]] = []
    original = StandbyCopy.load

    def load(copy: StandbyCopy, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        try:
            original(copy, weights)
        finally:
            own = [p for _, module in copy.modules for p in module._parameters.values()]
            held.append([weakref.ref(p) for p in own if p is not None])

    def alive() -> list[bool]:
        return [any(tensor() is not None for tensor in copy) for copy in held]

    monkeypatch.setattr(StandbyCopy, "load", load)
    drafts.reload(0)
    standby = drafts.standby()
    zero, one, two = drafts.sources
    gc.disable()
    try:
        for new, old in ((one, zero), (two, one), (zero, two)):
            ready(standby, new, keep=old)
            assert standby.swap(new, old)
            join()
        assert alive() == [False, False, True], "only what was live last is kept"
        while standby.prepare(torn_weights(drafts), two) == WORKING:
            join()
        assert alive() == [False, False, True, True]
        standby.drop()
        assert alive() == [False] * 4
    finally:
        gc.enable()


def test_overwritten_draft_is_not_swapped_back(drafts: Drafts) -> None:
    drafts.reload(1)
    first = drafts.outputs()
    standby = drafts.standby()
    zero, one, _ = drafts.sources
    ready(standby, zero)
    drafts.reload(2)  # as a framework does that updates the draft by itself
    assert drafts.read_back.check() == DIFFERS
    assert standby.swap(zero, one) and drafts.read_back.check() == SAME
    ready(standby, one)
    assert standby.swap(one, zero)
    assert not different(drafts.outputs(), first)


def test_commit_heals_lost_draft_vocabulary(drafts: Drafts) -> None:
    drafts.reload(0)
    before, zero = drafts.outputs(), drafts.sources[0]
    d2t = drafts.draft.draft_id_to_target_id
    assert bool((d2t > 0).any())  # type: ignore[operator]
    standby = drafts.standby()
    with torch.no_grad():
        d2t.zero_()  # type: ignore[operator,union-attr]
        drafts.draft.model.norm.weight.zero_()  # type: ignore[union-attr,operator]
    drafts.read_back.lost = True
    ready(standby, zero)
    live = LiveModel(drafts.draft, drafts.model_config, standby)
    with drafts.current():
        assert apply_all([(Change("draft", zero, zero), live)]).error == ""
    assert not different(drafts.outputs(), before) and drafts.read_back.check() == SAME


def test_failed_commit_of_both_reverts_draft(drafts: Drafts) -> None:
    drafts.reload(0)
    before = drafts.outputs()
    standby = drafts.standby()
    zero, one, _ = drafts.sources
    ready(standby, one)
    swapped = LiveModel(drafts.draft, drafts.model_config, standby)
    reloaded = LiveModel(drafts.draft, drafts.model_config)
    changes = [
        (Change("draft", one, zero), swapped),
        (Change("policy", torn_weights(drafts), zero), reloaded),
    ]
    with drafts.current():
        result = apply_all(changes)
    assert result.error.startswith("policy: ") and result.restored
    assert not different(drafts.outputs(), before) and drafts.read_back.check() == SAME


@pytest.mark.parametrize("end", [OSError, IndexError])
def test_interrupted_reload_restores_old_weights(
    drafts: Drafts, monkeypatch: pytest.MonkeyPatch, end: type[Exception]
) -> None:
    drafts.reload(0)
    before = drafts.outputs()
    load_weights, calls = drafts.draft.load_weights, []

    def torn(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        calls.append(list(weights))
        if len(calls) == 1:
            # Part of a fused matrix: what of it was loaded must not count for the old one.
            load_weights([(n, t) for n, t in calls[0] if "v_proj" not in n])  # type: ignore[operator]
            raise end("the rest is gone")
        load_weights(calls[-1])  # type: ignore[operator]

    monkeypatch.setattr(drafts.draft, "load_weights", torn)
    zero, one, _ = drafts.sources
    with drafts.current():
        live = LiveModel(drafts.draft, drafts.model_config)
        result = apply_all([(Change("draft", one, zero), live)])
    assert "the rest is gone" in result.error and result.restored and len(calls) == 2
    assert not any(parameter.is_meta for parameter in drafts.draft.parameters())
    assert not different(drafts.outputs(), before)


def test_failed_external_policy_is_not_received_again() -> None:
    """Nobody sends the old one, and an update may read the same at every step."""
    external, received = WeightSource(transfer="{}"), []

    def receive(transfer: str) -> None:
        received.append(transfer)
        if len(received) == 1:
            raise OSError("the sender is gone")

    policy = nn.Linear(2, 2)
    policy.load_weights = list  # type: ignore[assignment]
    live = LiveModel(policy, None, receive=receive)  # type: ignore[arg-type]
    result = apply_all([(Change("policy", external, external), live)])
    assert len(received) == 1 and not result.restored
    assert "the sender is gone" in result.error and "none are held here" in result.error


def test_prepare_says_why_it_failed(drafts: Drafts, tmp_path: Path) -> None:
    standby = drafts.standby()
    (tmp_path / "empty").mkdir()
    save_file({}, tmp_path / "empty" / "model.safetensors")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "training_args.bin").touch()
    for source, why in (
        (torn_weights(drafts), "No such file"),
        (WeightSource(str(tmp_path / "none")), "no such folder"),
        (WeightSource(str(tmp_path / "empty")), "no tensor"),
        (WeightSource(str(tmp_path / "pickled")), "a pickle"),
    ):
        while (state := standby.prepare(source, None)) == WORKING:
            join()
        assert why in state and not standby.swap(source, drafts.sources[0])
    with pytest.raises(NotSwappableError, match="verifier's memory"):
        other = nn.Module()
        other.lm_head = nn.Module()
        other.lm_head.weight = drafts.draft.lm_head.weight  # type: ignore[union-attr]
        StandbyCopy(other, drafts.draft)


def test_swap_refuses_modules_that_do_not_correspond() -> None:
    live, copy = nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False)
    with pytest.raises(NotSwappableError, match="shape"):
        pairs_of([(live, copy)])
    copy = nn.Linear(4, 4, bias=False)
    live.cpu_linear = lambda x, weight, bias: x  # type: ignore[assignment]
    copy.cpu_linear = lambda x, weight, bias: x  # type: ignore[assignment]
    with pytest.raises(NotSwappableError, match="packed in another way"):
        pairs_of([(live, copy)])


class Worker:
    """vLLM's, as far as sleeping and its models go."""

    def __init__(self) -> None:
        self.policy = nn.Linear(4, 4)
        self.draft = nn.Linear(4, 4)
        self.draft.embed_tokens = self.policy  # type: ignore[assignment]
        self.slipstream_hooks = WorkerHooks(self)

    def get_model(self) -> nn.Module:
        return self.policy

    def get_draft_model(self) -> nn.Module:
        return self.draft

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: list[str] | None = None) -> None: ...


def test_read_back_sees_written_draft_not_pushed_policy() -> None:
    worker = Worker()
    state = worker.slipstream_hooks.read_back
    with torch.no_grad():
        worker.policy.weight.add_(1.0)
    assert state.check() == SAME
    with torch.no_grad():
        worker.draft.weight[2, 1] = -worker.draft.weight[2, 1]
    assert state.check() == DIFFERS
    state.record()
    assert state.check() == SAME


def test_draft_preserved_over_sleep_level_2_reads_back_same() -> None:
    class Keeper(Worker):
        """With ``sleep_preserve_parameter_names``."""

    watch_sleep(Keeper)
    worker = Keeper()
    before = worker.draft.weight.clone()
    worker.sleep(2)
    worker.wake_up()
    assert torch.equal(worker.draft.weight, before)
    assert slipstream_read_back(worker) == SAME


def test_draft_is_lost_in_sleep_level_2_not_level_1() -> None:
    class Sleeper(Worker):
        def sleep(self, level: int = 1) -> None:
            if level == 2:
                for parameter in self.draft.parameters():
                    floating = parameter.is_floating_point()
                    parameter.data.fill_(float("nan") if floating else 77)

    watch_sleep(Sleeper)
    worker = Sleeper()
    d2t = worker.draft.d2t = nn.Parameter(torch.arange(4), requires_grad=False)
    state = worker.slipstream_hooks.read_back
    state.record()
    worker.sleep(1)
    assert slipstream_read_back(worker) == ASLEEP
    worker.wake_up(["kv_cache"])
    assert slipstream_read_back(worker) == ASLEEP
    worker.wake_up(["weights"])
    assert slipstream_read_back(worker) == SAME
    worker.sleep(2)
    assert d2t.tolist() == [77] * 4
    worker.wake_up(["kv_cache"])
    worker.wake_up(["weights"])
    assert d2t.tolist() == [0, 1, 2, 3], "an offset of lost memory would end the engine"
    # vLLM would emit wrong tokens for drafts whose logits are NaN.
    assert not any(t.any() for t in (worker.draft.weight, worker.draft.bias))
    assert bool(worker.policy.weight.isnan().all()), "the verifier is another's to put right"
    assert slipstream_read_back(worker) == DIFFERS
    state.record()
    assert slipstream_read_back(worker) == SAME
