"""``python -m benchmarks.gpu``: what has to be shown on a GPU.

Three parts of at most ten minutes each. Every section is a process of its own, which ends with its
part at the latest: one that fails or hangs, or that leaves the GPU in an error, ends no other. Its
figures are written before the next begins, so that a machine that is taken away leaves what it
measured. With ``--device cpu --tiny`` the benchmark checks itself: every section runs on a few
kilobytes, and every target is listed as not measured. ``plan`` runs it where one command after the
other has a machine for minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.gpu.bench import Bench, NotMeasuredError
from benchmarks.gpu.pack import join
from benchmarks.harness import Target, end_on_sigterm, finish, options, say, write

# Of ten minutes; the rest is for what comes before: imports, and packages that are installed.
PART_SECONDS = 500.0


class Bound(NamedTuple):
    """The bound of a figure, by its name in the section's figures."""

    figure: str
    way: Literal["at least", "at most"]
    value: float

    def target(self, value: float) -> Target:
        """Return the target that ``value`` meets or not."""
        make = Target.at_least if self.way == "at least" else Target.at_most
        return make(self.figure, value, self.value)


class Section(NamedTuple):
    """One measurement.

    Attributes:
        run: returns figures.
        seconds: that it is not begun without.
        bounds: of its figures.
    """

    run: Callable[[Bench], Mapping[str, Any]]
    seconds: float
    bounds: tuple[Bound, ...] = ()


def _of(path: str, **named: Any) -> Callable[[Bench], Mapping[str, Any]]:
    """A module's function, imported where it runs: packages that it lacks end no other section."""
    module, _, name = path.partition(".")

    def run(bench: Bench) -> Any:
        return getattr(import_module(f"benchmarks.gpu.{module}"), name)(bench, **named)

    return run


CEILINGS = Section(_of("sections.ceilings"), 10.0)
PARTS: dict[int, dict[str, Section]] = {
    1: {
        "ceilings": CEILINGS,
        "smoke": Section(
            _of("operations.smoke"),
            20.0,
            (
                Bound("relative error of a product", "at most", 0.01),
                Bound("relative error of attention", "at most", 0.02),
                Bound("relative error of a norm", "at most", 0.01),
                Bound("hashes that differ", "at most", 0),
                Bound("swaps that a graph does not see", "at most", 0),
            ),
        ),
        "parity": Section(
            _of("sections.parity"),
            60.0,
            (
                Bound("relative error of the loss", "at most", 0.01),
                Bound("cosine of the gradients", "at least", 0.999),
                Bound("relative error of the gradients' norm", "at most", 0.01),
                Bound("difference of the acceptance length", "at most", 0.01),
            ),
        ),
        "waits": Section(
            _of("sections.waits"),
            40.0,
            (
                Bound("passes that wait", "at most", 0),
                Bound("peak GB of a pass", "at most", 12.0),
            ),
        ),
        "gate": Section(
            _of("sections.gate"), 30.0, (Bound("peak GB of the gate", "at most", 4.0),)
        ),
        "training": Section(
            _of("sections.training"),
            60.0,
            (Bound("share of the products' ceiling", "at least", 0.35),),
        ),
        "profile": Section(_of("sections.profile"), 30.0),
        "compile": Section(
            _of("operations.compiled"), 40.0, (Bound("error of a compiled score", "at most", 1e-3),)
        ),
        # A machine without an index has the peers that ``pack`` brought, or none.
        "specforge": Section(
            _of("sections.beside", peer="specforge", share=0.5),
            60.0,
            (Bound("speed against specforge", "at least", 1.0),),
        ),
        "speculators": Section(
            _of("sections.beside", peer="speculators", share=1.0),
            60.0,
            (Bound("speed against speculators", "at least", 1.0),),
        ),
    },
    2: {
        "ceilings": CEILINGS,
        "states": Section(
            _of("sections.states"),
            40.0,
            (
                Bound("seconds of the training thread", "at most", 0.05),
                Bound("share of the pinned copy's rate", "at least", 0.8),
            ),
        ),
        "memory": Section(
            _of("sections.memory"), 60.0, (Bound("drills survived", "at least", 1.0),)
        ),
        "filled": Section(
            _of("sections.filled"), 30.0, (Bound("first steps recovered", "at least", 1.0),)
        ),
        "capture": Section(
            _of("sharing.capture"),
            180.0,
            (
                Bound("forward with a window over one without", "at most", 1.01),
                Bound("share of the samples accepted", "at least", 1.0),
                Bound("samples shed", "at most", 0),
            ),
        ),
        "run_ahead": Section(
            _of("sharing.run_ahead"),
            60.0,
            (
                Bound("seconds of a ship", "at most", 0.005),
                Bound("share of a run-ahead's samples accepted", "at least", 1.0),
                Bound("samples shed by a run-ahead", "at most", 0),
            ),
        ),
        "shared": Section(_of("sharing.shared"), 60.0),
    },
    3: {
        "vllm_engine": Section(
            _of("engines.vllm_engine"),
            60.0,
            (
                Bound("runs that differ", "at most", 0),
                Bound("drafts lost in pinned swaps", "at most", 0),
                Bound("p-value of sampled tokens", "at least", 1e-4),
            ),
        ),
        "vllm_server": Section(
            _of("engines.vllm_server"), 120.0, (Bound("requests that failed", "at most", 0),)
        ),
        "vllm_sleep": Section(
            _of("engines.vllm_sleep"), 60.0, (Bound("sleeps that changed output", "at most", 0),)
        ),
        "vllm_fp8": Section(_of("engines.vllm_server", kinds=("fp8",)), 90.0),
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; the exit status is 0 if every target is met, or in a self-check."""
    chosen = _parse(argv)
    if chosen.section is not None:
        return _alone(chosen)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "--device: found cuda and no GPU, expected one. Next step: --device cpu --tiny checks "
            "the benchmark; what nvidia-smi says, and whether torch is built for CUDA"
        )
    end_on_sigterm()
    results: dict[str, Any] = {}
    targets: list[Target] = []
    absent: dict[str, str] = {}
    figures = {"device": chosen.device, "sections": results, "not_measured": absent}
    with tempfile.TemporaryDirectory() as folder:
        if chosen.parts is not None:
            wheels = Path(folder) / "wheels"
            absent |= join(chosen.parts, wheels)
            os.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
        for number in chosen.part:
            until = time.monotonic() + chosen.seconds
            for name, section in PARTS[number].items():
                if chosen.only and name not in (*chosen.only.split(","), "ceilings"):
                    continue
                say(f"part {number}: {name}")
                results[name] = found = _measured(name, section, chosen, Path(folder), until)
                for bound in section.bounds:
                    value = found["figures"].get(bound.figure)
                    if value is None or chosen.device != "cuda" or chosen.tiny:
                        absent[bound.figure] = found["reason"] or "not measured on a GPU"
                    else:
                        targets.append(bound.target(float(value)))
                write(chosen.json, figures, targets)
    for name, reason in absent.items():
        print(f"not measured  {name}: {reason}")
    status = finish(chosen.json, figures, targets)
    broken = any(found["status"] == "failed" for found in results.values())
    # What is not measured is not met.
    return int(status or broken or (chosen.device == "cuda" and bool(absent)))


def _measured(
    name: str, section: Section, chosen: argparse.Namespace, folder: Path, until: float
) -> dict[str, Any]:
    """A section's status, reason and figures, from a process of its own."""
    begin, out, log = time.monotonic(), folder / f"{name}.json", folder / f"{name}.log"
    found: dict[str, Any] = {"status": "failed", "reason": "", "figures": {}}
    left = until - begin
    if left < section.seconds:
        found |= {"status": "not measured", "reason": f"{left:.0f} s are left of this part"}
    else:
        with log.open("wb") as output:
            process = subprocess.Popen(
                _command(name, chosen, out, until), stderr=output, start_new_session=True
            )
        try:
            code: int | None = process.wait(left)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said = log.read_text(errors="replace")
        sys.stderr.write(said)
        if code == 0:
            found |= json.loads(out.read_text())
        elif code is None:
            found["reason"] = f"not done after {left:.0f} s"
        else:
            found["reason"] = f"exit status {code}: {said.strip().rpartition(chr(10))[2]}"
    if found["reason"]:
        say(f"{found['status']}: {found['reason']}")
    return {**found, "seconds": time.monotonic() - begin}


def _command(name: str, chosen: argparse.Namespace, out: Path, until: float) -> list[str]:
    """The command of a section alone; what its part's ceilings wrote lies beside ``out``."""
    given = ("--section", name, "--device", chosen.device, "--json", str(out))
    tiny = ("--tiny",) if chosen.tiny else ()
    return [sys.executable, "-m", "benchmarks.gpu", *given, *tiny, "--until", str(until)]


def _alone(chosen: argparse.Namespace) -> int:
    """Run one section in this process."""
    sections_of = {name: section for part in PARTS.values() for name, section in part.items()}
    folder = chosen.json.parent
    bench = Bench(torch.device(chosen.device), chosen.tiny, folder, chosen.until)
    measured = folder / "ceilings.json"
    if measured.exists():
        bench.ceilings = json.loads(measured.read_text())["figures"]
    found: dict[str, Any] = {"status": "measured", "reason": "", "figures": {}}
    try:
        found["figures"] = dict(sections_of[chosen.section].run(bench))
    except NotMeasuredError as error:
        found |= {"status": "not measured", "reason": str(error)}
    chosen.json.write_text(json.dumps(found))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options("gpu", "Correctness, speed and sharing of a GPU.")
    add = parser.add_argument
    add("--part", type=int, nargs="+", choices=tuple(PARTS), default=tuple(PARTS), help="which")
    add("--only", help="sections, separated by commas; ceilings always come first")
    add("--seconds", type=float, default=PART_SECONDS, help="of a part, at most")
    add("--device", choices=("cpu", "cuda"), default="cuda", help="what is measured")
    add("--parts", type=Path, help="folder of `pack split`: the peers' wheels, without an index")
    add("--tiny", action="store_true", help="shapes of a few kilobytes; no target is measured")
    add("--section", help="run this one in this process; --json gets its figures alone")
    add("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.section is not None and chosen.json is None:
        parser.error("--section: found no --json, expected the file for its figures")
    known = dict.fromkeys(name for number in chosen.part for name in PARTS[number])
    for name in (*(chosen.only or "").split(","), chosen.section or ""):
        if not name:
            continue
        if name not in known:
            parser.error(f"found section {name}, expected some of {', '.join(known)}; see --part")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
