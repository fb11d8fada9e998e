"""Each policy version's lm_head, logit settings and embeddings."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draft_trainer.drafters.ops import product
from slipstream.errors import RefusedError, StatusCode
from slipstream.sampling import LogitForm
from slipstream.shortage import raise_unless_shortage
from slipstream.tensors import digest
from slipstream.v1 import release_pb2

_DEVICE_BYTES = 1 << 30
"""The bound on lm_head rows on a device: enough for several versions of a draft vocabulary's rows,
or for one version of a large policy's whole vocabulary."""


@dataclass(frozen=True, eq=False)
class PolicyHead:
    """The tensors and settings that the trainer needs of one policy version.

    Attributes:
        policy_version: the version.
        lm_head_rows: [draft_vocab, H], the policy's lm_head rows of the draft vocabulary, in
            the order of the draft ids.
        embed_tokens: [vocab, H], the policy's embeddings, which the draft head shares.
        lm_head_bias: [draft_vocab], bias of these rows; None where the policy's lm_head has none.
        form: what the policy does to the output of its lm_head.
    """

    policy_version: int
    lm_head_rows: Tensor
    embed_tokens: Tensor
    lm_head_bias: Tensor | None = None
    form: LogitForm = field(default_factory=LogitForm, kw_only=True)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are sent and kept: lm_head rows, embeddings and the bias, if any."""
        both = (self.lm_head_rows, self.embed_tokens)
        return both if self.lm_head_bias is None else (*both, self.lm_head_bias)


def policy_logits(hidden: Tensor, head: PolicyHead, dtype: torch.dtype) -> Tensor:
    """The policy's logits over the draft vocabulary, before temperature, rounded as it rounds them.

    Args:
        hidden: [N, H], final hidden states.
        head: their policy version's, on the same device.
        dtype: type of the policy's logits (``Sample.logits_dtype``).

    Returns:
        [N, draft_vocab], in ``dtype``; in float64 where the states are and ``dtype`` is float32.
    """
    rows, bias = head.lm_head_rows, head.lm_head_bias
    if dtype != torch.float32:
        # Under autocast the policy rounds its operands, too.
        hidden, rows = hidden.to(dtype), rows.to(dtype)
        if bias is None:
            # As in the policy itself: products are added up in float32 and rounded once.
            return head.form.apply(hidden @ rows.T)
        bias = bias.to(dtype)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = product(hidden.to(wide), rows.to(wide).T)
    if bias is not None:
        logits = logits + bias
    return head.form.apply(logits if dtype == torch.float32 else logits.to(dtype))


@dataclass(frozen=True, eq=False)
class _Copies:
    """Copies on a device; ``rows_of`` and ``bias_of`` are the originals."""

    rows_of: Tensor
    rows: Tensor
    bias_of: Tensor | None
    bias: Tensor | None

    @classmethod
    def made(cls, rows: Tensor, bias: Tensor | None, device: torch.device) -> _Copies:
        # The gate calls this in inference mode, whose tensors a training step could not use.
        with torch.inference_mode(False):
            return cls(rows, rows.to(device), bias, None if bias is None else bias.to(device))


class PolicyHeads:
    """The newest policy versions, bounded in number; equal matrices are held once.

    A policy whose embeddings are frozen, or tied, costs its matrices once and not once per
    version. Thread-safe.

    Args:
        keep: how many versions to hold, at least 1.

    Attributes:
        keep: the same.
    """

    def __init__(self, keep: int) -> None:
        if keep < 1:
            raise RefusedError("keep", keep, "at least 1", "hold at least one policy version")
        self.keep = keep
        self._lock = threading.RLock()
        self._heads: dict[int, PolicyHead] = {}
        self._digests: dict[int, tuple[bytes, ...]] = {}
        self._on_device: OrderedDict[tuple[int, torch.device], _Copies] = OrderedDict()

    def add(self, head: PolicyHead, digests: tuple[bytes, ...] | None = None) -> None:
        """Register a version.

        Args:
            head: the version.
            digests: what ``digests`` returns for it, if they are computed already.

        Raises:
            RefusedError: the version is not higher than every one added before.
        """
        digests = digests or tuple(map(digest, head.tensors))
        with self._lock:
            self.check_newer(head.policy_version)
            held = self._by_digest()
            tensors = (held.get(*pair) for pair in zip(digests, head.tensors, strict=True))
            kept = PolicyHead(head.policy_version, *tensors, form=head.form)
            self._heads[head.policy_version] = kept
            self._digests[head.policy_version] = digests
            for version in sorted(self._heads)[: -self.keep]:
                del self._heads[version], self._digests[version]
            rows = {id(head.lm_head_rows) for head in self._heads.values()}
            for key in [key for key in self._on_device if key[0] not in rows]:
                del self._on_device[key]

    def check_newer(self, version: int) -> None:
        """Raise RefusedError unless ``add`` would take this version now."""
        with self._lock:
            newest = max(self._heads, default=-1)
        if version <= newest:
            advice = "number policy versions in ascending order; a new run starts again at 0"
            code = StatusCode.FAILED_PRECONDITION
            raise RefusedError("policy_version", version, f"higher than {newest}", advice, code)

    def get(self, version: int) -> PolicyHead:
        """The matrices of a version. Raises RefusedError when it is not held."""
        with self._lock:
            self._check(version)
            return self._heads[version]

    def on(self, head: PolicyHead, device: torch.device) -> PolicyHead:
        """Return a version with its lm_head on a device; its embeddings stay where they are.

        Rows are copied once and kept there while they are among the last that were asked for.
        """
        of, bias = head.lm_head_rows, head.lm_head_bias
        if of.device == device:
            return head
        with self._lock:
            key = (id(of), device)
            if key not in self._on_device or self._on_device[key].bias_of is not bias:
                self._on_device.pop(key, None)
                while self._on_device and self._device_bytes() + of.nbytes > _DEVICE_BYTES:
                    self._on_device.popitem(last=False)
                try:
                    copies = _Copies.made(of, bias, device)
                except RuntimeError as error:
                    raise_unless_shortage(error)
                    # Rows of other versions take the space, and can be copied again.
                    self._on_device.clear()
                    copies = _Copies.made(of, bias, device)
                self._on_device[key] = copies
            self._on_device.move_to_end(key)
            there = self._on_device[key]
        return replace(head, lm_head_rows=there.rows, lm_head_bias=there.bias)

    def _device_bytes(self) -> int:
        return sum(copies.rows.nbytes for copies in self._on_device.values())

    def digests(self, version: int) -> tuple[bytes, ...]:
        """SHA-256 of every tensor of ``PolicyHead.tensors``. Raises RefusedError as ``get``."""
        with self._lock:
            self._check(version)
            return self._digests[version]

    def tensor(self, sha256: bytes) -> Tensor | None:
        """A held matrix with this SHA-256 over its bytes, or None: it need not be sent again."""
        with self._lock:
            return self._by_digest().get(sha256)

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions held, oldest first."""
        with self._lock:
            return tuple(sorted(self._heads))

    def __contains__(self, version: object) -> bool:
        with self._lock:
            return version in self._heads

    def _check(self, version: int) -> None:
        if version not in self._heads:
            found, code = f"one of {sorted(self._heads)}", StatusCode.FAILED_PRECONDITION
            advice = f"send samples before {self.keep} newer policy versions are registered"
            reason = release_pb2.REFUSAL_REASON_POLICY_FORGOTTEN
            raise RefusedError("policy_version", version, found, advice, code, reason)

    def _by_digest(self) -> Mapping[bytes, Tensor]:
        held: dict[bytes, Tensor] = {}
        for version, head in self._heads.items():
            held.update(zip(self._digests[version], head.tensors, strict=True))
        return held
