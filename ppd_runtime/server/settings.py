"""How the server listens and whom it answers: settings, checked where they are made, before any worker starts."""

import errno
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ppd_runtime.replies.choice import AUTO, ReplyFormats
from ppd_runtime.settings.checks import check_bool, check_choice, check_int, check_range

KEY_VARIABLE = "PPD_API_KEY"
LOG_FORMATS = ("lines", "json")
_MOST_KEY = 4096
_ORIGIN = re.compile(
    r"(http(?!\S*:80$)|https(?!\S*:443$))://([a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?"
)
"""What browsers send in `Origin`."""


@dataclass(frozen=True)
class ServerSettings:
    """Where the server listens, who may use it, and how much it takes.

    Raises:
        ValueError: naming the value and the way out.
    """

    host: str = "127.0.0.1"
    """The address to listen at; any but this host's own loopback needs an API key."""
    port: int = 8000
    """The port; 0 takes a free one."""
    api_key: str | None = None
    """The key that clients have to give. Other users of this host see it in the list of processes: a file, or the
    environment variable PPD_API_KEY, keeps it from them."""
    api_key_file: Path | None = None
    """A file that holds the key, which only its owner may read."""
    served_model_name: str | None = None
    """What clients call the model; default: its own name."""
    chat_template: Path | None = None
    """A Jinja template's file for chats; default: the tokenizer's own."""
    tool_call_parser: str = AUTO
    """How the model writes calls of tools: hermes, qwen3_coder, llama3_json, mistral, gemma, gpt_oss, or auto for the
    chat template's way."""
    reasoning_parser: str = AUTO
    """How the model marks its thinking, which answers have as `reasoning_content`: think, mistral, gpt_oss, none to
    leave it in the text, or auto for the chat template's way."""
    max_waiting: int = 64
    """Choices that may wait for their turn; more get status 429."""
    max_body_mib: int = 8
    """Size of a request, in MiB, at the most."""
    request_timeout_s: float = 600.0
    """Seconds that one choice may take; what there is by then is the answer."""
    shutdown_timeout_s: float = 30.0
    """Seconds that SIGTERM leaves to what runs."""
    cors_origin: tuple[str, ...] = ()
    """A web page's origin that may use the server from a browser; may be given again."""
    ssl_certfile: Path | None = None
    """A certificate's file, for TLS."""
    ssl_keyfile: Path | None = None
    """The certificate's private key."""
    log_format: str = "lines"
    """lines or json: one for each request, on standard error."""
    page: bool = True
    """Show a page for trying prompts at /."""

    @property
    def reply_formats(self) -> ReplyFormats:
        """How replies are read; raises ValueError for an unknown name."""
        return ReplyFormats(self.tool_call_parser, self.reasoning_parser)

    def __post_init__(self) -> None:
        self.reply_formats  # noqa: B018 (its names are checked)
        check_int("port", self.port, 0, 65535)
        check_int("max_waiting", self.max_waiting, 0, 100_000)
        check_int("max_body_mib", self.max_body_mib, 1, 1024)
        check_bool("page", self.page)
        for name in ("request_timeout_s", "shutdown_timeout_s"):
            check_range(name, getattr(self, name), lambda seconds: 0 < seconds <= 86400, "above 0, at most 86400")
        check_choice("log_format", self.log_format, LOG_FORMATS)
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ValueError(
                f"served_model_name={self.served_model_name!r}: give a name, or leave it out for the model's"
            )
        for origin in self.cors_origin:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origin={origin!r}: no browser sends it, give one such as https://example.org: in small "
                    "letters, without a path, without port 80 or 443, not *"
                )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            given = "ssl_certfile" if self.ssl_certfile else "ssl_keyfile"
            raise ValueError(f"{given}={str(getattr(self, given))!r}: give both ssl_certfile and ssl_keyfile")
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError(
                f"api_key_file={str(self.api_key_file)!r}: api_key is given as well, leave one of them out"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this host reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def key(self, environment: Mapping[str, str] = os.environ) -> bytes | None:
        """The key that clients have to give; None if any program of this host may ask.

        Raises:
            ValueError: for an invalid key, a file that others may read, or no key if one is needed.
        """
        if self.api_key_file is not None:
            key: bytes | None = _key_of_file(self.api_key_file)
        else:
            given = self.api_key if self.api_key is not None else environment.get(KEY_VARIABLE)
            key = None if given is None else os.fsencode(given)
        if key is None:
            if not self.is_loopback:
                raise ValueError(
                    f"host={self.host!r}: others reach this address, so clients need a key: give api_key_file, "
                    f"api_key or the environment variable {KEY_VARIABLE}, or host 127.0.0.1"
                )
            return None
        if not 1 <= len(key) <= _MOST_KEY or not all(0x21 <= byte <= 0x7E for byte in key):
            raise ValueError(
                f"the API key is no text of 1 to {_MOST_KEY} printable ASCII characters without spaces: choose another"
            )
        return key

    def bound(self) -> "tuple[socket.socket, ServerSettings]":
        """A socket that has the address for itself and does not listen yet, and the settings with its port.

        Raises:
            ValueError: if the address is not this host's, or the port is in use.
        """
        try:
            family, *_, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise ValueError(f"host={self.host!r}: {error.strerror or error}; give an address of this host") from error
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle's on
        share_port(listener, True)
        try:
            listener.bind(address)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRNOTAVAIL:
                raise ValueError(f"host={self.host!r}: {error.strerror}; give an address of this host") from error
            raise ValueError(f"port={self.port} at {self.host}: {error.strerror}; choose another") from error
        share_port(listener, False)
        return listener, replace(self, port=listener.getsockname()[1])

    def check_tls(self) -> None:
        """Raise ValueError if certificate and key cannot be read, or do not belong together."""
        if self.ssl_certfile is None:
            return
        import ssl

        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.ssl_certfile, self.ssl_keyfile, password=lambda: ""
            )
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            what = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ValueError(
                f"ssl_certfile={str(self.ssl_certfile)!r}: {what}; give a certificate and its key"
            ) from error


def share_port(listener: socket.socket, others_may: bool) -> None:
    """Set whether another socket may have the same address while this one does not listen; if it does, none may.

    A server that loads its workers shares it with no second one; its leftover connections do.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, others_may)


def _key_of_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise ValueError(f"api_key_file={str(path)!r}: others may read it, run chmod 600 {path}")
            return file.read(_MOST_KEY + 2).strip()
    except OSError as error:
        raise ValueError(f"api_key_file={str(path)!r}: {error.strerror}; give a file that holds the key") from error
