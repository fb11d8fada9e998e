"""The recipes of docs/recipes.md, as printed, on stand-ins of their frameworks.

What arrives at the trainer and at the rollout server is compared with the policy. The text beside a
recipe has to say that it never ran on the framework itself.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.publish_faults.memory_server import MemoryServer
from policy_bridge import BridgeConfig, PolicyBridge
from policy_bridge.adapters.pipeline import StagedPolicy
from tests.adapters.test_hook_points import HOOKS
from tests.completions_server import Completions, choice, serving
from tests.docs import frameworks, recipes_verl
from tests.policy_bridge.conftest import VOCAB, make_model
from tests.policy_bridge.doubles import DEADLINE, FakeTrainer

DOCS = Path(__file__).resolve().parents[2] / "docs"
RECIPES = (
    *("TRL's asynchronous trainer", "verl", "NeMo RL and Megatron: pipeline stages"),
    *("SkyRL", "prime-rl", "OpenRLHF", "Policies through vLLM's own weight transfer"),
)
"""Sections that are run here; the last, of integrations.md, in ``test_weight_transfer.py``."""
PAGES = {
    **{"OpenRLHF": "recipes_openrlhf.md", RECIPES[2]: "recipes_pipelines.md"},
    RECIPES[-1]: "integrations.md",
}
"""Of sections that are not in recipes.md."""
TEMPERATURE = 0.7


def section(title: str) -> str:
    page = DOCS / PAGES.get(title, "recipes.md")
    found = page.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found, title
    return found


def run(title: str, number: int = 1, of: int = 1, **surroundings: object) -> dict[str, Any]:
    """What a block defines: of a section with one, or number so much of so many."""
    blocks = re.findall(r"^```python\n(.*?)^```", section(title), re.MULTILINE | re.DOTALL)
    assert len(blocks) == of
    names = dict(surroundings)
    exec(compile(blocks[number - 1], title, "exec"), names)
    return names


@dataclass
class Row:
    """A sequence: its tokens, how many of them are the prompt, and which a tool wrote."""

    ids: torch.Tensor
    prompt: int
    tool: tuple[int, ...] = ()

    @property
    def sampled(self) -> list[bool]:
        return [at >= self.prompt and at not in self.tool for at in range(len(self.ids))]


@dataclass
class Rig:
    trainer: FakeTrainer
    rollout: MemoryServer
    address: str

    def check(
        self, bridge: PolicyBridge, rows: Sequence[Row], logits: Sequence[torch.Tensor]
    ) -> None:
        """Every row arrived once, with the policy's own numbers on its completion."""
        assert bridge.flush(DEADLINE)
        stats = bridge.stats()
        assert (dict(stats.shed), stats.refused, stats.capture_off_reason) == ({}, 0, "")
        assert stats.accepted == len(rows)
        samples = {tuple(s.token_ids.tolist()): s for s in self.trainer.samples.values()}
        assert len(samples) == len(rows)
        for row, own in zip(rows, logits, strict=True):
            sample = samples[tuple(row.ids.tolist())]
            assert sample.loss_mask.tolist() == row.sampled
            assert sample.temperature == pytest.approx(TEMPERATURE)
            kept = sample.loss_mask[1:].bool()
            picked = own[:-1].gather(-1, row.ids[1:, None])[:, 0]
            log_p = frameworks.log_probs_of(own[:-1] / TEMPERATURE, row.ids[1:])
            for found, expected in (
                (sample.sampled_logits, picked),
                (sample.sampled_logprobs, log_p),
            ):
                torch.testing.assert_close(found[1:][kept], expected[kept], atol=1e-4, rtol=1e-4)

    def check_pushed(self, version: int, expected: dict[str, torch.Tensor]) -> None:
        assert self.rollout.policy_version == version
        assert self.rollout.policy.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(self.rollout.policy[name], tensor.bfloat16()), name


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    pytest.importorskip("ray")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    for name, module in frameworks.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    rendezvous = f"file://{tmp_path / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    make_model().save_pretrained(tmp_path / "policy")
    rollout, trainer = MemoryServer(policy=tmp_path / "policy"), FakeTrainer()
    trainer.rollout_servers = (rollout.address,)
    try:
        with trainer.serve() as server:
            yield Rig(trainer, rollout, server.address)
    finally:
        rollout.stop()
        dist.destroy_process_group()


def some_rows() -> list[Row]:
    torch.manual_seed(3)
    return [Row(torch.randint(1, VOCAB, (n,)), prompt) for n, prompt in ((9, 3), (12, 5), (7, 2))]


@torch.no_grad()
def logits_of(model: nn.Module, rows: Sequence[Row]) -> list[torch.Tensor]:
    return [model(row.ids[None]).logits[0] for row in rows]


def sharded(model: nn.Module | None = None) -> nn.Module:
    model = make_model() if model is None else model
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def padded(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Padded left: ids, attention mask, and the mask of completions in the last columns."""
    width, actions = max(len(r.ids) for r in rows), max(len(r.ids) - r.prompt for r in rows)
    ids, attention = torch.zeros(2, len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), actions, dtype=torch.long)
    for at, row in enumerate(rows):
        ids[at, width - len(row.ids) :] = row.ids
        attention[at, width - len(row.ids) :] = 1
        mask[at, actions - (len(row.ids) - row.prompt) :] = 1
    return {"sequences": ids, "attention_mask": attention, "mask": mask}


def connected(bridge: PolicyBridge) -> PolicyBridge:
    assert bridge.wait_connected(DEADLINE)
    return bridge


@pytest.mark.parametrize("title", RECIPES[:-1])
def test_a_recipe_says_that_it_never_ran_on_the_framework(title: str) -> None:
    assert re.search(r"[Uu]ntested|[Nn]ever run", section(title))


def test_a_stand_in_has_the_parameters_of_the_framework() -> None:
    seen = set()
    for _, place, parameters in HOOKS:
        owner, _, method = place.rpartition(".")
        stand_in = getattr(frameworks, owner or "PrimeLoop", getattr(recipes_verl, owner, None))
        if stand_in is None or not hasattr(stand_in, method):
            continue
        found = set(inspect.signature(getattr(stand_in, method)).parameters)
        assert set(parameters) <= found, place
        seen.add(owner)
    assert {"AsyncGRPOTrainer", "ActorRolloutRefWorker", "PolicyWorkerBase", ""} <= seen
    assert {"FSDPWeightExtractor", "FSDPEngineWithLMHead", "PolicyModelActor"} <= seen


def test_trl_async(rig: Rig) -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    names, rows = run(RECIPES[0]), some_rows()
    model, before = make_model(), logits_of(make_model(), rows)
    utils.add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    transfer = names["SlipstreamTransfer"]()
    transfer.init_weight_transfer()
    trainer = names["SlipstreamTrainer"](model, TEMPERATURE, weight_transfer=transfer)
    trainer.attach(rig.address)
    other = names["SlipstreamTrainer"](
        make_model(), TEMPERATURE, weight_transfer=transfer, is_main_process=False
    )
    other.attach(rig.address)
    merged = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged[next(iter(dict(model.named_parameters())))].mul_(2)
    with connected(trainer.bridge) as bridge, other.bridge:
        trainer._sync_weight()
        rig.check_pushed(0, merged)
        other._sync_weight()
        assert other.bridge.policy_version == bridge.policy_version == 0
        assert len(trainer.waits) == len(other.waits) == 3
        for row in rows:
            labels = torch.where(torch.arange(len(row.ids)) >= row.prompt, row.ids, -100)
            inputs = {
                "input_ids": row.ids[None],
                "position_ids": torch.arange(len(row.ids))[None],
                "shift_labels": torch.nn.functional.pad(labels[1:], (0, 1), value=-100)[None],
            }
            trainer.training_step(model, inputs, 1)
        rig.check(bridge, rows, before)
    assert next(iter(rig.trainer.samples.values())).sampling.top_p == pytest.approx(0.9)


@pytest.mark.parametrize("sections", [1, 4], ids=["text", "images"])
def test_verl(rig: Rig, sections: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, before = some_rows(), logits_of(make_model(), some_rows())
    rows[1].tool = (7, 8)
    monkeypatch.setenv("SLIPSTREAM_TRAINER", rig.address)
    names = run("verl")
    engine = SimpleNamespace(backend="naive")
    rollout = SimpleNamespace(
        **{"temperature": TEMPERATURE, "top_p": 0.9, "top_k": -1},
        **{"prompt_length": 8, "response_length": 16, "checkpoint_engine": engine},
        ignore_eos=True,
    )
    part = SimpleNamespace(rollout=rollout, model=sharded)
    trainer = names["PPOTrainerSync"](SimpleNamespace(actor_rollout_ref=part))
    trainer.init()
    worker = trainer.worker
    names["SlipstreamWorker"](part, role="ref").init_model()  # it has no actor
    with connected(worker.bridge) as bridge:
        asyncio.run(worker.update_weights(global_steps=4))
        rig.check_pushed(4, dict(make_model().state_dict()))
        nested = torch.nested.as_nested_tensor([r.ids for r in rows], layout=torch.jagged)
        lengths = nested.offsets().diff().tolist()
        positions = torch.cat([torch.arange(length) for length in lengths])
        if sections > 1:
            positions = positions.expand(sections, -1)
        answers = [torch.tensor(r.sampled[r.prompt :]).long() for r in rows]
        micro_batch = {
            "input_ids": nested,
            "position_ids": torch.nested.nested_tensor_from_jagged(
                positions, nested.offsets(), jagged_dim=positions.dim()
            ),
            "response_mask": torch.nested.as_nested_tensor(answers, layout=torch.jagged),
            "extra_fields": [{"min_global_steps": version} for version in (4, 2, 3)],
        }
        for marks in ({"no_lora_adapter": True}, {}):  # the reference's pass, with LoRA
            data = recipes_verl.TensorDict(micro_batches=[micro_batch], **marks)
            assert len(worker.compute_log_prob(data)) == sum(lengths)
        assert "forward_step" not in vars(worker.actor.engine)
        rig.check(bridge, rows, before)
        sampled_by = {
            tuple(s.token_ids.tolist()): s.header.rollout_policy_version
            for s in rig.trainer.samples.values()
        }
        assert [sampled_by[tuple(row.ids.tolist())] for row in rows] == [4, 2, 3]
        # Updates without a step or with the same one, and the mode in which replicas wait.
        asyncio.run(worker.update_weights())
        asyncio.run(worker.update_weights(global_steps=4, mode="naive"))
        assert worker.checkpoint_engine.sent == []
        asyncio.run(worker.update_weights(global_steps=4, mode="nccl"))
        engine.backend = "nccl"
        asyncio.run(worker.update_weights(global_steps=5))
        assert worker.checkpoint_engine.sent == [4, 5] and rig.rollout.policy_version == 5
    sampling = next(iter(rig.trainer.samples.values())).sampling
    assert (sampling.top_p, sampling.top_k) == (pytest.approx(0.9), 0)
    ask_through_verl(trainer, monkeypatch)


def ask_through_verl(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import cloudpickle

    asked: list[dict[str, Any]] = []
    connections: set[int] = set()
    told = {"version": 5, "spans": {"0/0": [[0, 4], [1, 5]]}}
    headers = {"x-slipstream-policy-versions": json.dumps(told)}

    class Server(Completions):
        extra, protocol_version = headers, "HTTP/1.1"

        def answer(self, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
            asked.append(body)
            connections.add(self.client_address[1])
            return 200, [choice([5, 6], [-1.0, -2.0])]

    made, sampling = (
        frameworks.limits_of_clients(monkeypatch),
        {"temperature": 0.7, "logprobs": True},
    )
    client = cloudpickle.loads(cloudpickle.dumps(trainer.get_llm_client()))

    async def ask(times: int) -> Any:
        named = {"sampling_params": sampling, "priority": 0, "image_data": None}
        for _ in range(times):
            output = await client.generate("a", prompt_ids=[1, 2], **named)
        for turn in (20, 30):  # later turns, as long as verl allows and beyond
            await client.generate("a", prompt_ids=[1] * turn, **named)
        await client.http.aclose()
        with pytest.raises(ValueError, match="image_data"):
            await client.generate("a", prompt_ids=[1, 2], **{**named, "image_data": ["one"]})
        return output

    with serving(Server) as port:
        monkeypatch.setenv("SLIPSTREAM_ROLLOUTS", f"http://127.0.0.1:{port}")
        output = asyncio.run(ask(times=2))
    frameworks.check_limits(made)
    assert len(connections) == 1 and sampling["logprobs"] is True
    assert (output.token_ids, output.log_probs) == ([5, 6], [-1.0, -2.0])
    assert trainer.tag(output) == (4, 5)
    body, again, *turns = asked
    assert body == again and [turn["max_tokens"] for turn in turns] == [4, 1]
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([1, 2], 16, 0.7)
    assert body["logprobs"] == 0 and body["return_token_ids"] is body["ignore_eos"] is True


def test_skyrl(rig: Rig) -> None:
    rows, data = some_rows(), padded(some_rows())
    worker = run("SkyRL")["SlipstreamPolicyWorker"](sharded(), TEMPERATURE)
    before = logits_of(make_model(), rows)
    assert not hasattr(worker, "weight_extractor")
    worker.attach(rig.address, {"top_p": 0.9, "top_k": -1, "min_p": 0.0})
    with connected(worker.bridge) as bridge:
        asyncio.run(worker.init_weight_sync_state(None, None))
        asyncio.run(worker.broadcast_to_inference_engines(None, None))
        rig.check_pushed(0, dict(make_model().state_dict()))
        experiences = [
            frameworks.Experience(
                data["sequences"][part], data["attention_mask"][part], data["mask"][part]
            )
            for part in (slice(0, 2), slice(2, 3))
        ]
        assert len(worker.forward_backward(experiences)) == 2
        rig.check(bridge, rows, before)
    assert next(iter(rig.trainer.samples.values())).sampling.top_p == pytest.approx(0.9)


@pytest.mark.parametrize("taught", [(), (7, 8)])
def test_prime_rl(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taught: tuple[int, ...]
) -> None:
    rows, initial = some_rows(), dict(make_model().state_dict())
    rows[1].tool, before = taught, logits_of(make_model(), rows)
    ids = torch.cat([row.ids for row in rows])[None]
    masks = torch.cat([torch.arange(len(row.ids)) >= row.prompt for row in rows])
    micro_batch: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(len(row.ids)) for row in rows])[None],
        "loss_mask": masks[None],
        "temperatures": torch.full(ids.shape, TEMPERATURE),
        "ce_weights": None,
    }
    if taught:
        own = torch.cat([torch.tensor(row.sampled) for row in rows])
        micro_batch["ce_weights"] = (masks ^ own)[None].float()
    model = sharded(frameworks.with_prime_head(make_model()))

    def after(broadcast: Any, version: int) -> None:
        assert (tmp_path / "broadcasts" / f"step_{version}" / "STABLE").is_file()
        if version == 0:
            rig.check_pushed(0, initial)
            connected(broadcast.bridge)
            return
        moved = {name: frameworks.whole(t) for name, t in model.state_dict().items()}
        assert not torch.equal(moved["lm_head.weight"], initial["lm_head.weight"])
        rig.check_pushed(1, moved)
        rig.check(broadcast.bridge, rows, before)

    loop = frameworks.PrimeLoop(model, [micro_batch], tmp_path, after)
    for name, module in frameworks.modules(loop).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("SLIPSTREAM_TRAINER", rig.address)
    run("prime-rl")


def test_openrlhf(rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows, data, asked, ran = some_rows(), padded(some_rows()), [], []
    policy = make_model()
    # A router's bias, which a checkpoint has and an optimizer has not.
    policy.model.layers[1].mlp.register_buffer("e_score_correction_bias", torch.ones(4))
    policy.save_pretrained(tmp_path / "policy")
    rig.rollout.restart()

    class Server(Completions):
        def answer(self, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
            asked.append(body)
            made = {"text": "a", "finish_reason": "length"}
            return 200, [choice([5, 6], [-1.0, -2.0]) | made]

    def cli(name: str, run_name: str) -> None:
        """``train`` of OpenRLHF's script, which looks both names up when it is run."""
        ran.append((name, run_name))
        place = sys.modules["openrlhf.trainer.ray"]
        engines = place.create_vllm_engines(1, 1, agent_func_path=None, remote_rm_url=None)
        remote = place.ppo_actor.PolicyModelActor
        assert remote._default_options["num_gpus"] == 1
        actor = remote.__ray_metadata__.modified_class()
        rollout = SimpleNamespace(temperature=TEMPERATURE, top_p=0.9)
        strategy = SimpleNamespace(args=SimpleNamespace(rollout=rollout))
        actor.init_model_from_pretrained(strategy, lambda: policy, None, engines)
        with connected(actor.bridge) as bridge:
            rig.check_pushed(0, dict(policy.state_dict()))
            found = actor.forward(data["sequences"], data["mask"], data["attention_mask"])
            assert found.shape == data["mask"].shape
            rig.check(bridge, rows, logits_of(make_model(), rows))
            if engines is not None:
                actor.broadcast_to_vllm()
            rig.check_pushed(1, dict(policy.state_dict()))
        derived = {"output_text_buffer_length": 3, "_all_stop_token_ids": (7,)}
        sampling = frameworks.SamplingParams(stop=["</a>"], seed=5, logprobs=1, **derived)
        answers = asyncio.run(engines[0].generate_responses([1, 2], sampling, num_samples=2))
        expected = {"observation_tokens": [1, 2, 5, 6], "rollout_log_probs": [-1.0, -2.0]}
        assert answers[1] == {**expected, "truncated": True, "text": "a"}
        sampling.presence_penalty = 1.0
        with pytest.raises(ValueError, match="presence_penalty"):
            asyncio.run(engines[0].generate_responses([1, 2], sampling))
        assert engines[0].get_num_unfinished_requests() == 0
        for method in ("sleep", "wake_up", "pause_generation", "resume_generation"):
            asyncio.run(getattr(engines[0], method)())

    actors, made = ray_of_one_process(monkeypatch), frameworks.limits_of_clients(monkeypatch)
    with serving(Server) as port:
        monkeypatch.setenv("SLIPSTREAM_TRAINER", rig.address)
        monkeypatch.setenv("SLIPSTREAM_ROLLOUTS", f"http://127.0.0.1:{port}")
        monkeypatch.setattr("runpy.run_module", cli)
        run("OpenRLHF")
    frameworks.check_limits(made)
    assert ran == [("openrlhf.cli.train_ppo_ray", "__main__")] and actors == ["SlipstreamEngine"]
    assert [(b["max_tokens"], b["stop"], b["seed"]) for b in asked] == [(16, ["</a>"], 5)] * 2
    assert next(iter(rig.trainer.samples.values())).sampling.top_p == pytest.approx(0.9)


def ray_of_one_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ray's actors are made here, when ``remote`` is called; the list has their classes."""
    import ray

    made: list[str] = []

    def remote(self: Any, *args: object, **named: object) -> Any:
        owner = self.__ray_metadata__.modified_class
        made.append(owner.__name__)
        return owner(*args, **named)

    monkeypatch.setattr(ray.actor.ActorClass, "remote", remote)
    return made


def test_megatron_pipeline(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, finals = frameworks.GPTModel(VOCAB, 32, 36), []
    rig.trainer.layers = (2, 18, 33)
    policy = StagedPolicy(model, 36, model.output_layer.weight, model.embedding.weight)
    config = BridgeConfig(trainer=rig.address, run_id="nemo-1", modules=StagedPolicy.PATHS)
    model.decoder.final_layernorm.register_forward_hook(lambda *call: finals.append(call[-1]))
    rows = some_rows()
    rows = [*rows, Row(rows[1].ids.flip(0), rows[1].prompt)]
    packs = ((rows[:2], True), (rows[2:], False))
    batches = [
        frameworks.processed([r.ids for r in part], [r.prompt for r in part], packed)
        for part, packed in packs
    ]
    with torch.no_grad():
        expected = [model(row.ids[None])[0] for row in rows]
    finals.clear()
    new_group = dist.new_group

    def of_a_pipeline(ranks: list[int], use_local_synchronization: bool = False) -> Any:
        assert use_local_synchronization, "another pipeline's ranks wait for a group of their own"
        return new_group(ranks, use_local_synchronization=True)

    monkeypatch.setattr(dist, "new_group", of_a_pipeline)

    @torch.no_grad()
    def get_logprobs(*, data: Sequence[frameworks.ProcessedMicrobatch]) -> None:
        for batch in data:
            model(batch.input_ids)

    with connected(PolicyBridge(policy, config)) as bridge:
        with bridge.sync(0):
            pass
        run(
            RECIPES[2],
            model=model,
            pipeline_ranks=[0],
            worker=SimpleNamespace(get_logprobs=get_logprobs),
            data=batches,
            micro_batches=batches,
            bridge=bridge,
            T=TEMPERATURE,
            generation={"top_p": 1.0, "top_k": None},
            finals=finals,
            policy=policy,
            whole=lambda h: h.transpose(0, 1),
        )
        rig.check(bridge, rows, expected)
    for sample in rig.trainer.samples.values():
        row = rig.trainer.tensor(sample, "aux")
        assert row.shape == (len(sample.token_ids), 3 * 32)
