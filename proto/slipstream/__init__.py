"""The wire contract of Slipstream: generated gRPC code and hand-written helpers.

``slipstream.v1`` holds the messages and services generated from
``proto/slipstream/v1/*.proto``. The modules beside it turn tensors, refusals
and layer numbers into those messages and back. Importing this package loads
neither torch nor gRPC; its modules load what they need.
"""

import os
import sys

_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
_READ_BEFORE = "grpc" in sys.modules and _VARIABLE not in os.environ

# gRPC reads the variable as it is imported. With its fork handlers, a child that is forked and
# closes its files before it execs (subprocess with preexec_fn, as sandboxes of code rewards and Ray
# start theirs) ends by SIGABRT at times: https://github.com/grpc/grpc/issues/43055.
os.environ.setdefault(_VARIABLE, "0")

_OFF = ("0", "false", "f", "no", "n")
FORKS_DISTURBED = _READ_BEFORE or os.environ[_VARIABLE].lower() not in _OFF
"""True if gRPC's fork handlers are on: the environment wants them, or gRPC was imported first."""

__version__ = "0.1.0"
