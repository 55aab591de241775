"""Bytes on sockets: listeners, connections, HTTP/1.1. Knows no models and no routes."""

from .connection import OUTPUT_LOST, OUTPUT_PENDING
from .connection_server import ConnectionServer, ConnectionStatistics, server_ssl_context
from .direct_output import DIRECT_OUTPUT, DirectOutput
from .h11_protocol import SEND_CONTINUE
from .listener import BindError, BoundListeners, bind_listeners
from .stream import StallGuardedStream

__all__ = [
    "DIRECT_OUTPUT",
    "OUTPUT_LOST",
    "OUTPUT_PENDING",
    "SEND_CONTINUE",
    "BindError",
    "BoundListeners",
    "ConnectionServer",
    "ConnectionStatistics",
    "DirectOutput",
    "StallGuardedStream",
    "bind_listeners",
    "server_ssl_context",
]
