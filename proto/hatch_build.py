"""Build hook: generates the gRPC code from the .proto files.

Runs inside every build (wheel, sdist, editable install), so that a checkout is
never used with code generated from another version of the contract. Can also
be run by hand: ``python proto/hatch_build.py``.
"""

from __future__ import annotations

import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROTO_ROOT = Path(__file__).resolve().parent
COMMIT_FILE = PROTO_ROOT / "slipstream" / "_commit"


class GenerateGrpcCode(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling calls ``initialize`` before it collects files."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate ``*_pb2.py``, ``*_pb2.pyi`` and ``*_pb2_grpc.py`` next to the .proto files."""
        generate()
        # Outside of git the file is the source distribution's or the image's, and stays.
        if known := commit():
            COMMIT_FILE.unlink(missing_ok=True)
            if version != "editable":
                COMMIT_FILE.write_text(f"{known}\n")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Take the commit out of the checkout again: by its next commit it would be wrong."""
        if commit():
            COMMIT_FILE.unlink(missing_ok=True)


def commit() -> str:
    """The checkout's commit, ".dirty" behind it where files differ; empty outside of git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(PROTO_ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = ".dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short=12", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return ""


def generate() -> None:
    """Run protoc over ``proto/slipstream/v1/*.proto``.

    Raises:
        RuntimeError: protoc refused the files; its own message is on stderr.
    """
    from grpc_tools import protoc

    well_known = str(resources.files("grpc_tools") / "_proto")
    files = [str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.glob("slipstream/v1/*.proto")]
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTO_ROOT}",
            f"-I{well_known}",
            f"--python_out={PROTO_ROOT}",
            f"--pyi_out={PROTO_ROOT}",
            f"--grpc_python_out={PROTO_ROOT}",
            *sorted(files),
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status}; fix the .proto named above")


if __name__ == "__main__":
    generate()
