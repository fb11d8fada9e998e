"""The programs that the documentation's shell blocks call, real as far as seconds reach.

``main`` is a process that has torch and the product loaded. Every file in the reader's ``bin`` is
the same small client: it hands its name, arguments, folder, environment and streams over, a fork of
the process does the work on them, and the client ends with its exit status.

Real: every draft-trainer command, make's reading of its Makefile, kubectl's reading of overlays and
secrets, calls to gRPC services and what ``RUN`` names. ``draft-trainer serve`` takes free ports and
is sent SIGTERM when it is ready. Of all other programs the options are parsed by their own parsers
and the files that they name are read; then they stop, and leave empty what they would write.
"""

from __future__ import annotations

import argparse
import base64
import functools
import importlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import grpc
import yaml
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from packaging.requirements import Requirement

from rollout_server import vllm_versions
from slipstream.errors import RefusedError
from tests.deploy.test_docker import stages

RUN = ("benchmarks.plan_published", "benchmarks.gpu.pack")
"""Modules that ``python -m`` runs to their end."""
OUTPUTS = ("json", "out")
"""Options of modules whose file or folder need not be there before."""
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
POLICY = "your-registry/policy:1"
"""The reader's own image."""
MOST_BYTES = 1 << 17


def python(arguments: list[str]) -> int:
    """``python -m MODULE ...``: up to the parsed options, or to its end."""
    assert arguments[0] == "-m", arguments
    module, *given = arguments[1:]
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(*positional: Any, **named: Any) -> NoReturn:
        check_files(parse(*positional, **named), given)
        print(f"{module}: understood")
        raise SystemExit(0)

    sys.argv = [module, *given]
    if module in RUN:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    argparse.ArgumentParser.parse_args = parse_and_stop  # type: ignore[assignment, method-assign]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise AssertionError(f"{module} ended without having parsed {given}")


def check_files(options: argparse.Namespace, given: Sequence[str]) -> None:
    """Files to read are there; those to write are left empty for the commands after it."""
    for name, value in vars(options).items():
        if name in OUTPUTS and str(value) in given:
            path = Path(value)
            if path.suffix:
                assert path.absolute().parent.is_dir(), f"no folder for {path}"
                path.touch()
            else:
                path.mkdir(parents=True)
        elif isinstance(value, Path) and str(value) in given:
            assert value.exists(), f"{name}: {value} does not exist"


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
    from rollout_server import launch, ray_fleet

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


def torchrun(arguments: list[str]) -> int:
    """Torch's parser, then one process."""
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(arguments)
    assert options.module and int(options.nproc_per_node) > 1, options
    return python(["-m", options.training_script, *options.training_script_args])


def ray(arguments: list[str]) -> int:
    """Ray's parser; a cluster's file is read, a job's command is run here."""
    from ray.scripts.scripts import cli

    options, _, job = " ".join(arguments).partition(" -- ")
    words, command = options.split() + ["--"] * bool(job) + job.split(), cli
    context = None
    while hasattr(command, "resolve_command"):
        context = command.make_context(command.name, words, parent=context)
        rest = [*getattr(context, "_protected_args", []), *context.args]
        _, command, words = command.resolve_command(context, rest)
    values = command.make_context(command.name, words, parent=context).params
    if command.name == "up":
        assert {"cluster_name", "provider"} <= yaml.safe_load(
            Path(values["cluster_config_file"]).read_text()
        ).keys()
        return 0
    assert (command.name, list(values["entrypoint"])) == ("submit", job.split())
    program, *given = job.split()
    return PROGRAMS[program](given)


def pip(arguments: list[str]) -> int:
    """pip's parser; small files in place of the wheels."""
    from pip._internal.commands import create_command

    options, packages = create_command(arguments[0]).parse_args(arguments[1:])
    assert arguments[0] == "download" and packages
    Path(options.download_dir).mkdir(exist_ok=True)
    for requirement in map(Requirement, packages):
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        name = f"{requirement.name}-{pin.version}-py3-none-any.whl"
        (Path(options.download_dir) / name).write_bytes(b"wheel" * 1000)
    return 0


def make(arguments: list[str]) -> int:
    """make itself with -n; the modules of the examples that it would start, up to their options."""
    done = _real("make", "-n", *arguments)
    for line in re.findall(r"python (-m examples\..*)", done):
        python(line.split())
    return 0


def docker(arguments: list[str]) -> int:
    """``build``: the stage and what is copied into it; ``compose up``: services and their files.

    ``tag`` and ``push``: of images that were built; those that are there are lines of .images.
    """
    parser = argparse.ArgumentParser(prog="docker")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build")
    for option in ("-f", "--target", "-t"):
        build.add_argument(option, dest=option.strip("-"), required=True)
    build.add_argument("context", type=Path)
    commands.add_parser("tag").add_argument("names", nargs=2)
    commands.add_parser("push").add_argument("names", nargs=1)
    compose = commands.add_parser("compose")
    for option in ("-p", "-f", "--profile"):
        compose.add_argument(option, dest=option.strip("-"), required=True)
    compose.add_argument("do", choices=["up"])
    compose.add_argument("--build", action="store_true")
    options = parser.parse_args(arguments)
    if options.command in ("tag", "push"):
        given, made = options.names[0], options.names[-1]
        assert given in _images(), f"no image {given}"
        _images(made if options.command == "tag" else f"pushed {made}")
        return 0
    file = Path(options.f)
    if options.command == "build":
        _images(options.t)
        assert options.target in stages(file), f"no stage {options.target} in {file}"
        assert (options.context / ".dockerignore").exists(), options.context
        return 0
    for variable, why in re.findall(r"\$\{(\w+):\?([^}]*)\}", file.read_text()):
        assert os.environ.get(variable), f"{variable}: {why}"
    services = yaml.safe_load(file.read_text())["services"]
    assert [options.profile] in [service.get("profiles") for service in services.values()]
    return 0


def kubectl(arguments: list[str]) -> int:
    """kubectl itself for what it makes and reads; the cluster is the file .cluster.yaml."""
    cluster = Path(".cluster.yaml")
    held = list(yaml.safe_load_all(cluster.read_text())) if cluster.exists() else []
    if "delete" in arguments:
        (_, namespace, _, kind, name) = arguments
        found = [one for one in held if _place(one) == (namespace, kind, name)]
        assert found, f"no {kind} {name} in {namespace}"
        kept = [one for one in held if one not in found]
        cluster.write_text(yaml.safe_dump_all(kept))
        return 0
    if "create" in arguments:
        made = _real("kubectl", *arguments, "--dry-run=client", "-o", "yaml")
    elif "apply" in arguments:
        (_, option, path) = arguments
        made = _real("kubectl", "kustomize", path) if option == "-k" else Path(path).read_text()
        assert option in ("-k", "-f")
        _check_certificates(held, made)
        for image in re.findall(r"image: (\S+)", made):
            assert image == POLICY or f"pushed {image}" in _images(), f"no node has {image}"
    else:
        parser = argparse.ArgumentParser(prog="kubectl")
        parser.add_argument("-n")
        parser.add_argument("command", choices=["logs"])
        parser.add_argument("what")
        parser.add_argument("-c")
        parser.add_argument("--follow", action="store_true")
        options = parser.parse_args(arguments)
        kind, _, name = options.what.partition("/")
        (found,) = [one for one in held if _place(one) == (options.n, kind, name)]
        pod = found["spec"]["template"]["spec"]
        names = [one["name"] for one in pod["containers"] + pod.get("initContainers", [])]
        assert options.c in names, f"{options.c}: found {names}"
        return 0
    new = list(yaml.safe_load_all(made))
    assert all({"apiVersion", "kind", "metadata"} <= one.keys() for one in new)
    named = {one["metadata"]["name"] for one in held + new if one["kind"] == "Namespace"}
    for one in new:
        space = one["metadata"].get("namespace", "default")
        assert space in named | {"default"}, f"no namespace {space}"
        for other in held:
            if one["kind"] == "Job" and _place(one) == _place(other):
                changed = one["spec"]["template"] != other["spec"]["template"]
                assert not changed, f"{_place(one)}: spec.template: field is immutable"
    cluster.write_text(yaml.safe_dump_all([*held, *new]))
    return 0


def _place(manifest: Any) -> tuple[str, str, str]:
    """Namespace, kind and name, as kubectl's commands have them."""
    metadata = manifest["metadata"]
    space = metadata.get("namespace", "default")
    return space, manifest["kind"].lower(), metadata["name"]


def _check_certificates(held: Sequence[Any], made: str) -> None:
    """Those in secrets are for every name by which the manifests that mount them check them."""
    asked = {
        "draft-trainer-tls": ["localhost", *re.findall(r"serverName: (\S+)", made)],
        "rollout-server-tls": ["localhost", *re.findall(r'server_name = "(.*)"', made)],
    }
    for secret in (name for name in asked if f"secretName: {name}" in made):
        (found,) = [s for s in held if (s["kind"], s["metadata"]["name"]) == ("Secret", secret)]
        file = Path(".tls.crt")
        file.write_bytes(base64.b64decode(found["data"]["tls.crt"]))
        names = _real("openssl", "x509", "-noout", "-ext", "subjectAltName", "-in", str(file))
        for name in asked[secret]:
            assert re.search(rf"DNS:{name}\b(?!-)", names), f"{secret} is not for {name}: {names}"


def _images(*new: str) -> list[str]:
    """All that were built, tagged or pushed."""
    file = Path(".images")
    with file.open("a") as added:
        added.writelines(f"{name}\n" for name in new)
    return file.read_text().splitlines()


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
    **{"torchrun": torchrun, "ray": ray, "pip": pip, "make": make, "docker": docker},
    **{"kubectl": kubectl, "grpcurl": grpcurl, "grpc_health_probe": grpc_health_probe},
}


def _real(program: str, *arguments: str) -> str:
    """What the installed program prints."""
    path = shutil.which(program, path=os.environ["REAL_PATH"])
    assert path is not None, f"{program} is not installed"
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{program}: {done.stderr}"
    return done.stdout


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
    """What a fork would import each time; its errors are the fork's to tell."""
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
    for module in ("transformers", "draft_trainer.server.app", "rollout_server.launch"):
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
