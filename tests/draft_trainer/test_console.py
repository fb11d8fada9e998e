"""status, events and the web page show the numbers of a running trainer and its fleet."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from http.client import HTTPConnection, HTTPResponse
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.publish_faults.memory_server import MemoryServer
from draft_trainer.cli import console
from draft_trainer.cli.main import main
from draft_trainer.server.status import WINDOW_SECONDS
from draft_trainer.training.economy import Decision
from slipstream.client import open_channel
from tests.draft_trainer.rig import Client, make_config, rollouts, running, write_draft
from tests.draft_trainer.test_cli import PROGRAM, refused, run, serving, write_config

DEADLINE = 120.0
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Live:
    """A trainer with a rollout server that drafted 1000 times: length 1 + 2100 / 1000."""

    address: str
    port: int
    client: Client
    double: MemoryServer


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("console")
    double = MemoryServer(write_draft(folder / "initial"))
    double.stage_policy("policy-5", 5)
    double.commit("policy-5")
    servers = [double.address, "127.0.0.1:9"]
    config = make_config(
        folder,
        publish={"rollout_servers": servers, "reconcile_s": 0.0},
    )
    with running(config, train=False) as (server, client):
        client.open("<b>run</b>")
        client.announce(5)
        client.send(*rollouts(7, version=5))
        assert double.watched.wait(DEADLINE)
        double.draft(1000, [900, 700, 500])
        client.wait_for(lambda s: s.last_minute and len(s.servers) == 2)
        # "The last minute" is that of the drafts, however long the tests take.
        drafted = server._watch.recent(WINDOW_SECONDS)
        server._watch.recent = lambda seconds: drafted  # type: ignore[method-assign]
        server.status.economy.last = Decision(
            *(5, False, "training does not pay: it saves 1 s", server.status.economy.figures)
        )
        server.status.keep_snapshot()
        port = int(server._web.url.rpartition(":")[2])
        yield Live(server.address, port, client, double)
    double.stop()


def test_status_command_shows_trainer_and_fleet(
    live: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(capsys, "status", "--address", live.address)
    assert code == 0 and "\x1b" not in text
    lines = text.splitlines()
    assert "<b>run</b>" in lines[0]
    assert lines[1].split()[:2] == ["policy", "5"] and "0 versions behind" in lines[1]
    assert "serves draft 0" in lines[1]
    # As `doctor` says it.
    assert any(line.startswith("waiting  training training is paused") for line in lines)
    unknown = "not known yet; a fixed draft length needs --time-plain-steps"
    assert any(unknown in line for line in lines)
    (server,) = (line for line in lines if live.double.address in line and " ready" in line)
    assert server.split()[1:8] == ["ready", "0", "5", "3.100", "0.90", "0.70", "0.50"]
    (gone,) = (line for line in lines if "127.0.0.1:9 " in line and "unreachable" in line)
    assert gone.split()[1:6] == ["unreachable", *"\N{EN DASH}" * 4]
    assert lines.index(gone) < lines.index(server), "what needs somebody comes first"
    (length,) = (line for line in lines if line.startswith("length"))
    assert length.split()[1] == "3.100"
    assert any("7 accepted" in line for line in lines)
    assert any("policy_announced" in line and "policy 5" in line for line in lines[-8:])


@pytest.mark.parametrize("terminal", [False, True])
def test_status_watch_goes_on_without_answer(
    live: Live,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
) -> None:
    """The trainer may restart meanwhile; a terminal is redrawn in place."""
    show, asked = console.Status._show, count()

    def answered_at_first_and_last(self: console.Status, stub: Any) -> None:
        number = next(asked)
        if number == 4:
            raise KeyboardInterrupt
        if number in (1, 2):
            raise grpc.RpcError
        show(self, stub)

    monkeypatch.setattr(console.Status, "_show", answered_at_first_and_last)
    monkeypatch.setattr(console, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    for name, value in (("COLUMNS", "40"), ("LINES", "9"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    assert main(["status", "--watch", "--address", live.address]) == 130
    text, errors = capsys.readouterr()
    assert errors.count("trying again") == 1 and len(errors.splitlines()) == 1
    assert text.count("draft-trainer ") == 2 and ("\x1b[H" in text) is terminal
    if terminal:
        pictures = [part.split("\n") for part in text.split("\x1b[H")[1:]]
        assert [len(picture) for picture in pictures] == [9, 9]
        lines = [line.replace("\x1b[K", "") for line in pictures[0][:-1]]
        assert max(map(len, lines)) == 40


def test_removed_command_names_what_takes_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert "use draft-trainer status --watch" in refused(capsys, "top", "--interval", "2")


@pytest.mark.slow
def test_status_into_closed_pipe_or_ascii_locale(live: Live) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    # As a shell has it: what is printed waits for the end of the program.
    environment.pop("PYTHONUNBUFFERED", None)
    gone, stdout = os.pipe()
    os.close(gone)
    for target in (stdout, subprocess.PIPE):
        done = subprocess.run(
            [*PROGRAM, "status", "--address", live.address],
            stdout=target,
            stderr=subprocess.PIPE,
            env=environment,
            timeout=DEADLINE,
            check=False,
        )
        assert done.returncode in (0, 1) and done.stderr == b""
    assert done.stdout.isascii() and done.stdout
    os.close(stdout)


def get(live: Live, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", live.port, timeout=DEADLINE)
    connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_web_answers_reads_only_and_reflects_nothing(live: Live) -> None:
    answer, body = get(live, "/")
    assert answer.status == 200 and b"<title>draft-trainer</title>" in body
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
    for name in (b"page.css", b"page.js", b"uPlot.iife.min.js", b"uPlot.min.css"):
        assert name in body and get(live, f"/{name.decode()}")[0].status == 200
    head, nothing = get(live, "/", "HEAD")
    assert head.status == 200 and nothing == b""
    assert head.headers["Content-Length"] == str(len(body))
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert get(live, "/", method)[0].status == 405
    absent, body = get(live, "/<script>alert(1)</script>?<b>")
    assert absent.status == 404 and b"<" not in body
    assert get(live, "/../server.py")[0].status == 404
    for host in ("localhost", "127.0.0.1:9464", "[::1]:9464", "trainer", "trainer.slipstream.svc"):
        assert get(live, "/", Host=host)[0].status == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example:9464", "<b>.example"):
        foreign, body = get(live, "/api/status", Host=host)
        assert foreign.status == 421 and b"Host: found" in body and b"<" not in body, host
    assert get(live, "/metrics")[1].startswith(b"# HELP slipstream_trainer_")
    assert get(live, "/metrics", "HEAD")[1] == b""


def test_web_api_reports_the_trainer(live: Live) -> None:
    status = json.loads(get(live, "/api/status")[1])
    assert status["last_minute"][0]["acceptance_length"] == pytest.approx(3.1)
    assert status["drafted"]["acceptance_per_position"] == pytest.approx([0.9, 0.7, 0.5])
    standing = {one["address"]: (one["standing"], one["severity"]) for one in status["servers"]}
    assert standing == {
        live.double.address: ("ready", "SEVERITY_OK"),
        "127.0.0.1:9": ("unreachable", "SEVERITY_PROBLEM"),
    }
    assert status["served_release"] == "0" and status["served_staleness"] == "0"
    answer, body = get(live, "/api/history")
    newest = json.loads(body)["snapshots"][-1]
    (drafted,) = newest["last_minute"]
    assert not newest["servers"] and newest["time"] > newest["started_at"]
    assert (drafted["draft_version"], newest["policy_version"]) == ("0", "5")
    assert drafted["drafts"] == "1000" and drafted["accepted_per_position"] == ["900", "700", "500"]
    same, nothing = get(live, "/", If_None_Match=get(live, "/")[0].headers["ETag"])
    assert same.status == 304 and nothing == b""
    events = json.loads(get(live, "/api/events")[1])["events"]
    assert [int(event["number"]) for event in events] == list(range(1, len(events) + 1))
    assert events[0]["kind"] == "trainer_started"
    assert answer.headers["Content-Type"] == "application/json"


class Page(HTMLParser):
    """Text by id, up to the first closing tag, and the rows of tables."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self._id = self._table = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        name = dict(attributes).get("id")
        if name:
            self._id = name
            self.texts[name] = ""
        if tag == "table":
            self._table = str(name)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self._id:
            self.texts[self._id] += data
        if self._table and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._id = ""
        if tag == "table":
            self._table = ""


@pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium")
def test_web_page_in_a_browser(live: Live, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            str(BROWSER),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            f"--user-data-dir={tmp_path}",
            *("--virtual-time-budget=6000", "--dump-dom", f"http://127.0.0.1:{live.port}/"),
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    page = Page(done.stdout)
    assert page.texts["length"] == "3.100" and page.texts["policy"] == "5"
    assert page.texts["staleness"] == "served draft is 0 versions behind"
    assert page.texts["speed-up"] == "\N{EN DASH}" and page.texts["draft"] == "0"
    assert page.texts["speed-up-note"].startswith("not known yet; a fixed draft length")
    assert page.texts["verdict"] == "no candidate was judged yet"
    assert page.texts["decision"] == "paused: training does not pay: it saves 1 s"
    assert page.texts["loss-note"] == "loss, 0 steps, paused"
    assert page.texts["ready"] == "1 / 2" and page.texts["samples"] == "7"
    assert page.texts["alive"] == "live" and page.texts["loss"] == "\N{EN DASH}"
    # What a client called its run is text, not markup.
    assert page.texts["run"] == "<b>run</b>" and page.tags.count("b") == 1
    fleet = {row[0]: row[1:] for row in page.rows if row}
    assert fleet[live.double.address][:6] == [
        *("ready", "0", "\N{EN DASH}", "5", "3.100", "0.90  0.70  0.50")
    ]
    assert fleet["127.0.0.1:9"][0] == "unreachable"
    kinds = [row[1] for row in page.rows if len(row) == 6]
    assert kinds[-1] == "trainer started" and "policy announced" in kinds
    assert page.tags.count("canvas") == 3
    assert "Refused to" not in done.stderr


@pytest.mark.slow
def test_events_follow_over_killed_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    with serving(config) as first:
        with open_channel(first.address) as channel:
            client = Client(channel)
            client.open()
            client.announce(3)
        port = int(first.address.rpartition(":")[2])
        follower = subprocess.Popen(
            [*PROGRAM, "events", "--follow", "--json", "--address", first.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert follower.stdout is not None and follower.stderr is not None
            seen = [json.loads(follower.stdout.readline()) for _ in range(3)]
            assert [e["kind"] for e in seen] == [
                *("trainer_started", "run_opened", "policy_announced")
            ]
            assert seen[2]["policy_version"] == "3" and seen[1]["reason"] == "run run by test"
            first.end(signal.SIGKILL)
            text = follower.stderr.readline()
            assert "a running draft-trainer" in text and "trying again" in text
            with serving(write_config(tmp_path, server={"port": port})) as second:
                seen.append(json.loads(follower.stdout.readline()))
                assert seen[3]["kind"] == "trainer_started" and seen[3]["policy_version"] == "3"
                assert second.end(signal.SIGTERM)[0] == 0
            seen.append(json.loads(follower.stdout.readline()))
            assert seen[4]["kind"] == "trainer_stopped"
            assert [e["number"] for e in seen] == ["1", "2", "3", "4", "5"]
            follower.send_signal(signal.SIGINT)
            assert follower.wait(DEADLINE) == 130
        finally:
            follower.kill()
            follower.communicate()
    line = refused(capsys, "events", "--follow", "--address", first.address)
    assert "start it with draft-trainer serve" in line


def test_events_newest_and_after(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "events", "--address", live.address)[1]
    assert "trainer_started" in text and "\x1b" not in text
    lines = run(capsys, "events", "--newest", "2", "--json", "--address", live.address)[1]
    numbers = [int(json.loads(line)["number"]) for line in lines.splitlines()]
    assert len(numbers) == 2 and numbers[1] == numbers[0] + 1
    after = run(capsys, "events", "--after", str(numbers[0]), "--json", "--address", live.address)
    assert [int(json.loads(line)["number"]) for line in after[1].splitlines()] == numbers[1:]
