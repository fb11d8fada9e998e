"""The captured states equal what the policy computed; what it computes is untouched."""

from __future__ import annotations

import pytest
import torch

from policy_bridge import ModulePaths, PolicyBridge
from slipstream.v1 import draft_trainer_pb2 as pb

from .conftest import HIDDEN, Connect, batch, deliver, make_model, ship
from .doubles import DEADLINE, FakeTrainer
from .windows import assert_same_bits, gradients_in, hooks_on, own_logprobs

pytestmark = pytest.mark.contract("never waits")

LAYERS = (2, 4, 5)


def by_tokens(trainer: FakeTrainer) -> dict[tuple[int, ...], pb.VerifierStates]:
    return {tuple(trainer.tensor(s, "token_ids").tolist()): s for s in trainer.samples.values()}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_equal_the_models_own(
    trainer: FakeTrainer, connect: Connect, side: str, dtype: torch.dtype
) -> None:
    model = make_model(dtype)
    data = batch((9, 5, 12), side)
    inputs = {k: data[k] for k in ("input_ids", "attention_mask")}
    heads: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
    with torch.no_grad():
        hidden = model(**inputs, output_hidden_states=True).hidden_states
    hook.remove()
    bridge = connect(model=model, version=1)
    deliver(bridge, model, data)
    assert len(trainer.samples) == 3
    samples = by_tokens(trainer)
    for row in range(3):
        kept = data["attention_mask"][row].bool()
        sample = samples[tuple(data["input_ids"][row][kept].tolist())]
        aux = torch.cat([hidden[layer][row][kept] for layer in LAYERS], dim=-1)
        assert torch.equal(trainer.tensor(sample, "aux_hidden_states"), aux)
        assert aux.dtype == dtype
        final = trainer.tensor(sample, "final_hidden_state")
        assert torch.equal(final, heads[0][row][kept])
        assert trainer.tensor(sample, "positions").tolist() == list(range(int(kept.sum())))
        assert trainer.tensor(sample, "segment_ids").unique().numel() == 1
        expected = data["loss_mask"][row][kept]
        assert torch.equal(trainer.tensor(sample, "loss_mask"), expected)
        assert (sample.policy_version, list(sample.header.aux_layers)) == (1, list(LAYERS))


def test_layer_zero_is_the_embeddings(trainer: FakeTrainer, connect: Connect) -> None:
    model, data = make_model(), batch((6,))
    trainer.layers = (0, 7)
    bridge = connect(model=model, version=1)
    deliver(bridge, model, data)
    (sample,) = trainer.samples.values()
    with torch.no_grad():
        hidden = model(data["input_ids"], output_hidden_states=True).hidden_states
    aux = trainer.tensor(sample, "aux_hidden_states")
    assert torch.equal(aux[:, :HIDDEN], hidden[0][0])
    assert torch.equal(aux[:, HIDDEN:], hidden[7][0])


def test_fused_loss_is_captured_at_final_norm(trainer: FakeTrainer, connect: Connect) -> None:
    """The loss takes lm_head's weight and never calls the module."""
    model, data = make_model(), batch((9, 7))
    modules = ModulePaths(final_norm="model.norm")
    bridge = connect(model=model, modules=modules, version=1)
    with torch.no_grad(), bridge.capture() as capture:
        final = model.model(
            data["input_ids"], attention_mask=data["attention_mask"]
        ).last_hidden_state
        capture.ship(**data)
    assert bridge.flush(DEADLINE)
    samples = by_tokens(trainer)
    for row, length in enumerate((9, 7)):
        sample = samples[tuple(data["input_ids"][row, :length].tolist())]
        own = trainer.tensor(sample, "final_hidden_state")
        assert torch.equal(own, final[row, :length])


def test_states_dtype_casts_what_is_shipped(trainer: FakeTrainer, connect: Connect) -> None:
    model, data = make_model(), batch((9,))
    bridge = connect(model=model, states_dtype="bfloat16", version=1)
    deliver(bridge, model, data)
    (sample,) = trainer.samples.values()
    with torch.no_grad():
        final = model.model(data["input_ids"]).last_hidden_state[0]
    assert torch.equal(trainer.tensor(sample, "final_hidden_state"), final.bfloat16())


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_z_is_over_full_vocabulary(
    trainer: FakeTrainer, connect: Connect, given: bool, temperature: float
) -> None:
    model, data = make_model(), batch((11, 7))
    bridge = connect(model=model, version=1)
    inputs = {k: data[k] for k in ("input_ids", "attention_mask")}
    with torch.no_grad(), bridge.capture(temperature=temperature) as capture:
        logits = model(**inputs).logits.float() / temperature
        own = own_logprobs(logits, data["input_ids"])
        capture.ship(**data, sampled_logprobs=own if given else None)
    assert bridge.flush(DEADLINE)
    samples = by_tokens(trainer)
    for row, length in enumerate((11, 7)):
        sample = samples[tuple(data["input_ids"][row, :length].tolist())]
        logprobs = trainer.tensor(sample, "sampled_logprobs")
        sampled = trainer.tensor(sample, "sampled_logits")
        assert sample.temperature == pytest.approx(temperature)
        assert logprobs[0] == sampled[0] == 0.0
        torch.testing.assert_close(logprobs[1:], own[row, : length - 1], atol=2e-5, rtol=0)
        log_z = sampled[1:] / temperature - logprobs[1:]
        expected = logits[row, : length - 1].logsumexp(-1)
        torch.testing.assert_close(log_z, expected, atol=2e-5, rtol=0)


def test_bfloat16_logits_are_rounded_as_policy_rounds(
    trainer: FakeTrainer, connect: Connect
) -> None:
    model, data = make_model(torch.bfloat16), batch((40,))
    bridge = connect(model=model, version=1)
    deliver(bridge, model, data)
    (sample,) = trainer.samples.values()
    with torch.no_grad():
        logits = model(data["input_ids"]).logits[0, :-1]
    own = logits.gather(-1, data["input_ids"][0, 1:, None]).squeeze(-1).float()
    sampled = trainer.tensor(sample, "sampled_logits")[1:]
    # A sum on a rounding boundary may fall either way: at most one unit in the last place.
    assert float((sampled == own).float().mean()) > 0.9
    torch.testing.assert_close(sampled, own, atol=0, rtol=2**-7)


def test_gradients_bit_identical_with_bridge_on_and_off(
    trainer: FakeTrainer, connect: Connect
) -> None:
    data, model = batch((9, 5, 12)), make_model()
    plain = gradients_in(PolicyBridge.disabled().capture(), model, data)
    bridge = connect(model=model, version=1)
    assert_same_bits(plain, gradients_in(bridge.capture(), model, data))
    assert bridge.flush(DEADLINE)
    assert len(trainer.samples) == 3
    assert hooks_on(model) == 0


def test_waiting_samples_and_matrices_are_copies(trainer: FakeTrainer, connect: Connect) -> None:
    """Samples and matrices are copies: the policy moves before they are sent."""
    model, data = make_model(), batch((8,))
    trainer.hang.add("AnnouncePolicy")
    bridge = connect(model=model, version=1)
    head = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        final = model.model(data["input_ids"]).last_hidden_state[0].clone()
    ship(bridge, model, data)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    trainer.release.set()
    assert bridge.flush(DEADLINE)
    (sample,) = trainer.samples.values()
    assert torch.equal(trainer.tensor(sample, "final_hidden_state"), final)
    assert torch.equal(trainer.tensors[1]["lm_head.weight"], head[trainer.vocab_ids])
