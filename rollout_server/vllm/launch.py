"""``rollout-server serve``: checks the options, then runs vLLM's API server in this process.

Calls the server's run function instead of the ``vllm`` command: the command asks for the version of
a distribution named "vllm", which the CPU wheel is not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from rollout_server.control.draft_folder import read_config
from rollout_server.control.draft_length import launch_schedule, lengths_to_choose
from rollout_server.vllm import versions as vllm_versions
from rollout_server.vllm.plugins import API, MARK, Settings
from rollout_server.vllm.preflight import (
    check_connector,
    check_metrics,
    check_paths,
    check_port_free,
)
from rollout_server.vllm.served import SERVED, WithoutWeights, served_by
from slipstream.checkpoints import reading_config
from slipstream.errors import RefusedError
from slipstream.hub import local_folder
from slipstream.serving.identity import Access, Role, open_access

PLUGIN = "slipstream"
DRAFT_FIELDS = (
    "attention_backend",
    "disable_eagle_block_drop",
    "disable_padded_drafter_batch",
    "draft_tensor_parallel_size",
    "enforce_eager",
    "kv_cache_dtype",
    "max_model_len",
    "moe_backend",
)
"""The fields of vLLM's ``SpeculativeConfig`` that do not say which draft proposes how much."""

_MULTI_HOST = (
    *("rank", "start-rank", "hybrid-lb", "external-lb", "multi-port-external-lb", "address"),
)
"""Options ``--data-parallel-...`` of vLLM for ranks on several hosts."""

REMOVED = dict.fromkeys(
    ("--peer-token-file", "--peer-ca", "--peer-certificate", "--peer-key"),
    "leave it out: the trainer sends releases to every server",
)
"""Options that earlier editions had, and what to do instead."""

_CHILD_SECONDS = 10.0
_OTHER_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


def serve(arguments: Sequence[str]) -> int:
    """Check everything, then serve until a signal. Returns the exit status.

    Raises RefusedError: an option, a path, a checkpoint or a port cannot be used.
    """
    refuse_removed(arguments)
    check_paths()
    check_metrics()
    choose_plugins()
    share_with_ray()
    import uvloop
    from vllm.version import __version__ as vllm_version

    vllm_versions.check_version(vllm_version, untested=vllm_versions.OPTION in arguments)
    vllm_versions.check_hooks(vllm_version)
    vllm_versions.load("cli_env_setup")()
    args = build_parser().parse_args(list(arguments))
    API.settings = settings_of(args)
    vllm_versions.configure_logging(args)
    vllm_versions.load("validate_parsed_serve_args")(args)
    uvloop.run(_serve(args))
    return 0


def refuse_removed(arguments: Sequence[str]) -> None:
    """Raise RefusedError for an option of an earlier edition, which vLLM's parser does not know."""
    for option in (argument.partition("=")[0] for argument in arguments):
        if option in REMOVED:
            raise RefusedError(option, "an option that was removed", "none", REMOVED[option])


def choose_plugins() -> None:
    """Set ``VLLM_PLUGINS`` so that ours load and no other stops loading.

    Raises RefusedError: our entry points are not installed, so vLLM would start without us.
    """
    installed = {entry.name for entry in entry_points(group="vllm.endpoint_plugins")}
    if PLUGIN not in installed:
        raise RefusedError(
            f"entry point vllm.endpoint_plugins:{PLUGIN}", "none", "installed", "pip install -e ."
        )
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is None:
        # Unset means "all" to vLLM, except for endpoint plug-ins, which are opt-in.
        names = {entry.name for group in _OTHER_GROUPS for entry in entry_points(group=group)}
    else:
        names = {name for name in chosen.split(",") if name}
    os.environ["VLLM_PLUGINS"] = ",".join(sorted(names | {PLUGIN}))


def build_parser() -> Any:
    """vLLM's own parser, with Slipstream's options in front."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(
        prog="rollout-server serve",
        usage="rollout-server serve MODEL --draft DIR [options]",
        description="Serve MODEL (a checkpoint, or its name on the hub) with vLLM and a "
        "live-swappable draft. Every option of vLLM's server is accepted too: --help=all shows "
        "them, --help=slipstream shows Slipstream's.",
    )
    group = parser.add_argument_group("slipstream", "The draft and the control plane.")
    group.add_argument(
        "--draft",
        dest="draft_dir",
        type=Path,
        metavar="DIR",
        help="Checkpoint of the draft: config.json and model.safetensors; manifest.json, if there "
        "is one, gives its version.",
    )
    group.add_argument(
        "--draft-kind",
        choices=[*SERVED],
        help="How tokens are drafted; by default the kind of --draft. ngram (from the sequence's "
        "own tokens) and none are baselines without --draft; policies can be pushed to them too.",
    )
    group.add_argument(
        "--draft-sample-method",
        choices=["probabilistic", "greedy"],
        default=Settings.draft_sample_method,
        help="How the draft proposes tokens. probabilistic has the higher acceptance at "
        "temperature > 0.",
    )
    group.add_argument(
        "--speculation",
        choices=["auto", "fixed", "off"],
        help="auto, the default with a draft: the fastest draft length for each batch size, none "
        "included, from step times that are measured before the server is ready and from live "
        "acceptance; fixed: --draft-length tokens in every step; off: no drafts until the control "
        "plane turns them on.",
    )
    group.add_argument(
        "--control-host",
        default=Settings.control_host,
        help="Address of the control plane. Any but loopback needs a certificate and tokens.",
    )
    for option, default, what in (
        (
            "--draft-length",
            Settings.draft_length,
            "Tokens that the draft proposes per step (k); the maximum with --speculation auto.",
        ),
        ("--control-port", Settings.control_port, "Port of the gRPC control plane."),
        (
            "--stage-bytes",
            Settings.stage_bytes,
            "Bound in bytes on the weights that the host holds: live, previous and staged drafts "
            "and policies.",
        ),
        (
            "--guard-drafts",
            Settings.guard_drafts,
            "The server is not ready after this many verification steps without an accepted token.",
        ),
    ):
        group.add_argument(option, type=int, default=default, metavar="N", help=what)
    group.add_argument(
        "--shared-registry",
        type=Path,
        metavar="DIR",
        help="Folder of storage that is shared with the trainer (publish.shared_registry there): "
        "releases are read below it instead of being sent.",
    )
    group.add_argument(
        "--time-plain-steps",
        action="store_true",
        help="Turn drafting off for at most a second, once an hour for each number of requests in "
        "flight, to measure whether speculation pays.",
    )
    group.add_argument(
        "--allow-kv-connector",
        action="store_true",
        help="Accept a --kv-transfer-config whose connector is not known to separate the caches of "
        "successive policies.",
    )
    group.add_argument(
        "--draft-config",
        type=json.loads,
        default={},
        metavar="JSON",
        help=f"Fields of vLLM's speculative configuration: {', '.join(DRAFT_FIELDS)}.",
    )
    group.add_argument(
        vllm_versions.OPTION,
        action="store_true",
        help=f"Serve with a vLLM version outside {vllm_versions.KNOWN[0]} to "
        f"{vllm_versions.KNOWN[-1]}, if it has every name that is needed.",
    )
    add_access_options(group)
    return vllm_versions.load("make_arg_parser")(parser)


def settings_of(args: argparse.Namespace) -> Settings:
    """Check the options and put the speculative configuration into ``args``.

    Raises RefusedError: naming the option, directory or port at fault.
    """
    from vllm.version import __version__ as vllm_version

    _check_supported(args)
    if args.shared_registry is not None and not args.shared_registry.is_dir():
        expected, next_step = "a folder", "mount the storage first, or leave the option out"
        raise RefusedError("--shared-registry", args.shared_registry, expected, next_step)
    if args.model_tag is None:
        raise RefusedError("MODEL", "nothing", "a checkpoint", "name it after serve")
    access = access_of(args)
    # Requests name a model of the hub as the operator did, not by its folder.
    args.served_model_name = args.served_model_name or [args.model_tag]
    args.model_tag = str(local_folder(args.model_tag, "MODEL"))
    if args.draft_dir is not None:
        args.draft_dir = local_folder(args.draft_dir, "--draft")
        _check_policy(Path(args.model_tag))
    served = served_by(args.draft_kind, args.draft_dir)
    args.draft_kind = served.name
    if args.draft_dir is not None:
        with reading_config(args.draft_dir, "give the draft, and MODEL, as they were saved"):
            served.check(Path(args.model_tag), args.draft_dir)
    if served.runner_v2 and not _may_run_v2():
        expected = "a kind that vLLM's Model Runner V1 has: only V2, which needs Triton, has this"
        next_step = "serve on GPUs, without VLLM_USE_V2_MODEL_RUNNER=0, or use a dflash draft"
        raise RefusedError("--draft-kind", served.name, expected, next_step)
    online = args.quantization or getattr(args, "quantization_config", None)
    if online and served.name == "mtp":
        # vLLM builds the head with it, as with the quantization of a MODEL.
        option = "--quantization" if args.quantization else "--quantization-config"
        expected = "not given: an MTP head is not supported with a quantized MODEL"
        raise RefusedError(option, "given", expected, "leave it out, or use another draft kind")
    args.speculative_config = served.speculative_config(
        args.draft_dir, args.draft_length, args.draft_sample_method
    )
    check_connector(args, vllm_version, served.name)
    one_length = ""
    if args.data_parallel_size > 1:
        # vLLM ignores a schedule of draft lengths there.
        one_length = "fixed, with --data-parallel-size"
    elif (args.speculative_config or {}).get("parallel_drafting"):
        # Model Runner V1 samples the longest length whatever is planned; V2 has no such drafts.
        one_length = "fixed or off, with a draft model that drafts in parallel"
    if args.speculation is None:
        fixed = isinstance(served, WithoutWeights) or one_length
        args.speculation = "fixed" if fixed else Settings.speculation
    if isinstance(served, WithoutWeights) and args.speculation != "fixed":
        # vLLM counts the steps that had a draft: acceptance would be that of a part of them.
        expected = f"fixed, with --draft-kind {served.name}"
        raise RefusedError("--speculation", args.speculation, expected, "leave it out")
    if one_length and args.speculation == "auto":
        raise RefusedError("--speculation", "auto", one_length, "leave it out")
    args.host = args.host or "127.0.0.1"
    check_port_free("--port", args.host, args.port)
    check_port_free("--control-port", args.control_host, args.control_port)
    if args.port == args.control_port and args.port:
        expected = "another port than --port"
        raise RefusedError("--control-port", args.control_port, expected, "choose another port")
    args.model = args.model_tag
    args.api_server_count = None
    if not isinstance(served, WithoutWeights):
        args.speculative_config |= draft_fields(args.draft_config)
        auto = args.speculation == "auto"
        if auto or (not one_length and _may_run_v2()):
            lengths = lengths_to_choose(args.draft_length) if auto else (args.draft_length,)
            schedule = launch_schedule(lengths)
            args.speculative_config["num_speculative_tokens_per_batch_size"] = schedule
    given = {f.name: getattr(args, f.name) for f in fields(Settings) if f.name in args}
    return Settings(Path(args.model), access=access, **given)


def draft_fields(given: Any) -> dict[str, Any]:
    """Check what ``--draft-config`` adds to vLLM's speculative configuration.

    Raises RefusedError: not an object, or a field that is Slipstream's to set.
    """
    unknown = sorted(set(given) - set(DRAFT_FIELDS)) if isinstance(given, dict) else [given]
    if unknown:
        expected = f"an object with some of {', '.join(DRAFT_FIELDS)}"
        raise RefusedError("--draft-config", unknown[0], expected, "leave the others out")
    return dict(given)


def _may_run_v2() -> bool:
    """Return whether vLLM's workers may have Model Runner V2, which needs Triton.

    That runner captures decode graphs for the lengths in the schedule alone: without a 0 in it,
    steps with drafting off would run without graphs. V1 would give up full graphs for a schedule.
    """
    return os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0" and find_spec("triton") is not None


def _check_policy(folder: Path) -> None:
    config = read_config(folder, "MODEL")
    for key in ("eagle_aux_hidden_state_layer_ids", "draft_vocab_size"):
        if key in config:
            next_step = "give the policy as MODEL and the draft as --draft"
            raise RefusedError("MODEL", f"{folder}: {key}, so a draft", "the policy", next_step)


def _check_supported(args: argparse.Namespace) -> None:
    """Refuse values that are too small, and options of vLLM that do not work with Slipstream."""
    ours = "use --draft, --draft-kind, --draft-length and --draft-sample-method"
    one_host = "start all ranks with one command: staged weights are files of this host"
    for option, most, why in (
        ("--speculative-config", None, ours),
        *((f"--spec-{name}", None, ours) for name in ("method", "model", "tokens")),
        ("--headless", None, "serve with an API server"),
        ("--grpc", None, "serve the OpenAI API"),
        ("--uds", None, "serve on --port"),
        ("--disable-log-stats", None, "acceptance is counted from the stats"),
        ("--api-server-count", 1, "the control plane is in the API server"),
        *((f"--data-parallel-{name}", None, one_host) for name in _MULTI_HOST),
        ("--pipeline-parallel-size", 1, "use --tensor-parallel-size"),
        ("--nnodes", 1, one_host),
        ("--enable-eplb", None, "a push would put experts back where they were loaded"),
        ("--ec-transfer-config", None, "its store would keep an older policy's embeddings"),
        ("--watermark-config", None, "rollouts would not be samples of the policy"),
    ):
        found = getattr(args, option.removeprefix("--").replace("-", "_"), None)
        if found is not None and found is not False and (most is None or found > most):
            raise RefusedError(option, found, "not given" if most is None else most, why)
    if args.load_format == "ipc_cache":
        expected = "a format that loads weights into this server's own memory"
        next_step = "leave it out: a push would write into the memory of other servers"
        raise RefusedError("--load-format", args.load_format, expected, next_step)
    local = args.data_parallel_size_local
    if local not in (None, args.data_parallel_size) or args.data_parallel_backend != "mp":
        found = f"{local} with --data-parallel-backend {args.data_parallel_backend}"
        expected = f"{args.data_parallel_size}, all ranks, and mp"
        raise RefusedError("--data-parallel-size-local", found, expected, one_host)
    for option in ("--draft-length", "--stage-bytes", "--guard-drafts"):
        found = getattr(args, option.removeprefix("--").replace("-", "_"))
        if found < 1:
            raise RefusedError(option, found, "at least 1", "leave it out for the default")


_RAY_VARIABLES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def share_with_ray() -> None:
    """Have vLLM copy this process's mark to workers that Ray starts: without it the plug-ins do
    nothing there."""
    names = [name for name in os.environ.get(_RAY_VARIABLES, "").split(",") if name]
    os.environ[_RAY_VARIABLES] = ",".join(dict.fromkeys([*names, MARK]))


async def _serve(args: argparse.Namespace) -> None:
    # The two halves of vLLM's ``run_server``, with our handling of early signals between them.
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker, setup_server
    from vllm.utils.system_utils import decorate_logs

    handle_early_signals(API.closers)
    decorate_logs("APIServer", skip_if_decorated=True)
    try:
        listen_address, sock = setup_server(args, reuse_port=False)
        await run_server_worker(listen_address, sock, args)
    finally:
        if API.cost_watch is not None:
            await API.cost_watch.stop()
        if API.control_server is not None:
            await API.control_server.stop()
        for close in API.closers:
            close()


def handle_early_signals(closers: Iterable[Callable[[], None]]) -> None:
    """End the process on SIGTERM and SIGINT until vLLM's running API server replaces the handler.

    vLLM raises KeyboardInterrupt from its own handler during start-up, which gets lost under uvloop
    and pyzmq: the process starts all the same, or waits for an engine that was stopped.
    """
    from vllm.utils.system_utils import kill_process_tree

    def stop(number: int, frame: FrameType | None) -> None:
        children = multiprocessing.active_children()
        for child in children:
            child.terminate()
        for child in children:
            child.join(_CHILD_SECONDS)
            if child.is_alive():
                kill_process_tree(child.pid)  # Its workers hold the device's memory.
        for close in closers:
            close()
        # Not sys.exit: the interpreter would wait for vLLM's threads.
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def add_access_options(group: Any) -> None:
    """Register the options of access: files and names, never secrets."""
    for option, what in (
        ("--control-certificate", "PEM of the control plane's certificate; turns TLS on."),
        ("--control-key", "PEM of its private key."),
        ("--control-client-ca", "PEM of a CA; every client needs a certificate signed by it."),
    ):
        group.add_argument(option, type=Path, metavar="FILE", help=what)
    for option, value, what in (
        ("--control-token", "FILE", "File of tokens with"),
        ("--control-name", "NAME", "Name in client certificates (* for all) with"),
    ):
        text = f"{what} the role observe or operate. May be given several times."
        kind = {"action": "append", "default": [], "metavar": f"ROLE={value}"}
        group.add_argument(option, help=text, **kind)
    for option, what in (
        ("--control-allow-plaintext", "Listen on other addresses than loopback without TLS."),
        (
            "--control-allow-anonymous",
            "Listen there without authentication: every caller may replace the weights.",
        ),
    ):
        group.add_argument(option, action="store_true", help=what)


def access_of(args: argparse.Namespace) -> Access:
    """Make the control plane's check of its callers; everything is read and checked here.

    Raises:
        RefusedError: a file cannot be used, an option is given without another that it needs, or
            the control plane would listen on the network without TLS or without authentication.
    """
    tokens = _by_role("--control-token", args.control_token)
    return open_access(
        _access_option,
        args.control_host,
        certificate=args.control_certificate,
        key=args.control_key,
        client_ca=args.control_client_ca,
        tokens={role: [Path(path) for path in paths] for role, paths in tokens.items()},
        names=_by_role("--control-name", args.control_name),
        allow_plaintext=args.control_allow_plaintext,
        allow_anonymous=args.control_allow_anonymous,
    )


def _access_option(name: str) -> str:
    for suffix in ("token", "name"):
        if name.endswith(f"_{suffix}s"):
            return f"--control-{suffix}"
    return f"--control-{name.replace('_', '-')}"


def _by_role(option: str, given: list[str]) -> dict[Role, list[str]]:
    found: dict[Role, list[str]] = {role: [] for role in (Role.OBSERVE, Role.OPERATE)}
    for text in given:
        role, _, value = text.partition("=")
        if role not in found or not value:
            # Does not quote the text, which may be a token given in place of its file.
            raise RefusedError(
                option,
                "something else",
                f"ROLE=VALUE with a role of {', '.join(found)}",
                "name the role, then a file or a name; a token itself is never given here",
            )
        found[Role(role)].append(value)
    return found
