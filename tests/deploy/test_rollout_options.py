"""Every command line of a rollout server in deploy/ and in the help is one that vLLM's parser and
ours take.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml

from rollout_server import cli
from rollout_server.ray.fleet import build_parser as fleet_parser
from rollout_server.vllm.launch import access_of, build_parser
from tests.deploy.manifests import DEPLOY, OVERLAYS, container, overlay


def test_deployed_rollout_server_arguments_parse() -> None:
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yml").read_text())
    job, *_ = yaml.safe_load_all((DEPLOY / "ray" / "kuberay.yaml").read_text())
    words = shlex.split(job["spec"]["entrypoint"])[2:]
    found: dict[str, list[str]] = {
        "compose": compose["services"]["rollout-0"]["command"],
        "kuberay": ["serve", *fleet_parser().parse_known_args(words)[1]],
    }
    for name in OVERLAYS:
        found[name] = container(overlay(name), "rollout-server")["args"]
    parser: Any = build_parser()
    for name, (command, *arguments) in found.items():
        assert command == "serve"
        args = parser.parse_args(arguments)
        assert args.draft_length == 3 and args.logprobs_mode == "processed_logprobs", name
        assert args.served_model_name == ["policy"]
        if name != "kuberay":  # whose addresses the fleet gives
            assert (args.host, args.port) == ("0.0.0.0", 8000)
            assert (args.control_host, args.control_port) == ("0.0.0.0", 50061)


def test_fleet_commands_allow_listening_on_node_address(capsys: pytest.CaptureFixture[str]) -> None:
    job, *_ = yaml.safe_load_all((DEPLOY / "ray" / "kuberay.yaml").read_text())
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    told = re.sub(r"\\\n\s*", "", capsys.readouterr().out)
    commands = re.findall(r"rollout-server fleet .*", told)
    for command in (job["spec"]["entrypoint"], *commands):
        options, serve = fleet_parser().parse_known_args(shlex.split(command)[2:])
        host = options.host or "10.0.0.11"
        parser: Any = build_parser()
        args = parser.parse_args([*serve, "--host", host, "--control-host", host])
        assert args.model and access_of(args).open
    assert commands
