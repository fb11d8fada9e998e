"""Releases that servers fetch from one another: real control planes, over engines in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch

from benchmarks.publish_faults.memory_server import MemoryServer
from draft_trainer.config import PublishConfig
from draft_trainer.counters import Counters
from draft_trainer.releases.client import Failure
from draft_trainer.releases.fleet import Fleet
from draft_trainer.releases.publisher import Publisher
from draft_trainer.releases.reconcile import Reconciler
from draft_trainer.releases.registry import Registry, open_pointer
from draft_trainer.releases.spread import MOST_SENT, Spread
from draft_trainer.releases.watch import AcceptanceWatch
from rollout_server import peers
from rollout_server.control import DRAFT, Weights
from rollout_server.store import ContentStore
from rollout_server.upload import Upload
from slipstream.client import Progress
from slipstream.security import Access, ClientCredentials, Role, TokenFiles
from slipstream.serving import SERVER_OPTIONS, Workers
from slipstream.tensors import bytes_of, spec_of
from slipstream.v1 import release_pb2
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc
from tests.draft_trainer.registry_rig import flip_bit
from tests.draft_trainer.rig import DEADLINE, write_draft
from tests.draft_trainer.synthetic import head
from tests.security.certificates import write_token

# ruff: noqa: N802


class Rig:
    """Planes, a registry of three releases, a publisher."""

    def __init__(self, folder: Path, count: int) -> None:
        draft = write_draft(folder / "initial")
        self.planes = [MemoryServer(draft, fetches=True) for _ in range(count)]
        self.registry = Registry(folder / "registry")
        self.registry.import_initial(draft)
        for seed in (1, 2):
            manifest = release_pb2.ReleaseManifest(parent_version=seed - 1, run_id="run")
            self.registry.create(head(seed), manifest)
        self.counters = Counters()
        addresses = tuple(plane.address for plane in self.planes)
        self.fleet = Fleet(PublishConfig(rollout_servers=addresses, reconcile_s=0.2))
        pointer = open_pointer(self.registry)
        self.publisher = Publisher(self.fleet, self.registry, pointer, self.counters)
        self.size = self.publisher.payloads.get(1).nbytes

    def sent(self, source: str) -> float:
        """Bytes of releases that the trainer, or servers, sent."""
        return self.counters.staged_bytes.labels(source)._value.get()

    def served(self) -> list[int]:
        return [plane.control.live["draft"].version or 0 for plane in self.planes]

    def spread(self, holders: list[str]) -> Spread:
        """Of release 1, from those that hold it already."""
        addresses = [plane.address for plane in self.planes]
        draft = self.publisher.payloads.get(1)
        return Spread(self.fleet, draft, addresses, holders, self.counters)

    def hold(self, *planes: MemoryServer) -> list[str]:
        """Have the trainer stage release 1 there; their addresses."""
        for plane in planes:
            answer = self.fleet.client(plane.address).stage(self.publisher.payloads.get(1))
            assert isinstance(answer, pb.StageResult)
        return [plane.address for plane in planes]

    def close(self) -> None:
        self.fleet.close()
        self.registry.close()
        for plane in self.planes:
            plane.stop()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def start(*arguments: object) -> Rig:
        rigs.append(Rig(tmp_path, *arguments))  # type: ignore[arg-type]
        return rigs[-1]

    yield start
    for rig in rigs:
        rig.close()


def test_what_the_trainer_sends_does_not_grow_with_the_fleet(make: Callable[..., Rig]) -> None:
    rig = make(14)
    result = rig.publisher.promote(1, pin=False)
    assert rig.served() == [1] * 14
    assert all(outcome.error == "" for outcome in result.outcomes.values())
    assert 0 < rig.sent("trainer") <= MOST_SENT * rig.size
    # What every release has in common is on every server before.
    arrived = rig.sent("trainer") + rig.sent("server")
    assert arrived % 14 == 0 and 0 < arrived / 14 <= rig.size
    assert sum(plane.service.peers.fetched_bytes for plane in rig.planes) == rig.sent("server")
    assert sum(plane.service.peers.served_bytes for plane in rig.planes) == rig.sent("server")
    assert max(plane.service.peers.served_bytes for plane in rig.planes) < rig.sent("server") / 2


def test_altered_bytes_are_refused_and_their_source_is_dropped(make: Callable[..., Rig]) -> None:
    rig = make(4)
    bad, good, *rest = rig.planes
    holders = rig.hold(bad, good)
    for weights in bad.control.staged.values():
        for tensor in weights.source.tensors:
            flip_bit(Path(tensor.path))
    staged = rig.spread(holders).to([plane.address for plane in rest])
    assert all(isinstance(answer, pb.StageResult) for answer in staged.values())
    assert rig.counters.sources_dropped.labels("altered")._value.get() == 1
    assert sum(plane.service.peers.failures["altered"] for plane in rest) >= 1
    assert rig.sent("trainer") == 0, "the other source has it"
    for plane in rest:
        _assert_holds(rig, plane)


def test_a_source_that_lacks_what_it_should_hold_is_dropped(make: Callable[..., Rig]) -> None:
    rig = make(2)
    liar, asker = rig.planes
    staged = rig.spread([liar.address]).to([asker.address])
    assert isinstance(staged[asker.address], pb.StageResult)
    assert rig.counters.sources_dropped.labels("failed")._value.get() == 1
    assert asker.service.peers.failures == {"altered": 0, "failed": 1}
    assert rig.sent("trainer") > 0, "nobody else has it"
    _assert_holds(rig, asker)


def test_servers_that_do_not_fetch_get_it_from_the_trainer(make: Callable[..., Rig]) -> None:
    rig = make(2)
    old = rig.planes[1]
    old.fetches = False
    result = rig.publisher.promote(1, pin=False)
    assert all(outcome.error == "" for outcome in result.outcomes.values())
    assert rig.served() == [1, 1] and old.service.peers.fetched_bytes == 0
    assert old.address not in rig.fleet.sources(rig.publisher.payloads.get(1))


def test_healed_server_fetches_from_peers(
    make: Callable[..., Rig],
) -> None:
    rig = make(3)
    rig.publisher.promote(1, pin=False)
    rig.fleet.states()
    sent, exchanged = rig.sent("trainer"), rig.sent("server")
    rig.fleet.client(rig.planes[0].address).roll_back()
    for key in list(rig.planes[0].store._resident):
        if key not in rig.planes[0].store._references:
            rig.planes[0].run(rig.planes[0].store.drop, [key])
    fetched = rig.planes[0].service.peers.fetched_bytes
    rig.publisher._restore(1, [rig.planes[0].address], {})
    assert rig.served() == [1, 1, 1]
    assert rig.planes[0].service.peers.fetched_bytes > fetched
    assert rig.sent("server") - exchanged == rig.planes[0].service.peers.fetched_bytes - fetched
    assert rig.sent("trainer") == sent


class Source(pb_grpc.RolloutServerServicer):
    """A server of which tensors are fetched."""

    def __init__(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(2), options=SERVER_OPTIONS)
        pb_grpc.add_RolloutServerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait(5)


class HalfSource(Source):
    """Sends a part of a tensor, from wherever it is asked to, then breaks or goes on."""

    def __init__(self, data: bytes, stop_at: int) -> None:
        super().__init__()
        self.data, self.stop_at = data, stop_at
        self.offsets: list[int] = []

    def Fetch(
        self, request: pb.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.FetchResponse]:
        self.offsets.append(request.offset)
        for start in range(request.offset, self.stop_at, 10):
            yield pb.FetchResponse(data=self.data[start : min(start + 10, self.stop_at)])
        if self.stop_at < len(self.data):
            context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")


@pytest.mark.parametrize("altered", [False, True])
def test_a_tensor_whose_source_breaks_is_resumed(tmp_path: Path, altered: bool) -> None:
    tensor = torch.arange(40, dtype=torch.float32)
    whole = bytes(bytes_of(tensor))
    first = HalfSource(b"\1" + whole[1:] if altered else whole, 60)
    second = HalfSource(whole, len(whole))
    store = ContentStore(tmp_path, 1000)
    workers, fetcher = Workers(1, "test"), peers.Peers()

    async def fetch() -> Upload:
        spec = spec_of("w", tensor)
        upload = Upload([spec], Weights.of(DRAFT, 1, [spec], store), store, workers)
        with upload.opened():
            given_up = await fetcher.fetch(upload, [first.address, second.address])
        assert given_up == {"altered": [], "failed": [first.address]}
        return upload

    upload = asyncio.run(fetch())
    first.stop(), second.stop()
    workers.close()
    assert not upload.missing
    # A beginning of another source is not taken for this one's fault: it is fetched again.
    assert (first.offsets, second.offsets) == ([0], [60, 0] if altered else [60])
    assert upload.bytes_fetched == (60 + 100 + 160 if altered else 160)
    (path,) = tmp_path.iterdir()
    assert path.read_bytes() == whole


class PatientSource(HalfSource):
    """All of it; from when it is asked on, sources have time."""

    def Fetch(
        self, request: pb.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.FetchResponse]:
        peers.SLOW_SECONDS = 60.0
        yield from super().Fetch(request, context)


class EndlessSource(Source):
    """Answers at once, and never with a byte."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = threading.Event()

    def Fetch(
        self, request: pb.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.FetchResponse]:
        while context.is_active() and not self._ended.wait(0.01):
            yield pb.FetchResponse()

    def stop(self) -> None:
        self._ended.set()
        super().stop()


def test_a_source_that_sends_too_little_leaves_time_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SLOW_SECONDS", 2.0)
    # All of it may take much longer.
    monkeypatch.setattr(peers, "BYTES_PER_SECOND", 1)
    tensor = torch.arange(40, dtype=torch.float32)
    whole = bytes(bytes_of(tensor))
    slow, good = EndlessSource(), PatientSource(whole, len(whole))
    store, workers = ContentStore(tmp_path, 1000), Workers(1, "test")

    async def fetch() -> tuple[Mapping[str, list[str]], int]:
        spec = spec_of("w", tensor)
        upload = Upload([spec], Weights.of(DRAFT, 1, [spec], store), store, workers)
        with upload.opened():
            given_up = await peers.Peers().fetch(upload, [slow.address, good.address])
        return given_up, len(upload.missing)

    assert asyncio.run(fetch()) == ({"altered": [], "failed": [slow.address]}, 0)
    slow.stop(), good.stop()
    workers.close()


def test_the_first_draft_is_given_up_like_any_other(make: Callable[..., Rig]) -> None:
    rig = make(1)
    (plane,) = rig.planes
    first = set(plane.control.live[DRAFT].keys)
    for version in (1, 2):
        assert rig.publisher.promote(version, pin=False).changes
    assert plane.control.previous_draft is not None
    held = {*plane.control.live[DRAFT].keys, *plane.control.previous_draft.keys}
    assert first - held and not (first - held) & plane.store._references.keys()


def test_what_a_cut_stage_fetched_is_not_sent_again(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "AT_ONCE", 1)
    rig = make(2)
    part, asker = rig.planes
    draft = rig.publisher.payloads.get(1)
    rig.hold(part)
    tensors = next(iter(part.control.staged.values())).source.tensors
    lost = [tensor for tensor in tensors if tensor.key not in asker.store][-1]
    Path(lost.path).unlink()
    del part.store._resident[lost.key]
    client = rig.fleet.client(asker.address)
    progress = Progress()
    refused = client.pull(draft, [part.address], progress)
    assert not isinstance(refused, pb.StageResult)
    assert refused.code == grpc.StatusCode.ABORTED and "1 tensors that none of" in refused.text
    assert progress.failed == (part.address,) and not asker.control.staged
    assert asker.service.peers.fetched_bytes > 0
    answer = client.stage(draft)
    assert isinstance(answer, pb.StageResult)
    assert answer.bytes_received == lost.key.size


def test_a_source_asks_who_fetches(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "initial")
    token = write_token(tmp_path / "token", "observe" * 8)
    access = Access(None, TokenFiles({Role.OBSERVE: [token]}, "token"), {})
    source = MemoryServer(draft, access=access)
    assert not source.state.fetches, "it has nothing to show to others"
    workers = Workers(1, "test")

    async def fetch(credentials: ClientCredentials) -> tuple[list[str], str]:
        store = ContentStore(tmp_path, 1000)
        spec = source.control.live[DRAFT].source.tensors[0]
        wire = spec_of(spec.name, spec.map())
        upload = Upload([wire], Weights.of(DRAFT, 1, [wire], store), store, workers)
        fetcher = peers.Peers(credentials)
        with upload.opened():
            given_up = await fetcher.fetch(upload, [source.address])
        return given_up["failed"], ",".join(upload.missing)

    failed, missing = asyncio.run(fetch(ClientCredentials()))
    assert failed == [source.address] and missing
    assert asyncio.run(fetch(ClientCredentials(token_file=token))) == ([], "")
    workers.close()
    source.stop()


def test_a_second_trainer_of_one_fleet_is_refused_by_name(
    make: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each on a registry of its own: neither takes what the other staged or serves."""
    rig = make(3)
    one = rig.publisher.pointer.state.owner
    servers = rig.fleet.config
    first, second = Fleet(servers, trainer=one), Fleet(servers, trainer="the-other")
    try:
        rig.publisher.fleet = first
        rig.publisher.pointer.offer(1)
        assert rig.publisher.prepare().changes
        assert {plane.control.trainer for plane in rig.planes} == {one}
        registry = Registry(tmp_path / "second")
        registry.import_initial(tmp_path / "initial")
        registry.create(head(9), release_pb2.ReleaseManifest(run_id="other"))
        other = Publisher(second, registry, open_pointer(registry), Counters())
        # What the first one holds staged is no stray to be aborted by the second.
        Reconciler(other, AcceptanceWatch(second)).round()
        result = other.promote(1, pin=False)
        assert not result.changes
        for outcome in result.outcomes.values():
            assert f"found a server of trainer {one}" in outcome.error
            assert "give every trainer servers of its own" in outcome.error
            assert outcome.state is not None and outcome.state.trainer == one
        client = second.client(rig.planes[0].address)
        for refused in (
            client.commit(["draft-1"]),
            client.roll_back(),
            client._told(client._stub.SetSpeculation, pb.SetSpeculationRequest(), DEADLINE),
        ):
            assert isinstance(refused, Failure) and "the-other" in refused.text
        assert rig.publisher.complete(0, "").changes, "the first one goes on"
        assert rig.served() == [1, 1, 1]
        # One that is silent for long has ended: its servers are the other's.
        monkeypatch.setattr("rollout_server.control.CLAIM_SECONDS", 0.0)
        assert other.promote(1, pin=False).changes
        rig.planes[0].control.heard(one)
        assert {plane.control._trainer for plane in rig.planes} == {"the-other"}
        registry.close()
    finally:
        first.close()
        second.close()


def _assert_holds(rig: Rig, plane: MemoryServer) -> None:
    """Exactly the release's bytes are staged there."""
    (weights,) = plane.control.staged.values()
    tensors = rig.registry.tensors(1)
    assert {t.name for t in weights.source.tensors} == set(tensors)
    for tensor in weights.source.tensors:
        assert torch.equal(tensor.map(), tensors[tensor.name])
