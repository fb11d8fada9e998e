"""vLLM's own block drafts, whose loader derives tensors of the parameters: a swap has them too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from draft_trainer.checkpoints import read_policy
from draft_trainer.drafters import DRAFTERS
from draft_trainer.drafters.initial import init_dflash
from rollout_server.vllm.served.derived import derived, unaccounted
from rollout_server.vllm.swap import NotSwappableError, StandbyCopy, standby_bytes
from tests.rollout_server.drafts import Drafts, check_failed_commits, check_swaps, different

DERIVED = {
    "model._fused_kv_weight": (2 * 2 * 2 * 32, 192),
    "model._k_norm_weights": (2, 32),
    "model._hidden_norm_weight": (192,),
}
"""The sizes for two layers with two key heads of 32; the example's policy has no bias."""


def load(policy_dir: Path, releases: list[Path]) -> Drafts:
    """vLLM's module of the first release; the lm_head is the verifier's."""
    made = Drafts(policy_dir, releases, releases[0].parent.name)
    made.draft.lm_head = made.policy.lm_head = nn.Identity()
    return made


@pytest.fixture(scope="module", params=["dflash", "dspark"])
def releases(
    request: pytest.FixtureRequest, policy_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    folder = tmp_path_factory.mktemp("releases") / request.param
    policy, rank = read_policy(policy_dir), 8 if request.param == "dspark" else None
    paths = [folder / str(seed) for seed in range(3)]
    for seed, path in enumerate(paths):
        draft = init_dflash(policy, 127, markov_rank=rank, seed=seed)
        with torch.no_grad():
            for parameter in draft.parameters():
                # The norms too: those of a new draft are ones.
                parameter.mul_(1.0 + 0.1 * seed)
        path.mkdir(parents=True)
        DRAFTERS[draft.kind].save(path, draft)
    return paths


@pytest.fixture(scope="module")
def drafts(policy_dir: Path, releases: list[Path]) -> Iterator[Drafts]:
    from vllm.distributed import cleanup_dist_env_and_memory

    yield load(policy_dir, releases)
    cleanup_dist_env_and_memory()


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


def test_swap_replaces_derived_tensors(
    drafts: Drafts, policy_dir: Path, releases: list[Path]
) -> None:
    expected = [load(policy_dir, [path]).outputs() for path in releases]
    assert DERIVED.keys() < set(different(expected[0], expected[1]))
    check_swaps(drafts, expected, drafts.draft.model._k_norm_weights)  # type: ignore[arg-type,union-attr]


def test_failed_commit_keeps_derived_tensors(drafts: Drafts) -> None:
    check_failed_commits(drafts)


def test_standby_copy_without_derived_tensors_is_refused(
    drafts: Drafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vLLM whose load_weights no longer derives them would leave such a copy."""
    monkeypatch.setattr(type(drafts.draft.model), "_build_fused_kv_buffers", lambda self: None)
    copy = StandbyCopy(drafts.policy, drafts.draft)
    copy.load(drafts.sources[1].weights())
    with pytest.raises(NotSwappableError, match=r"_fused_kv_weight was not derived"):
        copy.pairs()
