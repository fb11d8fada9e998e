"""``rollout-server``: vLLM with Slipstream's control plane beside it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rollout_server.vllm.plugins import mark_process
from slipstream import __version__
from slipstream.errors import RefusedError, missing_package

_DESCRIPTION = """\
Serve a policy with vLLM and a draft that can be replaced while requests run. The
OpenAI API is vLLM's own; the control plane (gRPC, service
slipstream.v1.RolloutServer) listens on its own port.
"""

_EXAMPLES = """\
examples:
  rollout-server serve ./policy --draft ./draft-release-0 --generation-config vllm
  rollout-server serve ./policy --draft ./draft --port 8000 --control-port 50061 \\
      --generation-config vllm --draft-length 3 --dtype float32 --max-model-len 512
  rollout-server serve --help=all      every option, vLLM's included
  rollout-server fleet --replicas 2 --members fleet --host 127.0.0.1 \\
      ./policy --draft ./draft --generation-config vllm
                                       two servers on this machine that Ray restarts
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, 2 for a refusal."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="rollout-server",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=["serve", "fleet"], help="see COMMAND --help")
    # Only the first word is parsed here: the rest is vLLM's parser's, whose import
    # takes seconds.
    command = parser.parse_args(arguments[:1]).command
    try:
        if command == "fleet":
            from rollout_server.ray.fleet import fleet

            return fleet(arguments[1:])
        mark_process()
        from rollout_server.vllm.launch import serve

        return serve(arguments[1:])
    except RefusedError as error:
        print(f"rollout-server: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        refused = missing_package(error, {}, "vllm")
        cpu = "; without a GPU: python -m rollout_server.install_cpu"
        print(f"rollout-server: {refused}{cpu}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # vLLM turns a SIGTERM during start-up into this; its processes have ended.
        return 130


if __name__ == "__main__":
    sys.exit(main())
