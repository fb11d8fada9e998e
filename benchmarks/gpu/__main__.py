"""``python -m benchmarks.gpu``: what has to be shown on a GPU.

Two parts of at most ten minutes each. Every section's figures are written before the next begins,
so that a machine that is taken away leaves what it measured. With ``--device cpu --tiny`` the
benchmark checks itself: every section runs on a few kilobytes, and every target is listed as not
measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.gpu import sections
from benchmarks.gpu.bench import Bench, NotMeasuredError
from benchmarks.gpu.pack import join
from benchmarks.harness import Target, end_on_sigterm, finish, options, say, write
from slipstream.errors import RefusedError

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


CEILINGS = Section(sections.ceilings, 10.0)
PARTS: dict[int, dict[str, Section]] = {
    1: {
        "ceilings": CEILINGS,
        "parity": Section(
            sections.parity,
            60.0,
            (
                Bound("relative error of the loss", "at most", 0.01),
                Bound("cosine of the gradients", "at least", 0.999),
                Bound("relative error of the gradients' norm", "at most", 0.01),
                Bound("difference of the acceptance length", "at most", 0.01),
            ),
        ),
        "waits": Section(
            sections.waits,
            40.0,
            (
                Bound("passes that wait", "at most", 0),
                Bound("peak GB of a pass", "at most", 12.0),
            ),
        ),
        "gate": Section(sections.gate, 30.0, (Bound("peak GB of the gate", "at most", 4.0),)),
        "training": Section(
            sections.training,
            60.0,
            (Bound("share of the products' ceiling", "at least", 0.35),),
        ),
        # A machine without an index has the peers that ``pack`` brought, or none.
        "specforge": Section(
            partial(sections.beside, peer="specforge", share=0.5),
            60.0,
            (Bound("speed against specforge", "at least", 1.0),),
        ),
        "speculators": Section(
            partial(sections.beside, peer="speculators", share=1.0),
            60.0,
            (Bound("speed against speculators", "at least", 1.0),),
        ),
    },
    2: {
        "ceilings": CEILINGS,
        "states": Section(
            sections.states,
            40.0,
            (
                Bound("seconds of the training thread", "at most", 0.05),
                Bound("share of the pinned copy's rate", "at least", 0.8),
            ),
        ),
        "memory": Section(sections.memory, 60.0, (Bound("drills survived", "at least", 1.0),)),
        "capture": Section(
            sections.capture,
            180.0,
            (
                Bound("forward with a window over one without", "at most", 1.01),
                Bound("share of the samples accepted", "at least", 1.0),
                Bound("samples shed", "at most", 0),
            ),
        ),
    },
}
# Of a section: what torch, the programs that it starts and a package that is missing raise, and a
# ceiling that is missing because its own section failed.
_FAILURES = (
    *(RuntimeError, RefusedError, OSError, ValueError, subprocess.SubprocessError),
    *(ImportError, KeyError),
)
NOT_BUILT = ("the policy's step while capture, training and swaps share its GPU",)
"""Targets that no section measures."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; the exit status is 0 if every target is met, or in a self-check."""
    chosen = _parse(argv)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "--device: found cuda and no GPU, expected one. Next step: --device cpu --tiny checks "
            "the benchmark; what nvidia-smi says, and whether torch is built for CUDA"
        )
    end_on_sigterm()
    results: dict[str, Any] = {}
    targets: list[Target] = []
    absent: dict[str, str] = dict.fromkeys(NOT_BUILT, "no section measures it")
    figures = {"device": chosen.device, "sections": results, "not_measured": absent}
    with tempfile.TemporaryDirectory() as folder:
        if chosen.parts is not None:
            wheels = Path(folder) / "wheels"
            absent |= join(chosen.parts, wheels)
            os.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
        for number in chosen.part:
            until = time.monotonic() + PART_SECONDS
            bench = Bench(torch.device(chosen.device), chosen.tiny, Path(folder), until)
            for name, section in PARTS[number].items():
                if chosen.only and name not in (*chosen.only.split(","), "ceilings"):
                    continue
                say(f"part {number}: {name}")
                results[name] = found = _measured(section, bench)
                for bound in section.bounds:
                    value = found["figures"].get(bound.figure)
                    if value is None or not bench.cuda or bench.tiny:
                        absent[bound.figure] = found["reason"] or "not measured on a GPU"
                    else:
                        targets.append(bound.target(float(value)))
                write(chosen.json, figures, targets)
    for name, reason in absent.items():
        print(f"not measured  {name}: {reason}")
    status = finish(chosen.json, figures, targets)
    broken = any(found["status"] == "failed" for found in results.values())
    # What is not measured is not met.
    unmeasured = absent.keys() - set(NOT_BUILT)
    return int(status or broken or (chosen.device == "cuda" and bool(unmeasured)))


def _measured(section: Section, bench: Bench) -> dict[str, Any]:
    """A section's status, reason and figures; one that fails does not end the others."""
    begin = time.monotonic()
    figures: Mapping[str, Any] = {}
    status, reason = "measured", ""
    try:
        if bench.seconds_left < section.seconds:
            raise NotMeasuredError(f"{bench.seconds_left:.0f} s are left of this part")
        figures = section.run(bench)
    except NotMeasuredError as error:
        status, reason = "not measured", str(error)
    except _FAILURES as error:
        status, reason = "failed", f"{type(error).__name__}: {error}"
    if bench.cuda:
        torch.cuda.empty_cache()
    if reason:
        say(f"{status}: {reason}")
    taken = time.monotonic() - begin
    return {"status": status, "reason": reason, "seconds": taken, "figures": dict(figures)}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options("gpu", "Correctness, speed and sharing of a GPU.")
    add = parser.add_argument
    add("--part", type=int, nargs="+", choices=tuple(PARTS), default=tuple(PARTS), help="which")
    add("--only", help="sections, separated by commas; ceilings always come first")
    add("--device", choices=("cpu", "cuda"), default="cuda", help="what is measured")
    add("--parts", type=Path, help="folder of `pack split`: the peers' wheels, without an index")
    add("--tiny", action="store_true", help="shapes of a few kilobytes; no target is measured")
    chosen = parser.parse_args(argv)
    known = dict.fromkeys(name for number in chosen.part for name in PARTS[number])
    for name in chosen.only.split(",") if chosen.only else ():
        if name not in known:
            parser.error(f"--only: found {name}, expected some of {', '.join(known)}; see --part")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
