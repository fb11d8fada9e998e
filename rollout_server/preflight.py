"""Checks that need no engine: paths, ports, environment (``served`` checks the draft).

vLLM finds most of these too, half a minute later and as a stack trace.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sysconfig
import tempfile

from slipstream.errors import RefusedError


def check_paths() -> None:
    """Refuse an environment or a compiler cache at a path with a space.

    torch's inductor passes ``-L`` and source names to the C++ compiler unquoted, so the first
    request that asks for log-probs would end the engine; and LD_PRELOAD, which vLLM sets on CPUs,
    is split at a space. The model, the draft and the working directory may have spaces. Upstream:
    https://github.com/pytorch/pytorch/pull/191010

    Raises:
        RefusedError: naming the path.
    """
    packages = {name: importlib.util.find_spec(name) for name in ("torch", "vllm")}
    paths = {name: (spec.origin or "") if spec else "" for name, spec in packages.items()}
    paths["the Python library"] = sysconfig.get_config_var("LIBDIR") or ""
    for name, path in paths.items():
        if {" ", ":"} & set(path):
            raise RefusedError(
                f"path of {name}",
                path,
                "one without a space or colon (the C++ compiler's -L and LD_PRELOAD split there)",
                "make the environment elsewhere, or start its Python through a symbolic link "
                "whose path has none",
            )
    variable = "TORCHINDUCTOR_CACHE_DIR"
    cache = os.environ.get(variable) or tempfile.gettempdir()
    if " " in cache:
        raise RefusedError(
            variable if variable in os.environ else "TMPDIR",
            cache,
            "a path without a space",
            f"set {variable}",
        )


def check_metrics() -> None:
    """Refuse prometheus_client's setting for several processes.

    vLLM's ``/metrics`` then reads files that its metrics write, and not the registry that
    Slipstream's are in.

    Raises:
        RefusedError: naming the variable.
    """
    for variable in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        if variable in os.environ:
            raise RefusedError(variable, os.environ[variable], "not set", f"unset {variable}")


def check_port_free(option: str, host: str, port: int) -> None:
    """Refuse a port that cannot be bound now. 0 (any) always passes."""
    if not 0 <= port < 65536:
        raise RefusedError(option, port, "0 to 65535", "choose another port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise RefusedError(
                option, f"{host}:{port} ({error.strerror})", "a free address", "choose another port"
            ) from error
