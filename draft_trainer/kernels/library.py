"""Compiles the C files beside it for this processor, once per user, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.errors import RefusedError

Mode = Literal["auto", "on", "off"]

_SOURCES = ("score_rows.c", "causal.c", "step_keys.c", "rows.c")
# No -ffast-math: a NaN must come out as a NaN, because that is how a broken step is found.
_FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-loop-unroll-and-jam",
    "-fopenmp",
)
# With AVX-512, compilers prefer half of a register unless told otherwise.
_WIDE = "-mprefer-vector-width=512"
_RUN: dict[str, Any] = {"check": True, "capture_output": True, "text": True, "timeout": 120.0}
_mode: Mode = "off"


def use_kernels(mode: Mode) -> str:
    """Choose for this process whether the C kernels run: "auto" where they compile, "on" or "off".

    The results of a run are bit-identical only under the same choice.

    Returns:
        One line for a log: what runs, and what compiling took or why it was not possible.

    Raises:
        RefusedError: "on" and they do not compile here; nothing was changed.
    """
    global _mode
    if mode == "off":
        _mode = mode
        return "CPU kernels: plain torch, as configured"
    built = _built()
    if mode == "on" and built.functions is None:
        raise RefusedError(
            "training.cpu_kernels", built.said, "a C compiler that works", "install gcc, or auto"
        )
    _mode = mode
    return f"CPU kernels: {built.said}"


@contextmanager
def using_kernels(mode: Mode) -> Iterator[None]:
    """``use_kernels`` within a ``with`` block."""
    before = _mode
    use_kernels(mode)
    try:
        yield
    finally:
        use_kernels(before)


def runs_on(x: Tensor) -> bool:
    """Return whether the kernels run on tensors like ``x``: on a CPU, in float32 or bfloat16."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return False
    return _mode != "off" and _built().functions is not None


def run(name: str, *arguments: Tensor | Sequence[int] | int | float | None) -> None:
    """Call a kernel; its last argument, the number of threads, is torch's.

    Args:
        name: of the C function.
        arguments: tensors go by the address of their first element, sequences as int64_t arrays
            (of addresses, too), whole numbers as int64_t, others as float, None as null.
    """
    threads = ctypes.c_int64(torch.get_num_threads())
    getattr(_built().functions, name)(*map(_in_c, arguments), threads)


def _in_c(x: Tensor | Sequence[int] | int | float | None) -> object:
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, int):
        return ctypes.c_int64(x)
    if isinstance(x, float):
        return ctypes.c_float(x)
    return None if x is None else (ctypes.c_int64 * len(x))(*x)


@dataclass(frozen=True)
class _Built:
    """The kernels, or None; and a sentence that says where they come from or why there are none."""

    functions: ctypes.CDLL | None
    said: str


@cache
def _built() -> _Built:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return _Built(None, "plain torch, because there is no cc, gcc or clang")
    try:
        library, said = _compiled(compiler)
        functions = ctypes.CDLL(str(library))
    except subprocess.CalledProcessError as error:
        return _Built(None, f"plain torch, because {compiler} failed: {error.stderr[-300:]}")
    # A RuntimeError: the user has no home folder.
    except (subprocess.TimeoutExpired, OSError, RuntimeError) as error:
        return _Built(None, f"plain torch, because {error}")
    return _Built(functions, said)


def _compiled(compiler: str) -> tuple[Path, str]:
    """The library, from this user's cache or new, and where it comes from."""
    here = Path(__file__).parent
    flags, target = _flags(compiler)
    # The target is part of the name: a library for another processor would crash here.
    named = hashlib.sha256(f"{compiler} {flags} {target}".encode())
    for path in sorted(here.glob("*.[ch]")):
        named.update(path.read_bytes())
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    library = Path(cache_home) / "slipstream" / f"kernels-{named.hexdigest()[:32]}.so"
    if library.exists():
        _check_own(library)
        return library, f"compiled before by {compiler}"
    began = time.perf_counter()
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        sources = [str(here / name) for name in _SOURCES]
        subprocess.run(
            [compiler, *flags, "-shared", "-fPIC", "-o", str(made), *sources, "-lm"], **_RUN
        )
        # The linker leaves the umask's mode, which may let every user write it.
        made.chmod(0o700)
        # A rename, because several processes may compile at the same time.
        made.rename(library)
    return library, f"compiled by {compiler} in {time.perf_counter() - began:.1f} s"


def _flags(compiler: str) -> tuple[list[str], str]:
    """The flags this compiler takes, and its version and target as predefined macros."""

    def macros(*flags: str) -> str:
        command = [compiler, *flags, "-dM", "-E", "-x", "c", os.devnull]
        return str(subprocess.run(command, **_RUN).stdout)

    flags = list(_FLAGS)
    target = macros(*flags)
    if "__x86_64__" in target and "__AVX512F__" in target:
        try:
            return [*flags, _WIDE], macros(*flags, _WIDE)
        except subprocess.CalledProcessError:
            pass  # an old compiler that does not know the flag
    return flags, target


def _check_own(library: Path) -> None:
    """Raise OSError where another user could have written the code that is about to run."""
    for path in (library.parent, library):
        found = path.lstat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o002 or path.is_symlink():
            raise PermissionError(1, "not this user's alone: remove it", str(path))
