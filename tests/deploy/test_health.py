"""The probe of the images succeeds only where a server serves."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from examples.arithmetic_grpo.processes import free_port
from slipstream.serving.server import main
from tests.security.certificates import Authority

STATUS = health_pb2.HealthCheckResponse


@pytest.fixture
def servicer() -> health.HealthServicer:
    servicer = health.HealthServicer(experimental_non_blocking=True)
    servicer.set("", STATUS.SERVING)
    servicer.set("one/ready", STATUS.NOT_SERVING)
    return servicer


@pytest.fixture
def server(servicer: health.HealthServicer) -> Iterator[grpc.Server]:
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    yield server
    server.stop(grace=None).wait(5)


def test_health_probe_succeeds_only_when_serving(
    server: grpc.Server, servicer: health.HealthServicer, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    assert main([address]) == 0
    assert main([address, "one/ready"]) == 1
    assert capsys.readouterr().err == "not serving\n"
    assert main([address, "unknown"]) == 1
    assert capsys.readouterr().err.startswith("NOT_FOUND")
    servicer.set("one/ready", STATUS.SERVING)
    assert main([address, "one/ready"]) == 0
    assert main([f"127.0.0.1:{free_port()}"]) == 1
    assert capsys.readouterr().err.startswith("UNAVAILABLE")


def test_health_probe_verifies_tls_certificate(
    server: grpc.Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    pair = ours.sign("server", hosts=("localhost",))
    pems = [(pair.key.read_bytes(), pair.certificate.read_bytes())]
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pems))
    server.start()
    assert main([f"localhost:{port}", "--ca", str(ours.path)]) == 0
    assert main([f"localhost:{port}", "--ca", str(other.path)]) == 1
    assert main([f"localhost:{port}"]) == 1
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([f"localhost:{port}", "--ca", str(tmp_path / "none.pem")])
    assert "none.pem" in capsys.readouterr().err
