"""A trainer and a rollout server as docs/security.md sets them up: real processes, a real bridge,
the real commands; and no secret in anything that they print or answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file

from examples.arithmetic_grpo.processes import free_port
from policy_bridge import BridgeConfig, PolicyBridge
from slipstream.client import open_channel
from slipstream.errors import refused_from
from slipstream.serving.identity import ClientCredentials
from slipstream.v1 import draft_trainer_pb2 as trainer_pb
from slipstream.v1 import draft_trainer_pb2_grpc as trainer_grpc
from slipstream.v1 import rollout_server_pb2 as rollout_pb
from slipstream.v1 import rollout_server_pb2_grpc as rollout_grpc
from tests.draft_trainer.rig import raw_config, write_draft
from tests.draft_trainer.synthetic import HIDDEN, VOCAB
from tests.draft_trainer.test_cli import PROGRAM
from tests.security.certificates import Authority, write_token
from tests.tiny import tiny_qwen3

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "security.md").read_text()
DEADLINE = 180.0
SIZES = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 8}
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "OMP_NUM_THREADS": "1"}
ROLES = ("feed", "observe", "operate")

pytestmark = [
    pytest.mark.skipif(
        shutil.which("openssl") is None, reason="needs the openssl program: apt-get install openssl"
    ),
    pytest.mark.contract("hostile peers"),
]


def block(language: str, contains: str) -> str:
    """A fenced block of the document."""
    found = re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)
    (text,) = [text for text in found if contains in text]
    return str(text)


@dataclass
class Site:
    """Both services, running, with what they were given in ``folder``."""

    folder: Path
    trainer: str
    metrics: str
    rollout: str
    output: list[str] = field(default_factory=list)

    def credentials(self, role: str) -> ClientCredentials:
        return ClientCredentials(
            ca=self.folder / "ca.pem", token_file=self.folder / f"{role}.token"
        )

    def shell(self, script: str) -> str:
        """Run commands of the document in the folder; what they print."""
        commands = self.folder / "bin"
        commands.mkdir(exist_ok=True)
        program = commands / "draft-trainer"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{PROGRAM[2]}" "$@"\n')
        program.chmod(0o700)
        done = subprocess.run(
            ["bash", "-ec", script.replace("trainer:50051", self.trainer)],
            cwd=self.folder,
            env={**ENVIRONMENT, "PATH": f"{commands}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        self.output.append(done.stdout + done.stderr)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fetch(self, token: str = "", path: str = "/metrics") -> tuple[int, str]:
        """A page over HTTPS."""
        url = self.metrics.replace("0.0.0.0", "localhost").replace("/metrics", path)
        request = urllib.request.Request(url)
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # as by default from Python 3.13 on
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE, context=context) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        self.output.append(text)
        return status, text


def toml_of(sections: dict[str, dict[str, object]]) -> str:
    lines = []
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    made = ["bash", "-ec", block("sh", "openssl req -x509")]
    subprocess.run(made, cwd=folder, check=True, capture_output=True, timeout=DEADLINE)
    (folder / "rollout-operate.token").write_text("r" * 40 + "\n")
    (folder / "rollout-operate.token").chmod(0o600)
    sections = raw_config(folder, publish={"rollout_servers": [f"localhost:{free_port()}"]})
    rollout = sections["publish"]["rollout_servers"][0]
    written = block("toml", "[access]").replace('host = "0.0.0.0"', 'host = "0.0.0.0"\nport = 0')
    written = written.replace("port = 0", "port = 0\nmetrics_port = 0")
    del sections["server"]
    (folder / "trainer.toml").write_text(written + toml_of(sections))
    options = [
        *("--control-certificate", "trainer.pem", "--control-key", "trainer.key"),
        *("--control-token", "observe=observe.token"),
        *("--control-token", "operate=rollout-operate.token"),
    ]
    serve = (
        "from benchmarks.publish_faults.server_process import serve; import sys;"
        f"serve('initial', {rollout.rpartition(':')[2]}, 'fault', sys.argv[1:])"
    )
    logs = {name: (folder / f"{name}.log").open("w+") for name in ("trainer", "rollout")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", serve, *options],
            cwd=folder,
            env=ENVIRONMENT,
            stdout=logs["rollout"],
            stderr=subprocess.STDOUT,
        ),
        subprocess.Popen(
            [*PROGRAM, "serve", "--config", "trainer.toml", "--log-level", "debug"],
            cwd=folder,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=logs["trainer"],
            text=True,
        ),
    ]
    try:
        assert processes[1].stdout is not None
        ready = processes[1].stdout.readline()
        assert ready.startswith("draft-trainer ready:"), (folder / "trainer.log").read_text()
        values = dict(word.split("=", 1) for word in ready.split()[2:])
        address = values["grpc"].replace("0.0.0.0", "localhost")
        site = Site(folder, address, values["metrics"], rollout, [ready])
        with open_channel(rollout, credentials=site.credentials("observe")) as channel:
            grpc.channel_ready_future(channel).result(DEADLINE)
        yield site
        for process in processes:
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE) == 0
        site.output += [file.read_text() for file in folder.glob("*.log")]
        assert not leaked(site)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs.values():
            log.close()


def secrets_of(site: Site) -> dict[str, str]:
    """Every secret, and what is as good as one, by what it is."""
    found = {}
    for path in site.folder.glob("*.token"):
        token = path.read_text().strip()
        found[path.name] = token
        found[f"hash of {path.name}"] = hashlib.sha256(token.encode()).hexdigest()
    for path in site.folder.glob("*.key"):
        found[path.name] = path.read_text().splitlines()[1]
    return found


def leaked(site: Site) -> list[str]:
    text = "\n".join(site.output)
    return [name for name, secret in secrets_of(site).items() if secret in text]


@pytest.mark.slow
def test_documented_commands_over_tls(site: Site) -> None:
    text = site.shell(block("sh", "draft-trainer status"))
    assert re.search(r"promoted release +0\b", text)
    assert "initial" in text


def test_bridge_feeds_and_pushes_over_tls(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site.folder)
    names: dict[str, BridgeConfig] = {}
    exec(block("python", "rollout_credentials").replace("trainer:50051", site.trainer), names)
    config = names["config"]
    policy = tiny_qwen3(**SIZES).eval()
    with PolicyBridge(policy, config) as bridge:
        assert bridge.wait_connected(DEADLINE), bridge.stats()
        with bridge.sync(1) as window:
            # The engine in memory serves its draft's layout for a policy as well.
            weights = load_file("initial/model.safetensors")
            window.push_policy({name: weights[name] for name in weights if name != "t2d"})
        assert window.result is not None and window.result.draft_errors == ()
        ids = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        with torch.no_grad(), bridge.capture(temperature=1.0) as capture:
            policy(input_ids=ids, attention_mask=mask)
            capture.ship(ids, attention_mask=mask, loss_mask=mask.bool())
        assert bridge.flush(DEADLINE)
        assert bridge.stats().accepted == 2, bridge.stats()
        site.output += [repr(bridge.stats()), repr(config)]


def test_bridge_with_wrong_token_trains_on_and_recovers(site: Site) -> None:
    mine = write_token(site.folder / "mine.token", "m" * 40)
    shown = ClientCredentials(ca=site.folder / "ca.pem", token_file=mine)
    config = BridgeConfig(
        site.trainer, "grpo-2", trainer_credentials=shown, max_backoff_seconds=0.1
    )
    with PolicyBridge(tiny_qwen3(**SIZES).eval(), config) as bridge:
        with bridge.sync(1) as window:
            pass
        assert window.result is not None
        deadline = time.monotonic() + DEADLINE
        while "a token that opens nothing here" not in bridge.stats().last_error:
            assert not bridge.wait_connected(0.05) and time.monotonic() < deadline
        assert "trainer_credentials" in bridge.stats().last_error
        write_token(mine, (site.folder / "feed.token").read_text().strip())
        assert bridge.wait_connected(DEADLINE)


def test_operator_promotes_release_over_tls(site: Site) -> None:
    write_draft(site.folder / "another", seed=3)
    operate = f"--address {site.trainer} --ca ca.pem --token-file operate.token"
    assert "draft 1" in site.shell(f"draft-trainer releases import another {operate}")
    assert "the fleet serves draft 1" in site.shell(f"draft-trainer releases promote 1 {operate}")
    with open_channel(site.rollout, credentials=site.credentials("observe")) as channel:
        stub = rollout_grpc.RolloutServerStub(channel)
        state = stub.GetState(rollout_pb.GetStateRequest(), timeout=DEADLINE)
        assert state.draft_version == 1
        with pytest.raises(grpc.RpcError) as caught:
            stub.Commit(rollout_pb.CommitRequest(stage_ids=["x"]), timeout=DEADLINE)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED  # type: ignore[attr-defined]


def test_roles_are_kept_apart(site: Site) -> None:
    calls = {
        "feed": ("OpenRun", trainer_pb.OpenRunRequest(run_id="other")),
        "observe": ("GetStatus", trainer_pb.GetStatusRequest()),
        "operate": ("PromoteRelease", trainer_pb.PromoteReleaseRequest(draft_version=0, pin=True)),
    }
    granted = {"feed": {"feed", "observe"}, "observe": {"observe"}}
    granted["operate"] = {"operate", "observe"}
    for role in ROLES:
        with open_channel(site.trainer, credentials=site.credentials(role)) as channel:
            stub = trainer_grpc.DraftTrainerStub(channel)
            for needed, (name, request) in calls.items():
                if needed in granted[role]:
                    continue
                with pytest.raises(grpc.RpcError) as caught:
                    getattr(stub, name)(request, timeout=DEADLINE)
                refusal = refused_from(caught.value)
                assert refusal is not None and refusal.code is grpc.StatusCode.PERMISSION_DENIED
                assert refusal.expected == f"the role {needed}"
                site.output.append(str(refusal))


@pytest.mark.slow
def test_command_errors_name_the_credential_to_fix(site: Site) -> None:
    def refused(options: str) -> str:
        script = f"! draft-trainer status --address {site.trainer} {options} 2>&1"
        # gRPC's core may say on stderr what went wrong in a handshake, too.
        lines = site.shell(script).splitlines()
        (line,) = [line for line in lines if line.startswith("draft-trainer: ")]
        return line

    assert "found no token, expected the role observe" in refused("--ca ca.pem")
    (site.folder / "wrong.token").write_text("w" * 40)
    (site.folder / "wrong.token").chmod(0o600)
    line = refused("--ca ca.pem --token-file wrong.token")
    assert "found a token that opens nothing here" in line and "--token-file" in line
    (site.folder / "open.token").write_text("o" * 40)
    (site.folder / "open.token").chmod(0o644)
    line = refused("--ca ca.pem --token-file open.token")
    assert "--token-file: found open.token, which everybody" in line
    assert "No such file" in refused("--ca ca.pem --token-file absent")
    Authority(site.folder / "elsewhere")
    line = refused("--ca elsewhere/ca.pem --token-file observe.token")
    assert "--ca: found a certificate of" in line
    line = refused("--ca ca.pem --token-file observe.token --server-name elsewhere")
    assert "--server-name" in line
    line = refused("--ca ca.pem --certificate trainer.pem --key ca.key")
    assert "--key: found ca.key with trainer.pem" in line


def test_metrics_need_the_role_and_count_refusals(site: Site) -> None:
    for path in ("/", "/metrics", "/api/status", "/api/events", "/absent"):
        assert site.fetch(path=path)[0] == 401
    assert site.fetch("x" * 40)[0] == 401
    observe = (site.folder / "observe.token").read_text().strip()
    for path in ("/", "/api/status", "/api/events"):
        assert site.fetch(observe, path)[0] == 200
    status, text = site.fetch(observe)
    assert status == 200
    counted = re.findall(r'slipstream_trainer_access_refused_total\{reason="(\w+)"\} (\S+)', text)
    reasons = {reason: float(value) for reason, value in counted}
    assert reasons["no_credentials"] >= 1 and reasons["unknown_token"] >= 1


def test_no_secret_in_output_or_logs(site: Site) -> None:
    """The fixture's end looks again, with the logs that the processes wrote until they ended."""
    site.output += [file.read_text() for file in site.folder.glob("*.log")]
    site.shell(
        f"draft-trainer status --json --address {site.trainer} --ca ca.pem "
        "--token-file observe.token"
    )
    assert len(secrets_of(site)) >= 10
    assert not leaked(site)
