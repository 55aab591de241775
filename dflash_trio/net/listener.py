"""Listening sockets: TCP addresses and names, and Unix sockets with their files."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterable
from contextlib import suppress

import trio

DEFAULT_BACKLOG = 1024
"""Connections the kernel queues for us; Linux caps it at net.core.somaxconn (4096 by default)."""

SEND_BUFFER_BYTES = 256 * 1024
"""The kernel's send buffer per connection. Left alone it grows to megabytes, which a client that
reads nothing would cost us each, and which hide for long that it reads nothing."""

UNIX_SOCKET_MODE = 0o600
"""A Unix socket is reached by its owner only, unless the caller says otherwise: there is no
other check of who connects."""

# With port 0 and several addresses, the port that the first got may be taken on another.
_PORT_ZERO_ATTEMPTS = 16

_REASONS = {
    errno.EADDRINUSE: "the address is already in use",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EADDRNOTAVAIL: "this machine does not have that address",
    errno.EAFNOSUPPORT: "this machine does not support that kind of address",
    errno.ENOENT: "no such directory",
    errno.ENOTDIR: "the parent is not a directory",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "the path is too long",
}
# What makes one address of a name unusable while the others may serve.
_ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


class BindError(Exception):
    """We cannot listen where we were told to. The text is one line that names the address."""


class BoundListeners:
    """Sockets that are bound and listening, in the hands of one owner.

    Clients connect (and wait in the kernel's queue) from now on. Close it exactly where it was
    opened, or hand it to a ``ConnectionServer``, whose ``stop_accepting`` closes it.
    """

    def __init__(
        self,
        sockets: Iterable[socket.socket],
        *,
        port: int | None,
        tls: bool = False,
        unix_path: str | None = None,
    ) -> None:
        self._sockets = list(sockets)
        self.port = port
        """The TCP port shared by all addresses; None for a Unix socket."""
        scheme = "https" if tls else "http"
        self.addresses: tuple[str, ...] = tuple(_url(sock, scheme) for sock in self._sockets)
        """Where we listen, for people: URLs, or ``unix:/path``."""
        self.on_loopback = all(
            sock.family != socket.AF_UNIX and is_loopback(sock.getsockname()[0])
            for sock in self._sockets
        )
        """Every address is this machine's loopback, whatever it was called. Not a Unix socket."""
        self.closed = False
        self._unix_path = unix_path
        # Which file is ours: a successor may have put its own in the same place by the time we
        # close. None when there is nothing to remove.
        self._unix_file = None if unix_path is None else _file_id(unix_path)

    def trio_listeners(self) -> list[trio.SocketListener]:
        """The same sockets for trio; they stay ours to close."""
        return [trio.SocketListener(trio.socket.from_stdlib_socket(s)) for s in self._sockets]

    def close(self) -> None:
        """Refuse connections from now on, the queued ones too, and remove the socket's file.

        Synchronous, and harmless the second time. The file is removed once, and only if it is
        still the one we made.
        """
        if self.closed:
            return
        self.closed = True
        if self._unix_path is not None and self._unix_file == _file_id(self._unix_path):
            with suppress(OSError):
                os.unlink(self._unix_path)
        for sock in self._sockets:
            sock.close()


def is_loopback(address: str) -> bool:
    """Whether an IP address in its usual form is reached from its own machine only."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def loopback_in_numbers(host: str) -> bool | None:
    """The same of whatever the system reads as an address (127.1, 0x7f000001), asking nobody.

    ``None``: it is a name, and only the resolver knows.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None
    return all(is_loopback(str(sockaddr[0])) for *_, sockaddr in found)


def bind_listeners(
    host: str,
    port: int,
    *,
    backlog: int = DEFAULT_BACKLOG,
    tls: bool = False,
    unix_mode: int = UNIX_SOCKET_MODE,
) -> BoundListeners:
    """Bind and listen; BindError says in one line why that is not possible.

    *host* is an IPv4 address, an IPv6 address (brackets allowed), a name (all its addresses, on
    one port), or ``unix:/path`` (*port* is ignored, *unix_mode* is the file's mode). Port 0 takes
    any free port. *tls* only chooses the scheme of the printed addresses. Resolving a name may
    block: call it while starting, not in the middle of serving.
    """
    if host.startswith("unix:"):
        path = host.removeprefix("unix:")
        return BoundListeners([_bind_unix(path, backlog, unix_mode)], port=None, unix_path=path)
    if not 0 <= port <= 65535:
        raise BindError(f"cannot listen on {host}: {port} is not a port")
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    addresses = _resolve(name, port)
    for attempt in range(_PORT_ZERO_ATTEMPTS):
        try:
            sockets = _bind_all(addresses, port, backlog)
            break
        except OSError as error:
            again = port == 0 and error.errno == errno.EADDRINUSE
            if not again or attempt == _PORT_ZERO_ATTEMPTS - 1:
                raise _bind_error(_printable(name, port), error) from error
    return BoundListeners(sockets, port=sockets[0].getsockname()[1], tls=tls)


def _resolve(name: str, port: int) -> list[tuple[int, str]]:
    """The (family, address) pairs that *name* stands for, in the resolver's order."""
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise BindError(f"cannot listen on {_printable(name, port)}: unknown host") from error
    # A scope (fe80::1%eth0) is part of the text getaddrinfo was given, so it is resolved again.
    return list(
        dict.fromkeys(
            (family, name if "%" in name else str(addr[0])) for family, _, _, _, addr in found
        )
    )


def _bind_all(addresses: list[tuple[int, str]], port: int, backlog: int) -> list[socket.socket]:
    """Listen on every address, on the port that the first one gets.

    An address that this machine lacks is skipped as long as another works (a name for both
    127.0.0.1 and ::1 on a machine without IPv6).
    """
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, address in addresses:
            try:
                sock = _listen_tcp(family, address, port, backlog)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error
                continue
            sockets.append(sock)
            port = sock.getsockname()[1]
        if absent is not None and not sockets:
            raise absent
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _listen_tcp(family: int, address: str, port: int, backlog: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restart must not wait for the last run's connections to leave TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted TCP sockets inherit it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if family == socket.AF_INET6:
            # "::" is IPv6 only, whatever the system's default, so it goes together with 0.0.0.0.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        info = socket.getaddrinfo(address, port, family, socket.SOCK_STREAM)
        sock.bind(info[0][4])
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_unix(path: str, backlog: int, mode: int) -> socket.socket:
    label = f"unix:{path}"
    if not path:
        raise BindError("cannot listen on unix: no path is given")
    _remove_stale_socket(path, label)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # On Linux the file is created with the mode of the socket itself, so it is never wider
        # than asked for, not even for a moment. Elsewhere this fails and chmod has to do.
        with suppress(OSError):
            os.fchmod(sock.fileno(), mode)
        sock.bind(path)
        os.chmod(path, mode)
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno is None:  # the socket module's own "AF_UNIX path too long"
            error.errno = errno.ENAMETOOLONG
        raise _bind_error(label, error) from error
    return sock


def _remove_stale_socket(path: str, label: str) -> None:
    """Remove a socket file that a dead server left; BindError for anything else in the place."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise _bind_error(label, error) from error
    if not stat.S_ISSOCK(found.st_mode):
        raise BindError(f"cannot listen on {label}: the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full queue must not hold us up: it means somebody listens
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            pass  # nobody listens on it
        except FileNotFoundError:
            return  # it has just gone
        except BlockingIOError:
            raise BindError(f"cannot listen on {label}: {_REASONS[errno.EADDRINUSE]}") from None
        except OSError as error:
            raise _bind_error(label, error) from error
        else:
            raise BindError(f"cannot listen on {label}: {_REASONS[errno.EADDRINUSE]}")
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _bind_error(label, error) from error


def _bind_error(label: str, error: OSError | ValueError) -> BindError:
    number = error.errno if isinstance(error, OSError) else None
    reason = _REASONS.get(number or 0) or getattr(error, "strerror", None) or str(error)
    return BindError(f"cannot listen on {label}: {reason}")


def _printable(name: str, port: int) -> str:
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def _url(sock: socket.socket, scheme: str) -> str:
    address = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{address}"
    return f"{scheme}://{_printable(address[0], address[1])}"


def _file_id(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
