"""``draft-trainer``: runs the trainer, queries a running one, or makes a draft.

Every command is a dataclass: its fields are the options, its docstring is the help, ``run`` does
the work and returns the exit code. Nothing that loads torch is imported before ``run``.
"""

from __future__ import annotations

import ctypes
import gc
import io
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import tyro
from tyro.conf import UseAppendAction, arg, subcommand

from draft_trainer.cli.console import Events, Status
from draft_trainer.cli.doctor import Doctor
from draft_trainer.cli.init import Init
from draft_trainer.cli.plan import Plan
from draft_trainer.cli.release_actions import Releases
from draft_trainer.cli.warmup import Warmup
from slipstream.errors import RefusedError

if TYPE_CHECKING:
    from draft_trainer.config import TrainerConfig

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
SIGNAL_SECONDS = 0.2


class Command(Protocol):
    """A parsed command line."""

    def run(self) -> int:
        """Run the command; return its exit code."""


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Run the trainer.

    Runs until SIGTERM or SIGINT, and prints one line when it is ready.

    The configuration needs draft.initial, the checkpoint that the rollout servers were started
    with, and publish.rollout_servers, their control planes. Every other key has a default. While
    not set, these keys follow the data: replay.held_out_fraction, training.batch_tokens,
    gate.min_anchors, publish.num_speculative_tokens and publish.draft_sample_method.
    If no draft is released, draft-trainer doctor says which key to change.
    """

    config: Annotated[Path, arg(metavar="FILE")]
    """TOML; --check prints all of its keys. Paths in it are relative to its folder."""
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY=VALUE")] = ()
    """Override a key of the file, as in training.learning_rate=3e-4. May be given several times."""
    check: bool = False
    """Print every key, check draft, device and rollout servers, and exit: 1 for a problem."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged, to stderr."""

    def run(self) -> int:
        """Return 0 after a signal; 1 if training failed or not everything stopped in time."""
        from draft_trainer.config_file import changed_keys, load_config
        from draft_trainer.kernels.library import use_kernels
        from draft_trainer.server.app import TrainerServer
        from slipstream.serving.server import stop_signals

        logging.basicConfig(
            level=self.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            stream=sys.stderr,
        )
        try:
            Path.cwd()
        except FileNotFoundError as error:
            # Later, MKL would end the process and blame a library of torch.
            raise RefusedError(
                *("working directory", "one that was removed", "an existing folder"),
                "cd to one, then run the command again",
            ) from error
        config = load_config(self.config, self.set)
        if self.check:
            return _check(config)
        for key, value in changed_keys(config):
            logging.getLogger(__name__).info("configuration: %s = %s", key, value)
        # Compiles now, so that no training step waits for a compiler.
        logging.getLogger(__name__).info(use_kernels(config.training.cpu_kernels))
        server = TrainerServer(config)
        signalled = stop_signals()
        tune_memory()
        server.loop.after_gate = return_freed_memory
        try:
            server.start()
            with suppress(OSError):  # A closed pipe or a full disk is no reason to end.
                # One write: else another thread's log line may come between the line and its end.
                sys.stdout.write(f"{server.ready_line}\n")
            _flush_output()
            while not (signalled() or server.died.wait(SIGNAL_SECONDS)):
                pass
        finally:
            # After an error, too: the server's threads would keep the process and the registry.
            clean = server.stop()
        if not signalled():
            print(
                "draft-trainer: training ended with the error above; a restart resumes from the "
                "newest training state",
                file=sys.stderr,
            )
            return FAILED
        if not clean:
            print("draft-trainer: not everything stopped in time", file=sys.stderr)
            return FAILED
        return 0


def _check(config: TrainerConfig) -> int:
    from draft_trainer.cli.doctor import check_configuration, described, has_problem
    from draft_trainer.config_file import shown

    print(shown(config))
    found = check_configuration(config)
    for line in described(found):
        print(f"# {line}")
    return FAILED if has_problem(found) else 0


def tune_memory() -> None:
    """Tune glibc and Python's collector for a process that receives large messages.

    glibc returns freed megabytes to the system at once, and every message would fault its pages in
    anew: up to 64 MiB are kept in each of its arenas. It makes eight arenas a core, for as many
    threads, each of which would keep that much: four are enough. The cyclic collector skips what
    exists now (modules, which live as long as the process) and runs less often.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # malloc.h of glibc; 32 MiB is its largest mmap value.
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8
    if mallopt is not None and mallopt(mmap_threshold, 32 << 20):
        mallopt(trim_threshold, 64 << 20)
        mallopt(arena_max, 4)
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, *gc.get_threshold()[1:])


def return_freed_memory() -> None:
    """Have glibc return all pages that hold nothing, in the middle of its arenas too.

    By itself it returns those at an arena's end: of a gate's tensors, hundreds of MiB would stay
    each time. Threads that allocate wait meanwhile, a tenth of a second for a GiB, so this is not
    for a policy's process.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


REMOVED = {
    "top": "use draft-trainer status --watch",
    "record": "use draft-trainer warmup",
    "fit": "use draft-trainer warmup",
}
"""Commands that were removed, each with the next step."""

_COMMANDS: Any = (
    Annotated[Serve, subcommand("serve")]
    | Annotated[Warmup, subcommand("warmup")]
    | Annotated[Init, subcommand("init")]
    | Annotated[Plan, subcommand("plan")]
    | Annotated[Status, subcommand("status")]
    | Annotated[Doctor, subcommand("doctor")]
    | Annotated[Events, subcommand("events")]
    | Annotated[Releases, subcommand("releases")]
)


def parse(argv: Sequence[str] | None = None) -> Any:
    """Return the command that the arguments name, a dataclass of this package.

    Raises:
        RefusedError: the command is one of ``REMOVED``.
        SystemExit: 2, the arguments are wrong (told on stderr); 0, help or a completion script was
            asked for.
    """
    name = next(iter(sys.argv[1:] if argv is None else argv), "")
    if name in REMOVED:
        raise RefusedError("command", f"{name}, which was removed", "a command", REMOVED[name])
    return tyro.cli(
        _COMMANDS,
        prog="draft-trainer",
        description="Trains a draft on a moving policy's states and publishes it. "
        "--version prints the version.",
        args=argv,
        config=(
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.OmitArgPrefixes,
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.DisallowNone,
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0: done; 1: it failed on the way; 2: refused, with the reason on
    stderr; 130: interrupted."""
    _open_output()
    try:
        command: Command = parse(argv)
        status = command.run()
        sys.stdout.flush()
        return status
    except RefusedError as error:
        print(f"draft-trainer: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return FAILED  # The reader has closed the pipe (| head).
    except OSError as error:
        print(
            f"draft-trainer: {error}. Next step: check that the folder can be written and the disk "
            "has space, then run it again",
            file=sys.stderr,
        )
        return FAILED
    finally:
        _flush_output()


def _flush_output() -> None:
    """Flush stdout; drop what cannot be printed, or Python would try again at exit, with a
    traceback and status 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_output() -> None:
    """Make stdout and stderr usable, whatever the shell has passed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell: >&-
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (until it ends)
        elif isinstance(stream, io.TextIOWrapper):
            # Not every locale has the dashes and lines of the tables.
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
