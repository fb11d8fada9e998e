"""The gRPC server behind certificates and tokens: who gets in, also after a rotation."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from benchmarks.publish_faults.memory_server import DRAFT_DIR, MemoryServer
from slipstream.checkpoints import load_tensors
from slipstream.client import open_channel
from slipstream.errors import RefusedError, refused_from
from slipstream.serving.identity import Access, ClientCredentials, Role, TokenFiles
from slipstream.serving.tls import Followed, TlsFiles, TlsPaths
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc
from tests.security.certificates import HOUR, Authority, write_token

pytestmark = pytest.mark.contract("hostile peers")

FEED, OBSERVE, OPERATE = (role.value * 8 for role in Role)
DEADLINE = 60.0


@contextmanager
def start(access: Access) -> Iterator[str]:
    """A rollout server that serves draft 7; its address."""
    server = MemoryServer(access=access)
    server.put(7, load_tensors(DRAFT_DIR))
    yield server.address.replace("127.0.0.1", "localhost")
    server.stop()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"))


def tls(pair: object, ca: Path | None = None) -> TlsFiles:
    return TlsFiles(TlsPaths(pair.certificate, pair.key, ca), lambda name: name)  # type: ignore[attr-defined]


def token_files(folder: Path) -> TokenFiles:
    files = {
        Role.FEED: [write_token(folder / "feed", FEED)],
        Role.OBSERVE: [write_token(folder / "observe", "0" * 40, OBSERVE)],
        Role.OPERATE: [write_token(folder / "operate", OPERATE)],
    }
    return TokenFiles(files, "{role}_tokens")


def call(address: str, credentials: ClientCredentials, method: str = "GetState") -> grpc.StatusCode:
    """Return the status of an empty request; OK where the service itself looked at it."""
    with open_channel(address, credentials=credentials) as channel:
        stub = pb_grpc.RolloutServerStub(channel)
        try:
            if method == "Stage":
                list(stub.Stage(iter([pb.StageRequest()]), timeout=DEADLINE))
            elif method == "WatchAcceptance":
                next(stub.WatchAcceptance(pb.WatchAcceptanceRequest(), timeout=DEADLINE))
            elif method == "Commit":
                stub.Commit(pb.CommitRequest(), timeout=DEADLINE)
            else:
                stub.GetState(pb.GetStateRequest(), timeout=DEADLINE)
        except grpc.RpcError as error:
            return let_in(error)
        return grpc.StatusCode.OK


def let_in(error: grpc.RpcError) -> grpc.StatusCode:
    """OK where a call got as far as the service, which refuses to commit or stage nothing."""
    refusal, code = refused_from(error), error.code()  # type: ignore[attr-defined]
    if refusal is not None and refusal.field in ("stage_ids", "kind"):
        return grpc.StatusCode.OK
    return code  # type: ignore[no-any-return]


OK, UNKNOWN = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED
DENIED, DOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE


def test_tokens_over_plain_loopback(tmp_path: Path) -> None:
    access = Access(None, token_files(tmp_path), {})
    with start(access) as address:

        def shown(name: str) -> ClientCredentials:
            return ClientCredentials(token_file=tmp_path / name)

        write_token(tmp_path / "wrong", "x" * 64)
        for method, granted in {
            "GetState": {"feed", "observe", "operate"},
            "WatchAcceptance": {"feed", "observe", "operate"},
            "Commit": {"operate"},
            "Stage": {"operate"},
        }.items():
            for name in ("feed", "observe", "operate"):
                expected = OK if name in granted else DENIED
                assert call(address, shown(name), method) is expected, (method, name)
            assert call(address, ClientCredentials(), method) is UNKNOWN
            assert call(address, shown("wrong"), method) is UNKNOWN
        assert access.refusals.by_reason == {"role": 4, "no_credentials": 4, "unknown_token": 4}
        with open_channel(address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=DEADLINE
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert _reflected(channel) is UNKNOWN
        with open_channel(address, credentials=shown("observe")) as channel:
            assert _reflected(channel) is OK


def _reflected(channel: grpc.Channel) -> grpc.StatusCode:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    try:
        list(stub.ServerReflectionInfo(iter([request]), timeout=DEADLINE))
    except grpc.RpcError as error:
        return error.code()  # type: ignore[attr-defined]
    return OK


def test_refused_token_message_reveals_no_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    access = Access(None, token_files(tmp_path), {})
    wrong = "w" * 40
    credentials = ClientCredentials(token_file=write_token(tmp_path / "wrong", wrong))
    with start(access) as address, open_channel(address, credentials=credentials) as channel:
        for _ in range(20):
            with pytest.raises(grpc.RpcError) as caught:
                pb_grpc.RolloutServerStub(channel).Commit(pb.CommitRequest(), timeout=DEADLINE)
    refusal = refused_from(caught.value)
    assert refusal is not None
    assert refusal.field == "authorization"
    assert refusal.expected == "the role operate"
    assert "--token-file" in refusal.next_step and "docs/security.md" in refusal.next_step
    told = str(refusal) + caplog.text
    assert not any(secret in told for secret in (wrong, FEED, OBSERVE, OPERATE))
    assert access.refusals.by_reason == {"unknown_token": 20}
    assert sum("refused ipv" in record.getMessage() for record in caplog.records) == 1


def test_token_files_reload_on_change(tmp_path: Path) -> None:
    access = Access(None, token_files(tmp_path), {})
    shown = ClientCredentials(token_file=tmp_path / "mine")
    write_token(tmp_path / "mine", OPERATE)
    with start(access) as address, open_channel(address, credentials=shown) as channel:
        stub = pb_grpc.RolloutServerStub(channel)

        def code() -> grpc.StatusCode:
            try:
                stub.Commit(pb.CommitRequest(), timeout=DEADLINE)
            except grpc.RpcError as error:
                return let_in(error)
            return OK

        new = "n" * 48
        assert code() is OK
        write_token(tmp_path / "operate", OPERATE, new)
        assert code() is OK
        write_token(tmp_path / "mine", new)
        assert code() is OK
        write_token(tmp_path / "operate", new)
        assert code() is OK
        assert call(address, ClientCredentials(token_file=tmp_path / "feed")) is OK
        # A file that is gone, bad or everybody's opens nothing; mended, it opens again.
        (tmp_path / "operate").unlink()
        assert code() is UNKNOWN
        write_token(tmp_path / "operate", "short")
        assert code() is UNKNOWN
        write_token(tmp_path / "operate", new).chmod(0o644)
        assert code() is UNKNOWN
        (tmp_path / "operate").chmod(0o640)
        assert code() is OK
        write_token(tmp_path / "operate")
        assert code() is UNKNOWN


@pytest.mark.parametrize("case", ["good", "plaintext", "wrong CA", "wrong name", "expired"])
def test_client_verifies_server_certificate(
    tmp_path: Path, authority: Authority, case: str
) -> None:
    hosts = ("elsewhere.example",) if case == "wrong name" else ("localhost",)
    # Long enough to pass the check at the start, over when the client comes.
    pair = authority.sign("server", hosts=hosts, file=f"server-{case}-{tmp_path.name}")
    files = tls(pair)
    if case == "expired":
        old = authority.sign("server", hosts=hosts, ends=-HOUR / 2, file=f"old-{tmp_path.name}")
        pem, context = files._pem.now()
        certificate, key = old.certificate.read_bytes(), old.key.read_bytes()
        expired = dataclasses.replace(pem, certificate=certificate, key=key)
        files._pem._value = expired, context
    ca = Authority(tmp_path / "other").path if case == "wrong CA" else authority.path
    token = write_token(tmp_path / "mine", OBSERVE)
    with start(Access(files, token_files(tmp_path), {})) as address:
        shown = ClientCredentials(ca=ca, token_file=token)
        if case == "plaintext":
            shown = ClientCredentials(token_file=token)
        assert call(address, shown) is (OK if case == "good" else DOWN)
        if case == "wrong name":
            named = ClientCredentials(ca=ca, token_file=token, server_name="elsewhere.example")
            assert call(address, named) is OK


def test_roles_of_client_certificates(tmp_path: Path, authority: Authority) -> None:
    server = authority.sign("server", file=f"server-{tmp_path.name}")
    names = {Role.FEED: ["policy.example"], Role.OPERATE: ["spiffe://cluster/operator", "root"]}
    access = Access(tls(server, authority.path), token_files(tmp_path), names)
    with start(access) as address:

        def shown(name: str, *hosts: str, by: Authority = authority) -> ClientCredentials:
            pair = by.sign(name, hosts=hosts, client=True, file=f"{name}-{tmp_path.name}")
            return ClientCredentials(authority.path, pair.certificate, pair.key)

        def codes(credentials: ClientCredentials) -> tuple[grpc.StatusCode, grpc.StatusCode]:
            return call(address, credentials), call(address, credentials, "Stage")

        assert codes(shown("a", "policy.example")) == (OK, DENIED)
        assert codes(shown("b", "other.example", "spiffe://cluster/operator")) == (OK, OK)
        # The common name counts only where there is no other name.
        assert codes(shown("root")) == (OK, OK)
        assert codes(shown("root", "other.example")) == (UNKNOWN, UNKNOWN)
        assert access.refusals.by_reason == {"role": 1, "unknown_certificate": 2}
        # Without a certificate, or with one of another CA, there is no connection.
        token = ClientCredentials(ca=authority.path, token_file=tmp_path / "operate")
        assert call(address, token) is DOWN
        assert codes(shown("c", "policy.example", by=Authority(tmp_path / "other"))) == (DOWN, DOWN)
        # A token adds to what the certificate opens.
        both = shown("d", "policy.example")
        both = ClientCredentials(both.ca, both.certificate, both.key, tmp_path / "operate")
        assert codes(both) == (OK, OK)


def test_certificates_reload_on_change(tmp_path: Path, authority: Authority) -> None:
    server = authority.sign("server", file=f"server-{tmp_path.name}")
    mine = authority.sign("me", client=True, file=f"me-{tmp_path.name}")
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.path.read_bytes())
    files = tls(server, ca)
    access = Access(files, token_files(tmp_path), {Role.OBSERVE: ["*"]})
    shown = ClientCredentials(ca, mine.certificate, mine.key)
    with start(access) as address, open_channel(address, credentials=shown) as channel:
        stub = pb_grpc.RolloutServerStub(channel)
        assert stub.GetState(pb.GetStateRequest(), timeout=DEADLINE).draft_version == 7
        # Another CA altogether, as after a leak: new files on both sides, no restart.
        other = Authority(tmp_path / "other")
        for pair, client in ((server, False), (mine, True)):
            made = other.sign("new", client=client)
            pair.certificate.write_bytes(made.certificate.read_bytes())
            pair.key.write_bytes(made.key.read_bytes())
        ca.write_bytes(other.path.read_bytes())
        # The open connection lasts; a client that starts now comes with the new files.
        assert stub.GetState(pb.GetStateRequest(), timeout=DEADLINE).draft_version == 7
        assert call(address, shown) is OK
        old = authority.sign("old", client=True, file=f"old-{tmp_path.name}")
        assert call(address, ClientCredentials(ca, old.certificate, old.key)) is DOWN
        # A rotation that went wrong leaves the service up with what it had.
        good = server.certificate.read_bytes()
        server.certificate.write_bytes(b"half a certif")
        assert call(address, shown) is OK
        server.certificate.write_bytes(good)
        assert call(address, shown) is OK


@pytest.mark.parametrize("when_bad", [None, "nothing"])
def test_unusable_credential_files_are_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when_bad: str | None
) -> None:
    """Nothing may be wrong with them: a clock was behind, or no descriptor was left."""
    usable = True

    def read() -> str:
        if not usable:
            raise RefusedError("file", "not valid yet", "a valid one", "wait")
        return link.read_text()

    link = tmp_path / "link"
    for name in ("old", "new"):
        (tmp_path / name).write_text(name)
    link.symlink_to("old")
    followed = Followed([link], read, when_bad)
    for name in ("new", "old"):
        before, usable = followed.now(), False
        link.unlink()
        link.symlink_to(name)
        assert {followed.now() for _ in range(3)} == {when_bad or before}
        assert caplog.text.count("not valid yet") == 1
        # Neither the same files nor those from before the failure stay unread.
        usable = True
        assert followed.now() == name
        caplog.clear()
    usable = False
    link.unlink()
    link.symlink_to("new")
    followed.now()
    link.unlink()
    link.symlink_to("old")
    usable = True
    assert followed.now() == "old"


@pytest.mark.parametrize(
    ("begins", "ends", "client", "text"),
    [
        (-HOUR, -HOUR / 2, False, "certificate has expired"),
        (HOUR / 2, HOUR, False, "certificate is not yet valid"),
        (-HOUR, HOUR, True, "unsuitable certificate purpose"),
    ],
)
def test_server_with_bad_certificate_does_not_start(
    tmp_path: Path,
    authority: Authority,
    begins: dt.timedelta,
    ends: dt.timedelta,
    client: bool,
    text: str,
) -> None:
    bad = authority.sign(
        "bad", begins=begins, ends=ends, client=client, file=f"bad-{tmp_path.name}"
    )
    with pytest.raises(Exception, match=text) as caught:
        tls(bad)
    assert caught.value.field == "certificate"  # type: ignore[attr-defined]


def test_call_with_two_tokens_refused(tmp_path: Path) -> None:
    """One of them was added on the way, and nobody knows which."""
    twice = [("authorization", f"Bearer {token}") for token in (OPERATE, OBSERVE)]
    with (
        start(Access(None, token_files(tmp_path), {})) as address,
        open_channel(address) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        commit = pb_grpc.RolloutServerStub(channel).Commit
        commit(pb.CommitRequest(), timeout=DEADLINE, metadata=twice)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
