"""A checkpoint that is sent to a running trainer: checked there, and never promoted by itself."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draft_trainer.cli.main import main
from draft_trainer.releases.imports import Imports
from slipstream.tensors import chunks_of, spec_of
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import release_pb2
from slipstream.v1.console_pb2 import GetHistoryRequest
from tests.draft_trainer.rig import (
    DEADLINE,
    Client,
    feeding,
    make_config,
    refusal,
    rollouts,
    running,
    train_until_released,
    write_draft,
)
from tests.draft_trainer.synthetic import Policy
from tests.waiting import until


def header(config_json: str, tensors: dict[str, Tensor], **options: bool) -> pb.ImportHeader:
    return pb.ImportHeader(
        config_json=config_json,
        tensors=[spec_of(name, tensor) for name, tensor in tensors.items()],
        origin="/nowhere",
        **options,  # type: ignore[arg-type]
    )


def send(
    client: Client, head: pb.ImportHeader, tensors: dict[str, Tensor], timeout: float | None = 30.0
) -> pb.ImportReleaseResponse:
    def requests() -> Iterator[pb.ImportReleaseRequest]:
        yield pb.ImportReleaseRequest(header=head)
        for chunk in chunks_of(tensors):
            yield pb.ImportReleaseRequest(chunk=chunk)

    return client.stub.ImportRelease(requests(), timeout=timeout)


def test_import_checks_everything(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    source = write_draft(tmp_path / "other", 1)
    config_json = (source / "config.json").read_text()
    tensors = load_file(source / "model.safetensors")
    good = header(config_json, tensors)
    with running(config, train=False) as (_, client):
        root = config.draft.registry
        before = {path.name for path in root.iterdir()}

        def code_of(head: pb.ImportHeader, sent: dict[str, Tensor], field: str) -> grpc.StatusCode:
            error = refusal(lambda: send(client, head, sent))
            assert field in error.field, error
            assert {path.name for path in root.iterdir()} == before
            return error.code

        invalid = grpc.StatusCode.INVALID_ARGUMENT
        changed = {**tensors, "fc.weight": tensors["fc.weight"] + 1}
        assert code_of(good, changed, "fc.weight.sha256") is invalid
        assert code_of(good, {}, "") is invalid
        huge = pb.ImportHeader()
        huge.CopyFrom(good)
        huge.tensors[0].shape[0] = 1 << 40
        assert code_of(huge, {}, "tensors") is grpc.StatusCode.RESOURCE_EXHAUSTED
        for name in ("../../x", "__metadata__", "", "a" * 300):
            more = {**tensors, name: torch.zeros(1)}
            error = refusal(lambda more=more: send(client, header(config_json, more), more))
            assert name in error.found and error.code is invalid
        twice = pb.ImportHeader()
        twice.CopyFrom(good)
        twice.tensors[0].name = good.tensors[1].name
        assert code_of(twice, {}, "tensors") is invalid
        assert code_of(header("x" * (1 << 20) + "x", tensors), {}, "config_json") is invalid
        assert code_of(header("[]", tensors), tensors, "config.json") is invalid
        ruined = {**tensors, "fc.weight": tensors["fc.weight"] * torch.nan}
        assert code_of(header(config_json, ruined), ruined, "fc.weight") is invalid
        document = json.loads(config_json) | {"intermediate_size": 40}
        wider = header(json.dumps(document), tensors)
        assert code_of(wider, tensors, "mlp") is invalid
        document = json.loads(config_json) | {"rms_norm_eps": 1e-3}
        other = header(json.dumps(document), tensors)
        assert code_of(other, tensors, "rms_norm_eps") is grpc.StatusCode.FAILED_PRECONDITION
        no_run = header(config_json, tensors, gate=True)
        assert code_of(no_run, {}, "gate") is grpc.StatusCode.FAILED_PRECONDITION
        assert refusal(lambda: client.stub.ImportRelease(iter(()), timeout=5)).field == "kind"
        # After all of it a good one is taken, with its provenance, and stays out of the fleet.
        good.assumed.extend(["rope_theta = 1e4", "line\nbreak", *["more"] * 50])
        answer = send(client, good, tensors)
        assert answer.manifest.draft_version == 1 and not answer.promoted
        assert answer.manifest.assumed == ["rope_theta = 1e4", "line\\nbreak", "more"]
        assert answer.manifest.source == release_pb2.RELEASE_SOURCE_IMPORTED
        assert not answer.HasField("verdict") and not answer.manifest.HasField("gate")
        status = client.status()
        assert (status.newest_release, status.promoted_release) == (0, 0)


def test_one_import_at_a_time_after_client_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work goes on in its thread, and keeps its place."""
    source = write_draft(tmp_path / "other", 1)
    tensors = load_file(source / "model.safetensors")
    good = header((source / "config.json").read_text(), tensors)
    begun, hold = threading.Event(), threading.Event()

    def held(*_: Any) -> None:
        begun.set()
        assert hold.wait(DEADLINE)

    with running(make_config(tmp_path), train=False) as (_, client):
        with monkeypatch.context() as patch:
            patch.setattr(Imports, "take", held)
            requests = iter([pb.ImportReleaseRequest(header=good)])
            left = client.stub.ImportRelease.future(requests)
            assert begun.wait(DEADLINE) and left.cancel()
        for _ in range(5):
            time.sleep(0.1)
            error = refusal(lambda: send(client, good, tensors))
            assert (error.field, error.expected) == ("server.max_calls", "at most 1")
        hold.set()

        def taken() -> bool:
            with contextlib.suppress(grpc.RpcError):
                return send(client, good, tensors).manifest.draft_version == 1
            return False

        until(taken)


def test_import_is_gated_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trained draft, exported, is imported where nothing was trained: it passes, and moves on.

    The initial draft, imported there afterwards, does not pass, is a release all the same, and
    its verdict is on record.
    """
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with feeding(make_config(tmp_path / "a")) as (server, client):
        version = train_until_released(client)
        manifest = client.stub.ListReleases(pb.ListReleasesRequest(), timeout=DEADLINE).releases[-1]
        assert manifest.draft_version == version and manifest.parent_version == version - 1
        gate = manifest.gate
        assert gate.passed and gate.difference > gate.difference_half_width > 0
        assert (gate.num_speculative_tokens, gate.draft_sample_method) == (3, "probabilistic")
        assert manifest.num_speculative_tokens == 3
        assert manifest.draft_sample_method == "probabilistic"
        verdicts = client.stub.GetHistory(GetHistoryRequest(), timeout=DEADLINE).verdicts
        assert verdicts[-1].gate == gate and verdicts[-1].draft_version == version
        passed = [verdict.draft_version for verdict in verdicts if verdict.outcome == "passed"]
        assert passed == [*range(1, version + 1)]
        exported = str(tmp_path / "exported")
        assert (
            main(["releases", "export", str(version), exported, "--address", server.address]) == 0
        )
    config = make_config(tmp_path / "b", replay={"held_out_fraction": 0.5})
    with running(config, train=False) as (server, client):
        at = ("--address", server.address, "--gate")
        client.open()
        client.announce(1, Policy())
        client.send(*rollouts(80))
        assert main(["releases", "import", exported, *at]) == 0
        assert "draft 1, promoted; passed" in capsys.readouterr().out
        assert client.status().promoted_release == 1
        assert main(["releases", "import", str(tmp_path / "b" / "initial"), *at]) == 1
        assert "draft 2, not promoted; no real gain" in capsys.readouterr().out
        assert client.status().promoted_release == 1
        verdicts = client.stub.GetHistory(GetHistoryRequest(), timeout=DEADLINE).verdicts
        assert [(v.outcome, v.draft_version, v.incumbent_version) for v in verdicts] == [
            ("passed", 1, 0),
            ("failed", 2, 1),
        ]
        assert main(["releases", "verdicts", "--newest", "1", "--json", *at[:2]]) == 0
        (newest,) = json.loads(capsys.readouterr().out)
        assert (newest["outcome"], newest["draft_version"]) == ("failed", "2")
        # Compared with draft 0, while an operator goes from that to draft 1.
        imports = server._service.imports
        imports.pointer.promote(0, pin=False)
        judge = imports.gate.judge

        def then_the_operator(*arguments: Any) -> object:
            result = judge(*arguments)
            imports.pointer.promote(1, pin=False)
            return result

        monkeypatch.setattr(imports.gate, "judge", then_the_operator)
        main(["releases", "import", exported, *at])
        said = capsys.readouterr().out
        assert "draft 3, not promoted; passed" in said
        assert "; not promoted: draft 1 is promoted\n" in said
        assert "; not promoted: draft 1 is" in client.status().last_verdict.reason
        assert client.status().promoted_release == 1
