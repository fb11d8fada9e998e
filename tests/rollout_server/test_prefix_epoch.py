"""Prefix-cache hits stay on one side of a policy commit, with vLLM's own block hashes."""

from __future__ import annotations

import types

from rollout_server.engine_core import PrefixEpoch


def request(tokens: list[int], salt: str | None = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        all_token_ids=tokens,
        num_tokens=len(tokens),
        block_hashes=[],
        mm_features=[],
        lora_request=None,
        cache_salt=salt,
        prompt_embeds=None,
    )


def test_blocks_of_two_epochs_never_meet() -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    core = types.SimpleNamespace(request_block_hasher=get_request_block_hasher(4, sha256))
    epoch = PrefixEpoch(core)
    tokens = list(range(12))
    before = core.request_block_hasher(request(tokens))
    assert core.request_block_hasher(request(tokens)) == before and len(before) == 3

    running = request(tokens[:4])
    running.block_hashes = core.request_block_hasher(running)
    short = request(tokens[:2])
    assert core.request_block_hasher(short) == []

    epoch.advance()
    after = core.request_block_hasher(request(tokens))
    assert not set(after) & set(before)
    assert core.request_block_hasher(request(tokens)) == after
    assert core.request_block_hasher(request(tokens, salt="tenant"))[0] != after[0]

    # What was in flight fills its later blocks on its own side of the commit.
    for late in (running, short):
        late.all_token_ids, late.num_tokens = tokens, len(tokens)
        late.block_hashes += core.request_block_hasher(late)
        assert late.block_hashes == before


def test_without_prefix_caching_nothing_is_hooked() -> None:
    core = types.SimpleNamespace(request_block_hasher=None)
    PrefixEpoch(core).advance()
    assert core.request_block_hasher is None
