"""Tells a shortage of a device's memory, or of page-locked memory, from any other failure.

What torch's own allocator cannot give is ``torch.OutOfMemoryError``. Handles and workspaces of
cuBLAS and cuDNN, page-locked memory, events, and kernels that are loaded when they are first used
are allocated beside it. Where another process fills the device these fail with other errors, and
what is short then may be there a second later.
"""

from __future__ import annotations

import torch

_OUT_OF_MEMORY = 2
"""``cudaErrorMemoryAllocation``, ``CUDA_ERROR_OUT_OF_MEMORY`` and ``hipErrorOutOfMemory``."""

# Failures of libraries, and before ``torch.AcceleratorError`` (2.8) all that are not of torch's
# allocator, are plain RuntimeErrors without a code: only their words tell them apart. See
# https://github.com/pytorch/pytorch/issues/128601, and of ``cublasCreate`` on a full device
# https://discuss.pytorch.org/t/125450.
_WORDS = (
    "error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)


def is_shortage(error: BaseException) -> bool:
    """Return whether an error says that memory of a device, or page-locked memory, is too little.

    The one place where words of a message decide: torch gives nothing else.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    code = getattr(error, "error_code", None)
    if isinstance(code, int):
        return code == _OUT_OF_MEMORY
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def raise_unless_shortage(error: RuntimeError) -> None:
    """Return if an error is a shortage, for a handler that makes do with less.

    Raises:
        RuntimeError: ``error`` itself, which is none; or torch.AcceleratorError: the device has
            failed for good (an illegal address, for example), and ``error`` is what a library makes
            of that.
    """
    if not is_shortage(error):
        raise error
    if torch.cuda.is_initialized():
        # Waits for nothing.
        torch.cuda.current_stream().query()
