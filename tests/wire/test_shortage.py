"""The errors that count as a shortage of memory, and those that do not."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
import torch

from slipstream.shortage import is_shortage, raise_unless_shortage
from tests.gpu.shortages import SHORTAGES, device_error, illegal_address, shortage
from tests.test_layers import ROOT, modules


@pytest.mark.parametrize("kind", SHORTAGES)
def test_shortages_of_every_allocator_are_alike(kind: str) -> None:
    error = shortage(kind)
    assert is_shortage(error)
    raise_unless_shortage(error)


@pytest.mark.parametrize(
    "error",
    [
        illegal_address(),
        # A code decides, whatever the text around it says.
        device_error(719, "unspecified launch failure, after error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasGemmEx(...)`"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_other_failures_are_raised_as_they_are(error: RuntimeError) -> None:
    assert not is_shortage(error)
    with pytest.raises(RuntimeError) as raised:
        raise_unless_shortage(error)
    assert raised.value is error


def test_failed_device_is_no_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its libraries fail as on a full one; waiting for memory would be for ever."""
    failed = illegal_address()

    def query() -> bool:
        raise failed

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=query))
    with pytest.raises(RuntimeError) as raised:
        raise_unless_shortage(shortage("full"))
    assert raised.value is failed


@pytest.mark.parametrize("package", ["policy_bridge", "draft_trainer", "rollout_server"])
def test_no_handler_takes_one_kind_of_shortage_alone(package: str) -> None:
    alone = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules(ROOT / package)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and node.type is not None
        and "OutOfMemoryError" in ast.unparse(node.type)
    ]
    assert alone == [], "catch RuntimeError, and begin with raise_unless_shortage(error)"
