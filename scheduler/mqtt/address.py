"""Where a broker listens, who we are there, and how we know that it is the right one."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from drumline.model.errors import InvalidRequest

DEFAULT_PORT = 1883
DEFAULT_TLS_PORT = 8883
USERNAME_VARIABLE = "DRUMLINE_MQTT_USERNAME"
PASSWORD_VARIABLE = "DRUMLINE_MQTT_PASSWORD"
PASSWORD_FILE_VARIABLE = "DRUMLINE_MQTT_PASSWORD_FILE"
MAX_CREDENTIAL_BYTES = 65_535
"""User names and passwords are length-prefixed in MQTT."""


class _ClosingSocket(ssl.SSLSocket):
    """paho forgets a socket whose handshake failed, and leaves it open."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except BaseException:
            self.close()
            raise


@dataclass(frozen=True)
class Tls:
    """The PEM files of an encrypted connection.

    Without `ca` the system's authorities are trusted. `certificate` (with its chain) and `key` show the broker who we
    are; a key may stand in the certificate's file.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files: the broker's certificate and host name are verified, always, and TLS is 1.2 or newer.

        Made for each connection, so that renewed files are taken. Raises `InvalidRequest` that names the file's option
        (`tls_ca`, `tls_cert`, `tls_key`), without quoting from it.
        """
        self.check()
        for name, path in (("tls_ca", self.ca), ("tls_cert", self.certificate), ("tls_key", self.key)):
            if path is not None:
                _read(path, name)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies certificate and host name
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslsocket_class = _ClosingSocket
        if self.ca is None:
            context.load_default_certs()
        else:
            try:
                context.load_verify_locations(self.ca)
            except ssl.SSLError:
                raise InvalidRequest("tls_ca", f"{self.ca} holds no certificate in PEM") from None
        if self.certificate is not None:
            self._load_own(context, self.certificate)
        return context

    def check(self) -> None:
        """Refuse a key without a certificate. Raises `InvalidRequest("tls_key")`."""
        if self.key is not None and self.certificate is None:
            raise InvalidRequest("tls_key", "needs the certificate that it belongs to (tls_cert)")

    def _load_own(self, context: ssl.SSLContext, certificate: Path) -> None:
        def passphrase() -> str:  # without it OpenSSL would ask on the terminal
            raise InvalidRequest("tls_key", f"{self.key or certificate} has a passphrase: give a key without one")

        try:
            # OpenSSL says the same of a bad certificate as of a bad key, so the certificate is tried by itself first.
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certificate)
        except ssl.SSLError:
            raise InvalidRequest("tls_cert", f"{certificate} holds no certificate in PEM") from None
        try:
            context.load_cert_chain(certificate, self.key, passphrase)
        except ssl.SSLError as error:
            if self.key is None:
                raise InvalidRequest("tls_cert", f"{certificate} holds no key: name its file (tls_key)") from None
            if error.reason == "KEY_VALUES_MISMATCH":
                raise InvalidRequest("tls_key", f"{self.key} is not the key of {certificate}") from None
            raise InvalidRequest("tls_key", f"{self.key} holds no key in PEM") from None


@dataclass(frozen=True)
class BrokerAddress:
    """Where a broker listens, and who we are there. With `tls` the connection is encrypted.

    Raises `InvalidRequest` for credentials that MQTT cannot carry.
    """

    host: str
    port: int = DEFAULT_PORT
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Tls | None = None

    def __post_init__(self) -> None:
        for name, text in (("username", self.username), ("password", self.password)):
            if text is not None and not _is_credential(text):
                raise InvalidRequest(name, f"must be at most {MAX_CREDENTIAL_BYTES} bytes of UTF-8 without NUL")
        if self.password is not None and self.username is None:
            raise InvalidRequest("password", f"needs a user name: mqtt://NAME@{self.host}, or {USERNAME_VARIABLE}")

    @property
    def url(self) -> str:
        """For people to read: nothing of who we are there."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtt' if self.tls is None else 'mqtts'}://{host}:{self.port}"


def parse_broker_url(url: str, tls: Tls | None = None) -> BrokerAddress:
    """Read `mqtt://[user@]host[:port]`, or `mqtts://` for TLS, with the files of `tls`.

    Raises `InvalidRequest`, which never repeats the URL: what is wrong with it may be a password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidRequest("broker", "must read mqtt://host:port, with a port of 1 … 65535") from None
    if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname:
        raise InvalidRequest("broker", "must read mqtt://host:port or mqtts://host:port")
    if parts.password is not None:
        raise InvalidRequest(
            "broker",
            "must not hold a password, which every user of this machine could read: "
            f"set {PASSWORD_VARIABLE}, or name its file by --password-file or {PASSWORD_FILE_VARIABLE}",
        )
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise InvalidRequest("broker", "must end after host:port")
    if port == 0:
        raise InvalidRequest("broker", "port must be 1 … 65535")
    encrypted = parts.scheme == "mqtts"
    if tls is not None and tls != Tls() and not encrypted:
        raise InvalidRequest("broker", "must be mqtts://host:port where TLS files are given")
    return BrokerAddress(
        host=parts.hostname,
        port=port or (DEFAULT_TLS_PORT if encrypted else DEFAULT_PORT),
        username=None if parts.username is None else unquote(parts.username),
        tls=(tls or Tls()) if encrypted else None,
    )


def with_credentials(
    address: BrokerAddress, environment: Mapping[str, str], password_file: Path | None = None
) -> BrokerAddress:
    """The address with who we are: a name in it comes before the environment's, `password_file` before its variables.

    Raises `InvalidRequest` for a file that cannot be read, for two passwords, or for one without a user name.
    """
    given = {name: text for name, text in environment.items() if text}  # many a start script sets an empty one
    username = given.get(USERNAME_VARIABLE) if address.username is None else address.username
    password, named = given.get(PASSWORD_VARIABLE), given.get(PASSWORD_FILE_VARIABLE)
    if password_file is not None:
        password = _first_line(password_file, "password_file")
    elif named is not None:
        if password is not None:
            raise InvalidRequest(PASSWORD_FILE_VARIABLE, f"and {PASSWORD_VARIABLE} are both set: which one?")
        password = _first_line(Path(named), PASSWORD_FILE_VARIABLE)
    return replace(address, username=username, password=password)


def _first_line(path: Path, name: str) -> str:
    try:
        line = _read(path, name).decode().split("\n", 1)[0].removesuffix("\r")
    except UnicodeDecodeError:
        raise InvalidRequest(name, f"{path} is no UTF-8 text") from None
    if not line:
        raise InvalidRequest(name, f"{path} has an empty first line")
    return line


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(name, f"cannot read {path}: {error.strerror}") from None


def _is_credential(text: str) -> bool:
    try:
        return len(text.encode()) <= MAX_CREDENTIAL_BYTES and "\0" not in text
    except UnicodeEncodeError:
        return False
