"""The programs that the documentation's shell blocks call, real as far as seconds reach.

``main`` is a process that has torch and the product loaded. Every file in the reader's ``bin`` is
the same small client: it hands its name, arguments, folder, environment and streams over, a fork of
the process does the work on them, and the client ends with its exit status.

Real: every draft-trainer command and every call to a gRPC service. ``draft-trainer serve`` takes
free ports and is sent SIGTERM when it is ready. ``rollout-server`` stops where it would start vLLM,
and ``python -m`` once it has parsed its options.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from rollout_server.vllm import versions as vllm_versions
from slipstream.errors import RefusedError

ASKING = ("status", "doctor", "events", "releases")
"""draft-trainer commands that ask the trainer on the default port, here the one in $TRAINER."""
DEADLINE = 60.0
CLIENT = """\
#!{python} -IS
import json, os, socket, sys
asked = json.dumps([sys.argv,  os.getcwd(), dict(os.environ)])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    socket.send_fds(server, [asked.encode()], [0, 1, 2])
    sys.exit(int(server.recv(16) or 70))
"""
NODE = "10.0.0.11"
MOST_BYTES = 1 << 17


def python(arguments: list[str]) -> int:
    """``python -m MODULE ...``: up to the parsed options."""
    assert arguments[0] == "-m", arguments
    module, *given = arguments[1:]
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(*positional: Any, **named: Any) -> NoReturn:
        parse(*positional, **named)
        print(f"{module}: understood")
        raise SystemExit(0)

    sys.argv = [module, *given]
    argparse.ArgumentParser.parse_args = parse_and_stop  # type: ignore[assignment, method-assign]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise AssertionError(f"{module} ended without having parsed {given}")


def draft_trainer(arguments: list[str]) -> int:
    """The console script."""
    from draft_trainer.cli import run

    if arguments[0] in ASKING and "--address" not in arguments:
        arguments = [*arguments, "--address", os.environ["TRAINER"]]
    sys.argv = ["draft-trainer", *arguments]
    if arguments[0] != "serve" or "--check" in arguments:
        return run()
    sys.argv += [word for key in ("port", "metrics_port") for word in ("--set", f"server.{key}=0")]
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writing, 1)
        os.close(reading)
        os.close(writing)
        _end(run)
    os.close(writing)
    with os.fdopen(reading) as output:
        ready = output.readline()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        print(ready, output.read())
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if ready.startswith("draft-trainer ready:") else status or 1


def rollout_server(arguments: list[str]) -> int:
    """Every check up to the start of vLLM, with vLLM's own parser; ports may be taken."""
    from rollout_server.ray import fleet as ray_fleet
    from rollout_server.vllm import launch

    command, *given = arguments
    if command == "fleet":
        options, given = ray_fleet.build_parser().parse_known_args(given)
        assert options.replicas > 0 and options.members.resolve().parent.is_dir(), options
        # Of a node of a cluster, as the fleet does for each replica.
        host = options.host or NODE
        given += ["--host", host, "--control-host", host]
    else:
        assert command == "serve", command
    launch.check_port_free = lambda *_: None
    try:
        launch.settings_of(launch.build_parser().parse_args(given))
    except RefusedError as error:
        print(f"rollout-server: {error}", file=sys.stderr)
        return 2
    return 0


def grpcurl(arguments: list[str]) -> int:
    """The call, with what the server's reflection says of it."""
    parser = argparse.ArgumentParser(prog="grpcurl")
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-d", default="{}")
    parser.add_argument("address")
    parser.add_argument("method")
    options = parser.parse_args(arguments)
    with grpc.insecure_channel(options.address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        service, _, name = options.method.partition("/")
        method = pool.FindServiceByName(service).methods_by_name[name]
        request = json_format.Parse(options.d, GetMessageClass(method.input_type)())
        call = channel.unary_unary(
            f"/{options.method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        print(json_format.MessageToJson(call(request, timeout=DEADLINE)))
    return 0


def grpc_health_probe(arguments: list[str]) -> int:
    """The call."""
    parser = argparse.ArgumentParser(prog="grpc_health_probe")
    parser.add_argument("-addr", required=True)
    with grpc.insecure_channel(parser.parse_args(arguments).addr) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        state = stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE).status
    return int(state != health_pb2.HealthCheckResponse.SERVING)


PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    **{"python": python, "draft-trainer": draft_trainer, "rollout-server": rollout_server},
    **{"grpcurl": grpcurl, "grpc_health_probe": grpc_health_probe},
}


def _end(work: Callable[[], int]) -> NoReturn:
    """The end of a forked process."""
    # Those of the process before remember what kind of file they were opened on.
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    status: Any = 1
    try:
        status = work()
    except SystemExit as ended:
        status = ended.code
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def _import_for(name: str, arguments: Sequence[str]) -> None:
    """Import what each fork would import; the fork reports errors."""
    with suppress(ImportError):
        if name == "python":
            package = importlib.import_module(arguments[1])
            if hasattr(package, "__path__"):
                importlib.import_module(f"{package.__name__}.__main__")
        elif name == "rollout-server":
            vllm_versions.load("make_arg_parser")


def write_clients(folder: Path, path: str) -> None:
    """A file for each program."""
    folder.mkdir(parents=True)
    for name in PROGRAMS:
        (folder / name).write_text(CLIENT.format(python=sys.executable, path=path))
        (folder / name).chmod(0o755)


def main(number: int) -> None:
    """Serve clients at the listening socket of that descriptor, one at a time, until SIGTERM."""
    for module in ("transformers", "draft_trainer.server.app", "rollout_server.vllm.launch"):
        importlib.import_module(module)
    with socket.socket(fileno=number) as listener:
        while True:
            connection, _ = listener.accept()
            asked, streams, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
            (program, *arguments), folder, environment = json.loads(asked)
            _import_for(Path(program).name, arguments)
            child = os.fork()
            if not child:
                listener.close()
                for standard, stream in enumerate(streams):
                    os.dup2(stream, standard)
                os.environ.clear()
                os.environ.update(environment)
                os.chdir(folder)
                _end(functools.partial(PROGRAMS[Path(program).name], arguments))
            for stream in streams:
                os.close(stream)
            _, status = os.waitpid(child, 0)
            connection.send(str(os.waitstatus_to_exitcode(status) % 256).encode())
            connection.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
