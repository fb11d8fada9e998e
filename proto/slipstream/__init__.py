"""The wire contract of Slipstream: generated gRPC code and hand-written helpers.

``slipstream.v1`` holds the messages and services generated from
``proto/slipstream/v1/*.proto``. The modules beside it turn tensors, refusals
and layer numbers into those messages and back. Importing this package loads
neither torch nor gRPC; its modules load what they need.
"""

__version__ = "0.1.0"
