"""Makes small changes to the code that states guarantees, and says which tests notice them.

    python -m tests.mutants                     # all, by the tests of the fast tier
    python -m tests.mutants --all trial swap.  # some; what lives, by the slow tests too

``mutants.toml`` has the changes, by area. Each is made in a copy of this checkout, where the tests
of its area run until one fails. One that lives is a guarantee that no test states: write a test
that says what a user would lose, not which line changed. Where the product's code has changed, its
mutants are refused as stale and have to follow. pytest does not collect this folder: run it after a
change to code that it names, on an otherwise idle machine, with ``--unchanged`` first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = Path(__file__).with_name("mutants.toml")
GENERATED = ("proto/slipstream/v1/*_pb2*", "proto/slipstream/_commit")
TIERS = {"fast": "not slow", "slow": "slow"}
PASSED, FAILED, NONE_SELECTED = 0, 1, 5
"""pytest's exit codes."""
_FAILURE = re.compile(r"(?m)^(?:FAILED|ERROR) (tests/.+?)(?: - |$)")


@dataclass(frozen=True)
class Mutant:
    """One change: ``file`` says ``old`` exactly once, and then says ``new``."""

    name: str
    file: str
    tests: tuple[str, ...]
    breaks: str
    old: str
    new: str

    def refusal(self) -> str:
        """Return why it cannot be made; empty if it can."""
        gone = [path for path in (self.file, *self.tests) if not (ROOT / path).exists()]
        found = 0 if gone else (ROOT / self.file).read_text().count(self.old)
        what = f"there is no {', '.join(gone)}" if gone else f"its text is there {found} times"
        return "" if found == 1 else f"{self.name} is stale: {what}. Change {MUTANTS}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a mutant.

    Attributes:
        name, breaks: the mutant's.
        result: the tier that killed it, "lived", "time limit", or "broken": no test could run.
        test: the first that failed.
        seconds: that it took.
    """

    name: str
    breaks: str
    result: str
    test: str
    seconds: float


def read() -> list[Mutant]:
    """All mutants, in the file's order."""
    mutants = []
    for area, content in tomllib.loads(MUTANTS.read_text()).items():
        file, tests = content.pop("file"), tuple(f"tests/{t}" for t in content.pop("tests"))
        for name, given in content.items():
            mutants.append(Mutant(f"{area}.{name}", file, tests, given["breaks"], *given["change"]))
    return mutants


def copy_checkout(target: Path) -> None:
    """Copy what git tracks or would, and the generated gRPC code."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    names = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split("\0")
    generated = [path for pattern in GENERATED for path in ROOT.glob(pattern)]
    for source in [*(ROOT / name for name in names), *generated]:
        if source.is_file():  # one that was deleted is tracked until then
            to = target / source.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to)


def run_tests(copy: Path, tests: Sequence[str], marks: str, limit: float) -> tuple[int | None, str]:
    """Run tests of a copy until one fails.

    Returns:
        pytest's exit code, None at the time limit; the test that failed, else the output's end.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks]
    command += ["-o", "addopts=", f"--timeout={limit / 2}"]
    command += [f"--basetemp={copy.with_name('tmp')}", *tests]
    env = {**os.environ, "PYTHONPATH": f"{copy}:{copy / 'proto'}"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=env, stdout=output, stderr=output, start_new_session=True
        )
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
        finally:
            # Interrupted, it stops the servers that its tests have started.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    failure = _FAILURE.search(text)
    return code, failure[1] if failure else " | ".join(text.splitlines()[-3:])


def judge(mutant: Mutant, tiers: Sequence[str], limit: float, change: bool) -> Outcome:
    """Make the change, or none, in a copy and run the area's tests there, tier by tier."""
    began, result, test = time.monotonic(), "lived", ""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder, "copy")
        copy_checkout(copy)
        if change:
            path = copy / mutant.file
            path.write_text(path.read_text().replace(mutant.old, mutant.new))
        for tier in tiers:
            code, found = run_tests(copy, mutant.tests, TIERS[tier], limit)
            if code not in (PASSED, NONE_SELECTED):
                result = {FAILED: tier, None: "time limit"}.get(code, "broken")
                test = found
                break
    return Outcome(mutant.name, mutant.breaks, result, test, round(time.monotonic() - began, 1))


def main() -> int:
    """Returns 0 where every mutant is killed, 1 where one is not, 2 where one is stale."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("chosen", nargs="*", help="parts of names or files; default: all")
    parser.add_argument("--all", action="store_true", help="what lives, by the slow tests too")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of a mutant in a tier")
    parser.add_argument("--json", type=Path, help="where to write the outcomes as JSON")
    parser.add_argument("--unchanged", action="store_true", help="change nothing: all must live")
    args = parser.parse_args()
    chosen = [m for m in read() if any(c in m.name + m.file for c in args.chosen or [""])]
    if refusals := [refusal for mutant in chosen if (refusal := mutant.refusal())]:
        print(*refusals, sep="\n", file=sys.stderr)
        return 2
    if args.unchanged:
        chosen = [*{mutant.tests: mutant for mutant in chosen}.values()]
    tiers = [*TIERS] if args.all else ["fast"]
    wanted = ["lived"] if args.unchanged else tiers
    made = partial(judge, tiers=tiers, limit=args.limit, change=not args.unchanged)
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for ended in as_completed([pool.submit(made, mutant) for mutant in chosen]):
            outcomes.append(one := ended.result())
            print(f"{one.name:38} {one.result:10} {one.seconds:6.0f} s  {one.test}", flush=True)
            if args.json:
                args.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    others = [one.name for one in outcomes if one.result not in wanted]
    print(f"{len(outcomes)} run, {len(others)} not {' or '.join(wanted)}: {', '.join(others)}")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
