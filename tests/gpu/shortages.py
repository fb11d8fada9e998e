"""The errors of a device without memory, and of one that has failed, as torch raises them."""

from __future__ import annotations

import torch

_ASYNCHRONOUS = "\nCUDA kernel errors might be asynchronously reported at some other API call"
_CUBLAS = "CUDA error: {} when calling `cublasCreate(handle)`"
SHORTAGES = ("allocator", "beside the allocator", "page-locked", "handle", "full", "cudnn")
"""Kinds of shortage, for ``shortage``."""


def device_error(code: int, text: str) -> RuntimeError:
    """A failed call of CUDA's runtime, with its code."""
    error = torch.AcceleratorError(f"CUDA error: {text}{_ASYNCHRONOUS}")
    error.error_code = code  # type: ignore[attr-defined]
    return error


def illegal_address() -> RuntimeError:
    """The error of every call on a device after an access that it could not serve."""
    return device_error(700, "an illegal memory access was encountered")


def shortage(kind: str) -> RuntimeError:
    """The error of one of ``SHORTAGES``."""
    match kind:
        case "allocator":
            return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 48.00 MiB")
        case "beside the allocator":
            return device_error(2, "out of memory")
        case "page-locked":
            # Before torch 2.8.
            return RuntimeError(f"CUDA error: out of memory{_ASYNCHRONOUS}")
        case "handle":
            return RuntimeError(_CUBLAS.format("CUBLAS_STATUS_ALLOC_FAILED"))
        case "full":
            return RuntimeError(_CUBLAS.format("CUBLAS_STATUS_NOT_INITIALIZED"))
        case _:
            return RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")
