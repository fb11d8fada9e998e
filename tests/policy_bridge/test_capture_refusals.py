"""The states that must not be shipped: wrong calls, states that moved, models that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.optim.optimizer import _global_optimizer_pre_hooks
from transformers import Qwen3ForCausalLM

from policy_bridge.capture import NullCapture
from policy_bridge.copier import Copier
from policy_bridge.weight_watch import WeightWatch
from slipstream.errors import RefusedError
from slipstream.sampling import sampling_of

from .conftest import HIDDEN, VOCAB, Connect, batch, deliver, make_model, ship, sync
from .doubles import DEADLINE, FakeTrainer
from .policies import PLAIN, Plain
from .windows import Windows, hooks_on


def write_in_place(_: object, args: tuple[torch.Tensor, ...], __: object) -> None:
    args[0].mul_(2.0)


def test_states_written_in_place_are_refused(trainer: FakeTrainer, connect: Connect) -> None:
    model, data = make_model(), batch((9,))
    model.model.layers[4].register_forward_hook(write_in_place)
    bridge = connect(model=model, strict=True, version=1)
    with pytest.raises(RefusedError, match="written in place"):
        ship(bridge, model, data)
    assert bridge.stats().outbox_samples == 0


class PastTheCounters(torch.optim.Optimizer):
    """An optimizer that writes as those of extensions do."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: object = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(1.01)


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        partial(torch.optim.AdamW, foreach=True),
        partial(torch.optim.AdamW, fused=True),
        partial(torch.optim.SGD, lr=0.1, fused=True),
        PastTheCounters,
    ],
    ids=["plain", "foreach", "fused", "fused-sgd", "extension"],
)
def test_states_of_a_policy_that_moved_are_not_shipped(
    trainer: FakeTrainer,
    connect: Connect,
    make: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer],
) -> None:
    model, data = make_model(), batch((8, 8))
    bridge = connect(model=model, version=1)
    optimizer = make(model.parameters())
    model(data["input_ids"]).logits.sum().backward()
    optimizer.step()
    ship(bridge, model, data)
    assert bridge.stats().shed == {"policy_moved": 2}
    sync(bridge, 2)
    deliver(bridge, model, data)
    assert {s.policy_version for s in trainer.samples.values()} == {2}
    bridge.close()
    assert not _global_optimizer_pre_hooks


def test_optimizer_step_of_other_model_does_not_count(
    trainer: FakeTrainer, connect: Connect
) -> None:
    model, critic, data = make_model(), make_model(), batch((8, 8))
    bridge = connect(model=model, version=1)
    critic(data["input_ids"]).logits.sum().backward()
    torch.optim.AdamW(critic.parameters(), fused=True).step()
    deliver(bridge, model, data)
    assert len(trainer.samples) == 2


def test_compiled_optimizer_is_not_recompiled_at_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(layers.parameters())
    step = torch.compile(optimizer.step, backend="eager")
    watch = WeightWatch()
    for _ in range(torch._dynamo.config.recompile_limit + 4):
        layers(torch.ones(2, 8)).sum().backward()
        watch.synced([*layers.parameters()])
        step()
        assert watch.moved()
    watch.close()


def test_layer_cuda_graphs_after_start_turn_capture_off(connect: Connect) -> None:
    model = make_model()
    bridge = connect(model=model, version=1)
    model.model.layers[1].compile(mode="reduce-overhead")
    with bridge.capture():
        assert hooks_on(model) == 0
    assert "compiled with CUDA graphs" in bridge.stats().capture_off_reason
    assert isinstance(bridge.capture(), NullCapture)
    assert bridge.stats().captures_refused == 1


def test_lm_head_replaced_after_start_turns_capture_off(connect: Connect) -> None:
    model = make_model()
    bridge = connect(model=model, version=1)
    model.set_output_embeddings(torch.nn.Linear(HIDDEN, VOCAB, bias=False))
    sync(bridge, 2)
    assert "another lm_head or other embeddings" in bridge.stats().capture_off_reason
    assert isinstance(bridge.capture(), NullCapture)


def test_step_during_other_optimizers_check_counts() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, watch = torch.optim.SGD([weight]), WeightWatch()
    watch.synced([weight])

    def others() -> Iterator[torch.Tensor]:
        optimizer.step()
        yield torch.zeros(1)

    critic = PastTheCounters([torch.nn.Parameter(torch.zeros(1))])
    critic.param_groups = [{"params": others()}]
    critic.step()
    watch.close()
    assert watch.moved()


def test_window_exception_removes_hooks_and_ships_nothing(
    trainer: FakeTrainer, connect: Connect
) -> None:
    model, data = make_model(), batch((8,))
    bridge = connect(model=model, version=1)
    with pytest.raises(KeyError), torch.no_grad(), bridge.capture() as capture:
        model(data["input_ids"])
        capture.ship(data["input_ids"], loss_mask=data["loss_mask"])
        raise KeyError("the user's own")
    assert bridge.stats().chosen_samples == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_bridge_close_ends_open_window(trainer: FakeTrainer, connect: Connect) -> None:
    model, data = make_model(), batch((8,))
    bridge = connect(model=model, version=1)
    capture = bridge.capture().__enter__()
    with torch.no_grad():
        model(data["input_ids"])
    capture.ship(data["input_ids"], loss_mask=data["loss_mask"])
    bridge.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not trainer.samples


def a_shard_of_the_vocabulary(model: Qwen3ForCausalLM) -> None:
    """Act as a tensor-parallel lm_head that returns plain tensors."""
    weight = model.lm_head.weight
    model.lm_head.forward = lambda states: functional.linear(states, weight[: VOCAB // 2])


def without_padding(model: Qwen3ForCausalLM) -> None:
    """Cut the logits, as a model does whose vocabulary is padded to a round number."""
    model.register_forward_hook(lambda _, __, output: output.logits[..., : VOCAB - 4])


@pytest.mark.parametrize(
    ("change", "width"), [(a_shard_of_the_vocabulary, 32), (without_padding, 60)]
)
@pytest.mark.parametrize("training", [False, True])
def test_logits_width_other_than_lm_head_turns_capture_off(
    connect: Connect, change: Callable[[Qwen3ForCausalLM], None], width: int, training: bool
) -> None:
    model, data = make_model(), batch((8, 8))
    change(model)
    bridge = connect(model=model, version=1)
    with torch.set_grad_enabled(training), bridge.capture(training=training) as capture:
        model(data["input_ids"])
        capture.ship(data["input_ids"], loss_mask=data["loss_mask"])
    reason = bridge.stats().capture_off_reason
    assert reason.startswith(f"model.logits: found {width} for a token, expected 64, the rows of")
    assert isinstance(bridge.capture(), NullCapture)


@pytest.mark.parametrize("width", [1, 4, 7])
def test_lm_head_called_in_chunks_refused(width: int) -> None:
    model, data = make_model(), batch((8, 8))
    with Windows(model).open() as capture, torch.no_grad():
        for part in model.model(data["input_ids"]).last_hidden_state.split(width, 1):
            model.lm_head(part)
        with pytest.raises(RefusedError, match=r"shape of the hidden.*final_norm.*no chunks"):
            capture.ship(**data)


@pytest.mark.parametrize("training", [False, True])
def test_policy_compiled_whole_after_start_turns_capture_off(
    trainer: FakeTrainer, connect: Connect, training: bool
) -> None:
    torch._dynamo.reset()
    trainer.layers = (1, 2)
    model, data = Plain(), batch((8, 8))
    bridge = connect(model=model, version=1, modules=PLAIN)
    compiled = torch.compile(model, backend="eager")
    with torch.set_grad_enabled(training), bridge.capture(training=training) as capture:
        compiled(data["input_ids"])
        capture.ship(data["input_ids"], loss_mask=data["loss_mask"])
    assert "Plain compiled as a whole" in bridge.stats().capture_off_reason
    assert isinstance(bridge.capture(), NullCapture)
    # Its graph may have been made before: then it calls no hook.
    with Windows(model, paths=PLAIN).open() as capture, torch.no_grad():
        compiled(data["input_ids"])
        with pytest.raises(RefusedError, match="compile"):
            capture.ship(**data)


def test_logits_to_keep_refused() -> None:
    model, data = make_model(), batch((8, 4))
    with Windows(model).open() as capture, torch.no_grad():
        model(data["input_ids"], logits_to_keep=1)
        with pytest.raises(RefusedError, match="logits_to_keep"):
            capture.ship(data["input_ids"][:, :1], loss_mask=data["loss_mask"][:, :1])


@pytest.mark.parametrize("copier", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("training", [False, True])
def test_ship_rows_in_other_order_than_pass_refused(
    side: Copier, copier: bool, training: bool
) -> None:
    model, data, refused = make_model(), batch((9, 5, 9)), []
    windows = Windows(model)
    changes = {"copier": side} if copier else {}
    order = torch.tensor([2, 1, 0])
    with windows.open(refuse=refused.append, training=training, **changes) as capture:
        model(data["input_ids"][order], attention_mask=data["attention_mask"][order])
        capture.ship(**data)
    assert side.wait_idle(DEADLINE)
    assert [(one.field, one.found) for one in refused] == [("input_ids", "other tokens in row 0")]
    assert not windows.samples


@pytest.mark.parametrize("how", ["padding", "overwritten", "embeddings"])
def test_ship_ignores_padding_and_unseen_token_ids(how: str) -> None:
    model, data = make_model(), batch((9, 5, 9))
    windows, ids = Windows(model), data["input_ids"].clone()
    with torch.no_grad(), windows.open() as capture:
        if how == "padding":
            ids.masked_fill_(data["attention_mask"] == 0, 7)
        if how == "embeddings":
            given = {"inputs_embeds": model.model.embed_tokens(ids)}
        else:
            given = {"input_ids": ids}
        model(**given, attention_mask=data["attention_mask"])
        if how == "overwritten":
            ids.zero_()  # as where every pass has the same memory
        capture.ship(**data)
    assert len(windows.samples) == 3


def test_non_finite_logprobs_are_shed_and_counted(trainer: FakeTrainer, connect: Connect) -> None:
    model, data = make_model(), batch((8, 8))
    logprobs = torch.full((2, 8), -1.0)
    logprobs[0, 5] = float("nan")
    logprobs[1, 1] = float("-inf")  # A prompt token: nobody reads it.
    bridge = connect(model=model, version=1)
    with torch.no_grad(), bridge.capture() as capture:
        model(data["input_ids"])
        capture.ship(data["input_ids"], loss_mask=data["loss_mask"], sampled_logprobs=logprobs)
    assert bridge.flush(DEADLINE)
    assert bridge.stats().shed == {"non_finite": 1}
    (sample,) = trainer.samples.values()
    assert trainer.tensor(sample, "sampled_logprobs").isfinite().all()


def test_sampling_parameters_arrive_with_samples(trainer: FakeTrainer, connect: Connect) -> None:
    model, data = make_model(), batch((8, 8))
    given = {
        "top_p": 0.8,
        "top_k": -1,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": None,
        "logit_bias": {token: token / 7 for token in range(256)},
    }
    bridge = connect(model=model, version=1)
    with torch.no_grad(), bridge.capture(sampling=given) as capture:
        model(data["input_ids"])
        capture.ship(**data)
    deliver(bridge, model, data)
    first, *_, last = trainer.samples.values()
    assert (first.sampling.top_p, first.sampling.min_p) == pytest.approx((0.8, 0.05))
    assert (first.sampling.top_k, first.sampling.HasField("repetition_penalty")) == (0, True)
    assert first.sampling.presence_penalty == -0.5
    assert first.sampling.logit_bias[255] == pytest.approx(255 / 7)
    assert not last.sampling.ListFields()
    assert trainer.overdrawn == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", "none"),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("logit_bias", dict.fromkeys(range(257), 1.0)),
        ("logit_bias", [1.0]),
        ("best_of", 2),
    ],
)
def test_sampling_parameters_invalid_in_vllm_refused(name: str, value: object) -> None:
    with pytest.raises(RefusedError) as refused:
        sampling_of({name: value})
    assert refused.value.field == f"sampling.{name}"
