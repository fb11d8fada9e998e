"""Logits, losses and gradients against speculators 0.9.0 and specforge 0.2.0.

Those trainers renormalise the teacher over the draft vocabulary and mask, divide and weight in
their own ways; here their choices are mapped onto ours through the objective's arguments. The
head, the unroll and the loss are the product's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from draft_trainer.drafters.batch import Batch, ahead
from draft_trainer.drafters.eagle3.head import Eagle3Head, HeadConfig
from draft_trainer.drafters.loss import Objective, step_weights, ttt_objective
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from draft_trainer.kernels.library import using_kernels
from tests.draft_trainer.synthetic import logits_of

pytestmark = pytest.mark.contract("alignment")

STEPS = 4
EPS = 1e-5
_GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(params=["off", "auto"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plain torch, and the C kernels where they compile."""
    with using_kernels(request.param):
        yield


def _load(name: str) -> tuple[dict[str, Tensor], dict[str, int]]:
    with safe_open(_GOLDEN / f"golden_{name}.safetensors", "pt") as file:
        dims = json.loads(file.metadata()["settings"])["dims"]
        return {key: file.get_tensor(key) for key in file.keys()}, dims  # noqa: SIM118


def _head(golden: dict[str, Tensor], dims: dict[str, int]) -> Eagle3Head:
    config = HeadConfig(
        hidden_size=dims["H"],
        target_hidden_size=dims["H"],
        intermediate_size=dims["I"],
        num_attention_heads=dims["nh"],
        num_key_value_heads=dims["nkv"],
        head_dim=dims["hd"],
        vocab_size=dims["V"],
        draft_vocab_size=dims["Vd"],
        aux_layer_ids=(2, 4, 5),
        rms_norm_eps=EPS,
    )
    head = Eagle3Head(config)
    head.load_state_dict({name: golden[f"w.{name}"] for name in head.state_dict()})
    return head


def _batch(golden: dict[str, Tensor]) -> Batch:
    """The golden inputs with a teacher that is renormalised over the draft vocabulary."""
    ids = golden["in.input_ids"]
    rows, length = ids.shape
    draft_rows = golden["w.target.lm_head.weight"][golden["w.t2d"]]
    return Batch(
        token_ids=ids,
        positions=torch.arange(length).expand(rows, length),
        loss_mask=golden["in.loss_mask"].bool(),
        anchors=torch.ones_like(ids, dtype=torch.bool),
        aux=golden["in.aux"],
        embeds=golden["w.embed_tokens.weight"][ids],
        final_hidden=golden["in.last_postnorm"],
        policy=PolicyHead(0, draft_rows, golden["w.embed_tokens.weight"]),
        heads=PolicyHeads(1),
        logits_dtype=torch.float32,
        log_z=(golden["in.last_postnorm"] @ draft_rows.T).logsumexp(-1),
        teacher_known=torch.ones_like(ids, dtype=torch.bool),
        sampled_logprobs=torch.zeros(ids.shape),
        temperature=torch.ones(rows),
        groups=tuple(map(str, range(rows))),
    )


def _close(ours: Tensor, theirs: Tensor) -> None:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-5, f"relative error {error:.2e}"


def _check_gradients(head: Eagle3Head, outcome: Objective, golden: dict[str, Tensor]) -> None:
    outcome.loss.backward()
    compared = 0
    for name, parameter in head.named_parameters():
        if f"grad.{name}" in golden:
            assert parameter.grad is not None
            _close(parameter.grad, golden[f"grad.{name}"])
            compared += 1
    assert compared == 12


def test_specforge_logits() -> None:
    """Every anchor whose token in exists, in all four steps."""
    golden, dims = _load("specforge")
    head = _head(golden, dims)
    length = golden["in.input_ids"].shape[1]
    for step, output in enumerate(head.unroll(_batch(golden), STEPS)):
        exists = slice(0, length - 1 - step)
        _close(logits_of(head, output)[:, exists], golden[f"step{step}.logits"][:, exists])


def test_specforge_loss_and_gradients() -> None:
    """Mask l[i+s] where the teacher's argmax is in the draft vocabulary, over B * T, 0.8^s."""
    golden, dims = _load("specforge")
    head, batch = _head(golden, dims), _batch(golden)
    logits = golden["in.last_postnorm"] @ golden["w.target.lm_head.weight"].T
    mask = golden["peer_in.loss_mask"].bool()
    representable = golden["w.t2d"][logits.argmax(-1)]
    valid = torch.stack([ahead(mask, s) & ahead(representable, s + 1) for s in range(STEPS)])
    outcome = ttt_objective(
        head,
        batch,
        valid,
        weights=[0.8**s for s in range(STEPS)],
        denominators=torch.full((STEPS,), mask.numel()),
    )
    for step in range(STEPS):
        _close(outcome.sums[step, 0] / mask.numel(), golden[f"step{step}.loss"][0])
    _close(outcome.loss, golden["loss"][0])
    _check_gradients(head, outcome, golden)


def test_speculators_logits() -> None:
    """Two sequences packed there, two rows here; positions start at 1 there, at 0 here."""
    golden, dims = _load("speculators")
    head = _head(golden, dims)
    length = golden["in.input_ids"].shape[1]
    for step, output in enumerate(head.unroll(_batch(golden), STEPS)):
        theirs = golden[f"step{step}.logits"][0]
        for row in range(2):
            start, count = row * (length - 1), length - 1 - step
            _close(logits_of(head, output)[row, :count], theirs[start : start + count])


def test_speculators_loss_and_gradients() -> None:
    """Mask l[i+1+s] over its sum + 1e-5, weights 1, and KL: the teacher's entropy off."""
    golden, dims = _load("speculators")
    head, batch = _head(golden, dims), _batch(golden)
    valid = torch.stack([ahead(batch.loss_mask, s + 1) for s in range(STEPS)])
    counts = valid.flatten(1).sum(1) + 1e-5
    outcome = ttt_objective(head, batch, valid, weights=[1.0] * STEPS, denominators=counts)
    log_p = (batch.final_hidden @ batch.policy.lm_head_rows.T).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    losses = []
    for step in range(STEPS):
        teacher_entropy = ahead(entropy, step + 1)[valid[step]].sum()
        losses.append((outcome.sums[step, 0] - teacher_entropy) / counts[step])
        _close(losses[-1], golden[f"step{step}.loss_weighted"][0])
    _close(torch.stack(losses).sum(), golden["loss"][0])
    _check_gradients(head, outcome, golden)


def test_step_weights_sum_to_one() -> None:
    assert sum(step_weights(5, 0.8)) == pytest.approx(1.0)
    assert step_weights(3, 0.8)[1] / step_weights(3, 0.8)[0] == pytest.approx(0.8)
