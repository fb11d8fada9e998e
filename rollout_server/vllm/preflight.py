"""Checks that need no engine: paths, ports, environment, connectors (``served`` checks the draft).

vLLM finds most of these too, half a minute later and as a stack trace.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sysconfig
import tempfile
from typing import Any

from rollout_server.vllm.versions import older
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
    """Refuse prometheus_client's multi-process mode.

    In it vLLM's ``/metrics`` reads files that its own metrics write, and not the registry that
    holds Slipstream's.

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


_OFFLOADING = "OffloadingConnector"
_SALTED_CONNECTORS = frozenset(
    {
        "DecodeBenchConnector",
        "LMCacheMPConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "MultiConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        _OFFLOADING,
        "SimpleCPUOffloadConnector",
    }
)
"""The KV connectors that look blocks up by salted hashes, or move those of one request only."""


def check_connector(args: Any, version: str, draft_kind: str) -> None:
    """Refuse a KV connector that may give back keys and values of an older policy, or of no policy.

    At a policy commit ``cache_salt`` splits the prefix cache (``PrefixCacheSalt``). A connector
    that looks prefixes up by their tokens alone ignores it.

    Before vLLM 0.30 ``OffloadingConnector`` stores those of a drafted token that was rejected
    (https://github.com/vllm-project/vllm/pull/54288); later requests read them.

    Args:
        args: vLLM's, with ``allow_kv_connector``: accept an unknown connector.
        version: vLLM's.
        draft_kind: "none": no token is drafted.

    Raises:
        RefusedError: naming the connector.
    """
    config, option = args.kv_transfer_config, "--kv-transfer-config"
    named: list[tuple[str, str]] = []
    if config is not None:
        inner = (config.kv_connector_extra_config or {}).get("connectors", ())
        named = [(option, config.kv_connector), *((option, c.get("kv_connector")) for c in inner)]
    simple = os.environ.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "0") != "0"
    offloads = args.kv_offloading_size is not None and args.kv_offloading_backend == "native"
    if offloads and not simple:
        named.append(("--kv-offloading-size", _OFFLOADING))
    for option, name in named:
        if name == _OFFLOADING and draft_kind != "none" and older(version, "0.30"):
            raise RefusedError(
                option,
                f"kv_connector {name} with drafts on vLLM {version}",
                "vLLM 0.30 or newer: it stores keys and values of rejected drafts before",
                "use another connector or a newer vLLM, or serve with --draft-kind none",
            )
        if not args.allow_kv_connector and name not in _SALTED_CONNECTORS:
            raise RefusedError(
                option,
                f"kv_connector {name}",
                f"one of {', '.join(sorted(_SALTED_CONNECTORS))}",
                "use one of these; or --allow-kv-connector, where no policy is ever pushed",
            )
