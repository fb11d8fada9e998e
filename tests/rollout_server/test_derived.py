"""vLLM's own DFlash draft, whose loader derives tensors of the parameters: a swap has them too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from draft_trainer.checkpoints import read_policy
from draft_trainer.drafters import DRAFTERS
from draft_trainer.drafters.initial import init_dflash
from rollout_server.reload import Change, LiveModel, apply_all
from rollout_server.served.derived import derived, unaccounted
from rollout_server.standby import DIFFERS, SAME, Standby
from rollout_server.swap import NotSwappableError, StandbyCopy, standby_bytes, swap_contents
from tests.rollout_server.test_swap import Drafts, different, join, ready, torn_weights

DERIVED = {
    "model._fused_kv_weight": (2 * 2 * 2 * 32, 192),
    "model._k_norm_weights": (2, 32),
    "model._hidden_norm_weight": (192,),
}
"""Of two layers with two key heads of 32; the example's policy has no bias."""


@pytest.fixture(scope="module")
def drafts(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafts]:
    from vllm.distributed import cleanup_dist_env_and_memory

    folder, policy = tmp_path_factory.mktemp("dflash"), read_policy(policy_dir)
    releases = []
    for seed in range(3):
        draft = init_dflash(policy, 127, seed=seed)
        with torch.no_grad():
            for parameter in draft.parameters():
                # The norms too: those of a new draft are ones.
                parameter.mul_(1.0 + 0.1 * seed)
        releases.append(folder / str(seed))
        releases[-1].mkdir()
        DRAFTERS["dflash"].save(releases[-1], draft)
    made = Drafts(policy_dir, releases, "dflash")
    # The verifier's: what vLLM made for the draft was never loaded.
    made.draft.lm_head = made.policy.lm_head = nn.Identity()
    yield made
    cleanup_dist_env_and_memory()


def fresh(drafts: Drafts, release: int) -> dict[str, torch.Tensor]:
    """What the release's tensors say that vLLM derives."""
    weights = dict(drafts.sources[release].weights())
    parts = (f"layers.{i}.self_attn.{part}_proj.weight" for i in range(2) for part in "kv")
    norms = [weights[f"layers.{i}.self_attn.k_norm.weight"] for i in range(2)]
    return {
        "model._fused_kv_weight": torch.cat([weights[part] for part in parts]),
        "model._k_norm_weights": torch.stack(norms),
        "model._hidden_norm_weight": weights["hidden_norm.weight"],
    }


def live(drafts: Drafts, standby: Standby) -> LiveModel:
    return LiveModel(drafts.draft, drafts.model_config, standby)


def check(drafts: Drafts, release: int) -> None:
    """Everything that is derived is of this release, and so is what was hashed."""
    assert not different(dict(derived(drafts.draft)), fresh(drafts, release))
    assert drafts.read_back.check() == SAME


def test_derived_tensors_are_accounted_for(drafts: Drafts) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in derived(drafts.draft)}
    assert found == DERIVED
    assert unaccounted(drafts.policy, drafts.draft) == []
    more = torch.zeros(3)
    drafts.draft.model._more = more  # type: ignore[union-attr,assignment]
    assert unaccounted(drafts.policy, drafts.draft) == ["model._more"]
    del drafts.draft.model._more  # type: ignore[union-attr]

    class Another(type(drafts.draft.model)):  # type: ignore[misc]
        """A subclass: nobody knows what else its loader makes."""

    mine = drafts.draft.model
    drafts.draft.model.__class__ = Another
    assert unaccounted(drafts.policy, drafts.draft) == sorted(DERIVED)
    mine.__class__ = Another.__mro__[1]  # type: ignore[assignment]
    own = sum(p.nbytes for n, p in drafts.draft.named_parameters() if "embed_tokens" not in n)
    assert standby_bytes(drafts.policy, drafts.draft) == 2 * (
        own + sum(tensor.nbytes for _, tensor in derived(drafts.draft))
    )


def test_swap_replaces_derived_tensors(drafts: Drafts) -> None:
    standby = drafts.standby()
    check(drafts, 0)
    first = drafts.outputs()
    zero, one, two = drafts.sources
    ready(standby, one)
    assert not different(drafts.outputs(), first), "preparing changes nothing"
    check(drafts, 0)
    assert standby.swap(one, zero)
    check(drafts, 1)
    assert len(different(drafts.outputs(), first)) >= 6
    join()
    assert standby.swap(zero, one), "what was live is ready again"
    check(drafts, 0)
    assert not different(drafts.outputs(), first)
    drafts.draft.model._k_norm_weights[0, 0] += 1.0  # type: ignore[union-attr,operator,index]
    assert drafts.read_back.check() == DIFFERS
    # Without a copy the commit loads one: a reload would leave an empty projection.
    standby.drop()
    with drafts.current():
        result = apply_all([(Change("draft", two, zero), live(drafts, standby))])
    assert (result.error, result.restored) == ("", True)
    check(drafts, 2)
    with drafts.current():
        result = apply_all([(Change("draft", zero, zero), live(drafts, standby))])
    assert result.error == ""
    check(drafts, 0)


def test_failed_commit_keeps_derived_tensors(drafts: Drafts) -> None:
    """Where the weights are gone, and where a policy fails after the draft was swapped."""
    standby = drafts.standby()
    zero, one, _ = drafts.sources
    gone = torn_weights(drafts)
    with drafts.current():
        result = apply_all([(Change("draft", gone, zero), live(drafts, standby))])
    assert "No such file" in result.error and result.restored
    check(drafts, 0)
    ready(standby, one)
    policy = LiveModel(drafts.policy, drafts.model_config)
    drafts.policy.load_weights = lambda weights: list(weights)  # type: ignore[assignment]
    changes = [
        (Change("draft", one, zero), live(drafts, standby)),
        (Change("policy", gone, gone), policy),
    ]
    with drafts.current():
        result = apply_all(changes)
    assert result.error.startswith("policy: ")
    check(drafts, 0)


def test_standby_copy_without_derived_tensors_is_refused(
    drafts: Drafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a vLLM would whose load_weights no longer does."""
    monkeypatch.setattr(type(drafts.draft.model), "_build_fused_kv_buffers", lambda self: None)
    copy = StandbyCopy(drafts.policy, drafts.draft)
    copy.load(drafts.sources[1].weights())
    with pytest.raises(NotSwappableError, match=r"_fused_kv_weight was not derived"):
        copy.pairs()


def test_two_names_of_one_tensor_are_swapped_once() -> None:
    """Below the size up to which contents are copied, and above it, where memory is exchanged."""
    for size in (8, 1 << 15):
        mine, other = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.ones(size))
        alias, others = mine.data, other.data
        with torch.no_grad():
            swap_contents([(mine, other), (alias, others)])
        assert bool((mine == 1).all()) and bool((alias == 1).all())
        assert bool((other == 0).all()) and bool((others == 0).all())
        mine.data[0] = 5.0
        assert float(alias[0]) == 5.0, "it is still one tensor"
