"""The options of the whole launch and of the listener."""

from __future__ import annotations

from functools import partial

from dflash_trio.cli import values
from dflash_trio.cli.option import Option, Scope
from dflash_trio.cli.values import choice, integer

_launch = partial(Option, scope=Scope.LAUNCH)
_listener = partial(Option, scope=Scope.LISTENER)

LAUNCH_OPTIONS: tuple[Option, ...] = (
    _launch(
        "load-balancing",
        takes=None,
        default="off",
        help="Load every model, and let a request go to the next one while the primary is busy.",
    ),
    _launch(
        "load-balancing-primary-gpu",
        takes=values.PRIMARY_DEVICE,
        default="the first block",
        help="The model with exactly this --target-device is tried first; nothing moves.",
    ),
    _launch(
        "config",
        takes=values.TOML_FILE,
        default="none",
        help="Read the launch from a TOML file; beside it, only launch and listener options.",
        in_file=False,
    ),
    _launch(
        "check",
        takes=None,
        default="off",
        help="Check the launch and its files, say what would load, and exit.",
        in_file=False,
    ),
    _launch(
        "list-devices",
        takes=None,
        default="off",
        help="List the devices that models can be placed on, and exit.",
        in_file=False,
    ),
    _launch(
        "log-format",
        takes=choice("console", "json"),
        default="console",
        help="Log lines for people, or one JSON object a line.",
        field="log_format",
    ),
    _launch(
        "log-level",
        takes=choice("debug", "info", "warning", "error"),
        default="info",
        help="The least severe log lines that are written.",
        field="log_level",
    ),
    _launch(
        "version",
        takes=None,
        default="off",
        help="Print the version and exit.",
        in_file=False,
    ),
    _launch(
        "help",
        takes=None,
        default="off",
        help="Print this text and exit.",
        in_file=False,
    ),
)

LISTENER_OPTIONS: tuple[Option, ...] = (
    _listener(
        "host",
        takes=values.HOST,
        default="127.0.0.1",
        help="The address to listen on: IPv4, IPv6, a host name, or unix:/path.",
        field="host",
    ),
    _listener(
        "port",
        takes=integer(0, 65535),
        default="8080",
        help="The TCP port; 0 takes any free one and prints it.",
        field="port",
    ),
    _listener(
        "routing-queue-limit",
        takes=integer(0, 1_000_000),
        default="32",
        help="Requests that may wait for a busy model; 0 answers 503 at once.",
        field="routing_queue_limit",
    ),
    _listener(
        "api-key",
        takes=values.API_KEY,
        default="none",
        help="A key that clients must send; may be repeated (also: DFLASH_API_KEY).",
        repeatable=True,
        secret=True,
    ),
    _listener(
        "api-key-file",
        takes=values.FILE,
        default="none",
        help="A file of keys, one a line, blank lines skipped; may be repeated.",
        repeatable=True,
    ),
    _listener(
        "cors-origin",
        takes=values.ORIGIN,
        default="none",
        help="An origin whose pages may call this server; may be repeated; * is every origin.",
        repeatable=True,
        field="cors_origins",
    ),
    _listener(
        "no-cors",
        takes=None,
        default="on",
        help="No origin may call from a browser page, as is the default.",
    ),
    _listener(
        "drain-timeout",
        takes=values.SECONDS,
        default="none",
        help="Seconds that a shutdown waits for active requests before it ends them.",
        field="drain_timeout",
    ),
    _listener(
        "client-stall-timeout",
        takes=values.SECONDS_ABOVE_ZERO,
        default="60",
        help="Seconds that a client may read nothing before its connection is cut.",
        field="client_stall_timeout",
    ),
    # Above 256 MiB a body could never be held: that is the bound over all bodies together.
    _listener(
        "max-body-bytes",
        takes=integer(1, 256 * 2**20),
        default="33554432 (32 MiB)",
        help="The largest request body in bytes; a larger one is answered 413.",
        field="max_body_bytes",
    ),
    _listener(
        "max-connections",
        takes=integer(1, 1_000_000),
        default="1024",
        help="Connections open at a time.",
        field="max_connections",
    ),
    _listener(
        "tls-cert",
        takes=values.FILE,
        default="none",
        help="The PEM certificate chain to serve HTTPS with; goes with --tls-key.",
        field="tls_cert",
    ),
    _listener(
        "tls-key",
        takes=values.FILE,
        default="none",
        help="The PEM private key of --tls-cert.",
        field="tls_key",
    ),
)
