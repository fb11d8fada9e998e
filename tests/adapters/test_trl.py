"""Real TRL on the trained tiny policy: what is captured, and that training does not change."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from inspect import getsource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer

from benchmarks.publish_faults.memory_server import MemoryServer
from examples.arithmetic_grpo.processes import Services
from examples.arithmetic_grpo.tokenizer import token_ids
from examples.local_services import SHORT, draft_trainer
from examples.trl_grpo.train import grpo_trainer, open_bridge
from policy_bridge import DisabledBridge, PolicyBridge
from policy_bridge.adapters.completions import Completion, CompletionsClient
from policy_bridge.adapters.trl import TrlRollouts, whole_policy
from slipstream.client import open_channel
from slipstream.errors import RefusedError
from slipstream.tensors import dtype_from_wire
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from slipstream.v1 import rollout_server_pb2 as rollout_pb
from tests.adapters.ranks import FixedRollouts, any_score
from tests.policy_bridge.doubles import DEADLINE, FakeTrainer
from tests.rollout_server.checkpoints import load

# TRL is imported by the tests: it imports vLLM, which takes long in every worker that collects.
pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")

STEPS = 3
QUESTION = token_ids()["?"]  # ends every prompt
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
ROWS = 16  # sequences of one generation batch
TEMPERATURE = 0.75
SMALL: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 24,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "temperature": TEMPERATURE,
}
SAMPLED_WITH = {"top_p": 0.9, "min_p": 0.02, "generation_kwargs": {"presence_penalty": 0.5}}


def test_trl_deepcopy_of_watched_model_is_not_watched() -> None:
    """The copy, made to merge adapters or as a reference, is not watched."""
    model = torch.nn.Linear(2, 2)
    adapter = TrlRollouts(DisabledBridge(), FixedRollouts())
    args = SimpleNamespace(
        **{"cast_lm_head_to_fp32": False, "per_device_train_batch_size": 1, "temperature": 1.0},
        **{"max_completion_length": 1, "top_p": 1.0, "top_k": 0, "min_p": None},
        **{"repetition_penalty": 1.0, "generation_kwargs": None},
    )
    adapter._begin_window(SimpleNamespace(model=model, args=args, beta=0.0, eos_token_ids=[]), 1)
    copied = copy.deepcopy(model)
    calls = list[Any]()
    adapter._capture = SimpleNamespace(ship=lambda *given, **named: calls.append(given))  # type: ignore[assignment]
    copied(torch.zeros(1, 2))
    assert calls == [] and len(model._forward_hooks) == 1


class Stub:
    """A trainer that has what one generation reads of it."""

    def __init__(self, **changes: Any) -> None:
        self.state = SimpleNamespace(global_step=0)
        self.accelerator = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None)
        self.model = torch.nn.Linear(2, 2).eval()
        self.eos_token_ids = [2]
        self.args = SimpleNamespace(
            **{"max_completion_length": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0},
            **{"min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None},
            chat_template_kwargs=None,
        )
        self.templates: list[str | None] = []
        self.processing_class = SimpleNamespace(apply_chat_template=self._tokens)
        vars(self).update(changes)

    def _tokens(self, prompts: list[Any], **named: Any) -> dict[str, Any]:
        self.templates.append(named["chat_template"])
        return {"input_ids": [[5, 6] for _ in prompts]}


CHAT = [{"role": "user", "content": "1+1"}]


def test_trl_policy_version_counts_generations_from_first_step() -> None:
    bridge, trainer, found = DisabledBridge(), Stub(), []
    rollouts = TrlRollouts(bridge, FixedRollouts(), weights=None)
    for step in (20, 20, 28, 36, 36):
        trainer.state.global_step = step
        rollouts([CHAT], trainer)
        found.append(bridge.policy_version)
    assert found == [20, 20, 21, 22, 22]


def test_trl_version_synced_by_loop_is_not_synced_again() -> None:
    bridge, trainer = DisabledBridge(), Stub()
    bridge.sync(0)
    never: Any = None  # called, it would be an error
    rollouts = TrlRollouts(bridge, FixedRollouts(), weights=lambda trainer: never())
    rollouts([CHAT], trainer)
    assert bridge.policy_version == 0


def test_trl_prompts_use_trainer_chat_template() -> None:
    rollouts = TrlRollouts(DisabledBridge(), FixedRollouts(), weights=None)
    for trainer, expected in ((Stub(), None), (Stub(chat_template="of TRL"), "of TRL")):
        rollouts([CHAT], trainer)
        assert trainer.templates == [expected]


@pytest.mark.parametrize(
    ("field", "changes", "content"),
    [
        ("tools", {"tools": [max]}, "1+1"),
        ("environment_factory", {"environment_factories": {None: object}}, "1+1"),
        ("prompts", {}, [{"type": "text", "text": "what"}, {"type": "image", "image": 0}]),
        ("prompts", {}, [{"type": "video", "video": 0}]),
    ],
)
def test_trl_tools_and_images_refused(field: str, changes: dict[str, Any], content: Any) -> None:
    bridge = DisabledBridge()
    rollouts = TrlRollouts(bridge, FixedRollouts(), weights=None)
    prompts = [CHAT, [{"role": "user", "content": content}]]
    with pytest.raises(RefusedError) as caught:
        rollouts(
            prompts, Stub(tools=[], environment_factories=None) if not changes else Stub(**changes)
        )
    assert caught.value.field == field and bridge.policy_version is None
    parts = [{"role": "user", "content": [{"type": "text", "text": "1+1"}]}]
    rollouts([parts], Stub(tools=[], environment_factories=None))


def test_trl_has_names_that_adapter_uses() -> None:
    """Those that no training run here reaches: doubles stand for them in other tests."""
    from trl import GRPOTrainer

    tokenize = getsource(GRPOTrainer._tokenize_prompts)
    assert "chat_template=self.chat_template" in tokenize and "tools=self.tools" in tokenize
    assert "self.environment_factories is not None" in tokenize
    assert "self.is_deepspeed_enabled = " in getsource(Trainer.create_accelerator_and_postprocess)


def test_trl_zero3_weights_gathered_by_engine() -> None:
    from accelerate import Accelerator, DistributedType

    weights = {"lm_head.weight": torch.ones(2, 2)}
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED,
        deepspeed_config={"zero_optimization": {"stage": 3}},
    )
    accelerator.get_state_dict = partial(Accelerator.get_state_dict, accelerator)
    engine = SimpleNamespace(zero_gather_16bit_weights_on_model_save=lambda: True)
    trainer = SimpleNamespace(
        accelerator=accelerator,
        is_deepspeed_enabled=True,
        model=torch.nn.Linear(1, 1),
        model_wrapped=engine,
    )
    # To every rank but the first the engine gives none.
    for gathered, expected in ((weights, weights), (None, {})):
        engine._zero3_consolidated_16bit_state_dict = lambda given=gathered: given
        assert whole_policy(trainer) == expected


def load_policy(policy_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)


@pytest.mark.parametrize(
    ("settings", "versions"),
    [
        # Captured from the training passes: generation and optimizer step go together.
        ({"gradient_accumulation_steps": 2}, {0: 16, 1: 16, 2: 16}),
        # Two optimizer steps per generation: TRL does a log-prob pass over all of it first.
        # Versions count generations: what a trainer keeps is not aged by the steps between.
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 1}, {0: 16, 1: 16}),
    ],
)
def test_trl_training_bit_identical_and_each_sequence_ships_once(
    policy_dir: Path, tmp_path: Path, settings: dict[str, int], versions: dict[int, int]
) -> None:
    def run(bridge: Any, model: PreTrainedModel) -> list[float]:
        rollouts = TrlRollouts(bridge, FixedRollouts(), weights=None)
        trainer = grpo_trainer(
            model, rollouts, tmp_path, any_score, **SMALL, **SAMPLED_WITH, **settings
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain, bridged = load_policy(policy_dir), load_policy(policy_dir)
    losses = run(PolicyBridge.disabled(), plain)
    double = FakeTrainer(layers=(2, 4, 7), vocab_ids=torch.arange(0, 128, 2))
    with double.serve() as server, open_bridge(bridged, server.address, ()) as bridge:
        assert bridge.wait_connected(DEADLINE)
        assert run(bridge, bridged) == losses
        assert bridge.flush(DEADLINE)
        stats = bridge.stats()
    assert all(math.isfinite(loss) for loss in losses) and len(losses) == STEPS
    for (name, left), right in zip(
        plain.state_dict().items(), bridged.state_dict().values(), strict=True
    ):
        assert torch.equal(left, right), name
    untrained = load_policy(policy_dir)
    assert not torch.equal(plain.lm_head.weight, untrained.lm_head.weight)
    assert dict(stats.shed) == {}
    assert stats.accepted == stats.chosen_samples == sum(versions.values())
    samples = list(double.samples.values())
    assert Counter(s.policy_version for s in samples) == versions
    assert {s.temperature for s in samples} == {TEMPERATURE}
    for sample in samples:
        assert (sample.sampling.top_p, sample.sampling.min_p) == pytest.approx((0.9, 0.02))
        assert sample.sampling.presence_penalty == 0.5
    check_states(untrained, double, [s for s in samples if s.policy_version == 0])


@pytest.mark.parametrize(("dtype", "bf16"), [(torch.bfloat16, False), (torch.float32, True)])
def test_trl_float32_lm_head_gives_float32_teacher(
    policy_dir: Path, tmp_path: Path, dtype: torch.dtype, bf16: bool
) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=dtype)
    double = FakeTrainer(layers=(2, 4, 7), vocab_ids=torch.arange(128))
    settings = {**SMALL, "max_steps": 1, "bf16": bf16, "cast_lm_head_to_fp32": True}
    with (
        double.serve() as server,
        open_bridge(model, server.address, (), states_dtype="") as bridge,
    ):
        assert bridge.wait_connected(DEADLINE)
        rollouts = TrlRollouts(bridge, FixedRollouts(), weights=None)
        grpo_trainer(model, rollouts, tmp_path, any_score, **settings).train()
        assert bridge.flush(DEADLINE)
    weight = double.tensors[0]["lm_head.weight"].float()
    assert len(double.samples) == ROWS
    for sample in double.samples.values():
        assert dtype_from_wire(sample.header.logits_dtype, "logits_dtype") == torch.float32
        logits = sample.final_hidden.float() @ weight.T
        log_z = (sample.sampled_logits / TEMPERATURE - sample.sampled_logprobs)[1:]
        masses = ((logits / TEMPERATURE).logsumexp(-1)[:-1] - log_z).exp()
        kept = sample.loss_mask[1:].bool()
        torch.testing.assert_close(masses[kept], torch.ones(int(kept.sum())), atol=1e-3, rtol=0)


@pytest.mark.parametrize("bridged", ["the adapted model", "what TRL wraps"])
def test_trl_adapters_are_pushed_merged(policy_dir: Path, tmp_path: Path, bridged: str) -> None:
    base, rollout = load_policy(policy_dir), MemoryServer(policy=policy_dir)
    start = copy.deepcopy(base.state_dict())
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    early = bridged == "what TRL wraps"
    model = base if early else peft.get_peft_model(base, config)
    double = FakeTrainer(layers=(2, 4, 7), vocab_ids=torch.arange(128))

    class Compared(FixedRollouts):
        pushes = 0

        def generate(self, *given: Any) -> list[Completion]:
            expected = copy.deepcopy(model).merge_and_unload().state_dict()
            for name, tensor in rollout.policy.items():
                assert torch.equal(tensor, expected[name].bfloat16()), name
            self.pushes += rollout.policy_version == self.pushes
            return super().generate(*given)

    rollouts = Compared()
    settings = {**SMALL, "gradient_accumulation_steps": 2}
    with (
        double.serve() as server,
        open_bridge(model, server.address, (rollout.address,)) as bridge,
    ):
        assert bridge.wait_connected(DEADLINE)
        model = peft.get_peft_model(base, config) if early else model
        grpo_trainer(model, TrlRollouts(bridge, rollouts), tmp_path, any_score, **settings).train()
        assert bridge.flush(DEADLINE)
        stats = bridge.stats()
    assert rollouts.pushes == stats.syncs == STEPS
    assert stats.accepted == stats.chosen_samples == ROWS * STEPS and dict(stats.shed) == {}
    kept = {name.replace("base_layer.", ""): t for name, t in base.state_dict().items()}
    assert all(torch.equal(kept[name], tensor) for name, tensor in start.items())
    assert not torch.equal(rollout.policy[Q_PROJ], start[Q_PROJ].bfloat16())
    rollout.stop()


def check_states(
    model: PreTrainedModel, double: FakeTrainer, samples: list[pb.VerifierStates]
) -> None:
    """States and log-probs are those of the policy before any step, at the right positions."""
    for sample in samples:
        ids = double.tensor(sample, "token_ids").long()[None]
        with torch.no_grad():
            output = model(ids, output_hidden_states=True)
        final = double.tensor(sample, "final_hidden_state").float()
        torch.testing.assert_close(final, output.hidden_states[-1][0], atol=0.05, rtol=0.02)
        expected = (output.logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        expected = expected.gather(-1, ids[0, 1:, None]).squeeze(-1)
        mask = double.tensor(sample, "loss_mask").bool()
        prompt = ids[0].tolist().index(QUESTION) + 1
        assert not mask[:prompt].any() and mask[prompt:].all()
        given = double.tensor(sample, "sampled_logprobs")
        torch.testing.assert_close(given[1:][mask[1:]], expected[mask[1:]], atol=2e-4, rtol=1e-4)


class Recorded:
    """A client whose completions are kept."""

    def __init__(self, client: CompletionsClient) -> None:
        self._client = client
        self.logprobs: dict[tuple[int, ...], list[float | None]] = {}

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]
    ) -> list[Completion]:
        completions = self._client.generate(prompts, sampling)
        for prompt, completion in zip(prompts, completions, strict=True):
            self.logprobs[*prompt, *completion.token_ids] = completion.logprobs
        return completions


@pytest.mark.slow
@pytest.mark.vllm
def test_trl_rollouts_on_vllm_use_synced_weights(
    policy_dir: Path, server: Any, tmp_path: Path
) -> None:
    before = server.stub.GetState(rollout_pb.GetStateRequest(), timeout=30)
    # No release may come of it: the server is shared, and left as it was found.
    service = draft_trainer(tmp_path, server.control, {**SHORT, "gate": {"min_gain": 100.0}})
    model = load_policy(policy_dir)
    errors: list[float] = []
    with Services(service), CompletionsClient([server.http], "policy") as client:
        service.wait_ready(300)
        rollouts = Recorded(client)

        def compare(_: Any, __: Any, given: dict[str, Any], output: Any) -> None:
            for row, mask, labels, logprobs in zip(
                *(given[k] for k in ("input_ids", "attention_mask", "labels")),
                output.log_probs.detach(),
                strict=True,
            ):
                served = rollouts.logprobs[tuple(row[mask.bool()].tolist())]
                mine = logprobs[labels[1:] != -100]
                errors.append(float((torch.tensor(served) - mine).abs().max()))

        model.register_forward_hook(compare, with_kwargs=True)
        with open_bridge(
            model, service.health, (server.control,), policy_dtype="float32"
        ) as bridge:
            assert bridge.wait_connected(DEADLINE)
            trainer = grpo_trainer(
                model,
                TrlRollouts(bridge, rollouts),
                tmp_path,
                **{
                    **SMALL,
                    "temperature": 1.0,
                    "max_completion_length": 64,
                    "gradient_accumulation_steps": 2,
                },
            )
            trainer.train()
            assert bridge.flush(60)
            stats = bridge.stats()
        with open_channel(service.health) as channel:
            stub = pb_grpc.DraftTrainerStub(channel)
            status = stub.GetStatus(pb.GetStatusRequest(), timeout=30)
    state = server.stub.GetState(rollout_pb.GetStateRequest(), timeout=30)
    live = server
    live.stage("policy", "found-policy", 0, load(policy_dir))
    live.commit("found-policy")

    assert state.policy_version == STEPS - 1
    assert state.policy_commits == before.policy_commits + STEPS
    assert stats.announced == stats.syncs == STEPS
    assert stats.accepted == stats.chosen_samples - sum(stats.shed.values())
    assert status.samples_accepted == stats.accepted == ROWS * STEPS
    assert status.samples_refused == 0
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS and all(math.isfinite(loss) for loss in losses)
    # float32 everywhere: rollouts of the version before would be off by far more.
    assert len(errors) == ROWS * STEPS
    assert max(errors) < 1e-3, errors
