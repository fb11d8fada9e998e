"""Which code is running, for manifests."""

from __future__ import annotations

from importlib import resources

import slipstream

COMMIT_FILE = "_commit"
"""Written into a wheel by the build hook."""


def code_version() -> str:
    """Slipstream's version, and "+g" with the git commit where the build knew it.

    Only a wheel knows: an editable install runs whatever the checkout holds by now.
    """
    file = resources.files("slipstream") / COMMIT_FILE
    commit = file.read_text().strip() if file.is_file() else ""
    return f"{slipstream.__version__}+g{commit}" if commit else slipstream.__version__
