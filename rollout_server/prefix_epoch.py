"""Keeps prefix-cache hits on one side of a policy commit.

A cached block holds keys and values of the weights that computed it. vLLM can
only drop the whole cache while no request runs, or by preempting all of them.
Here every request gets the number of policy commits so far as a salt of its
block hashes (vLLM's own ``cache_salt``): a request that arrives after a commit
never hits a block from before it, requests in flight keep their blocks and go
on, and old blocks leave by the cache's usual eviction.

The salt is given once, when the engine takes the request, so that the blocks
that an older request fills later stay on its own side.
"""

from __future__ import annotations

from typing import Any

_TAKEN = "_slipstream_epoch"


class PrefixEpoch:
    """Salts the block hashes of one engine core.

    Args:
        engine_core: vLLM's ``EngineCore``; nothing is hooked when it caches no prefixes.
    """

    def __init__(self, engine_core: Any) -> None:
        self.epoch = 0
        self._hash = engine_core.request_block_hasher
        if self._hash is not None:
            engine_core.request_block_hasher = self._hash_salted

    def advance(self) -> None:
        """From now on new requests hit no block that exists."""
        self.epoch += 1

    def _hash_salted(self, request: Any) -> Any:
        if not hasattr(request, _TAKEN):
            setattr(request, _TAKEN, self.epoch)
            if self.epoch:
                # The user's own salt still separates tenants within an epoch.
                request.cache_salt = f"slipstream-{self.epoch}:{request.cache_salt or ''}"
        return self._hash(request)
