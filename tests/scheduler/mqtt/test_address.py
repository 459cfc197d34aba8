"""What a user may say about a broker: URL, files, environment; and what is never repeated."""

import subprocess
from pathlib import Path

import pytest

from drumline import InvalidRequest
from drumline.scheduler.mqtt.address import BrokerAddress, Tls, parse_broker_url, with_credentials
from drumline.scheduler.mqtt.connection import ConnectOptions
from tests.processes import program
from tests.scheduler.mqtt.brokers import Authority

HOME = BrokerAddress("home", username="me")


def test_broker_urls():
    assert parse_broker_url("mqtt://broker.local") == BrokerAddress("broker.local", 1883)
    assert parse_broker_url("mqtt://[::1]:2000/") == BrokerAddress("::1", 2000)
    assert parse_broker_url("mqtt://m%40e@host:18830") == BrokerAddress("host", 18830, "m@e")
    assert parse_broker_url("mqtts://host") == BrokerAddress("host", 8883, tls=Tls())
    files = Tls(Path("ca.pem"))
    assert parse_broker_url("mqtts://host:1", files) == BrokerAddress("host", 1, tls=files)
    for url in ("mqtt://host:1", "mqtts://[::1]:2"):
        assert parse_broker_url(url).url == url


@pytest.mark.parametrize(
    "url",
    [
        "", "host", "host:1883", "http://host", "mqtt://", "mqtt://:1883", "mqtt://secret@", "mqtt://secret@host:0",
        "mqtt://secret@host:99999", "mqtt://secret@host:x", "mqtt://secret@host/path", "mqtt://secret@host?a=b",
        "mqtt://secret@host#x", "mqtt://secret@[::1", "ws://secret@host", "mqtt://me:secret", "mqtt://me:secret/x@host",
        "mqtt://me:x#secret@host", "mqtt://me:1/secret@host", "mqtts://me:secret@host", "mqtt://me:@host",
        "mqtt://me:secret@host:1883", "mqtt://me:%73ecret@host",
    ],
)  # fmt: skip
def test_other_urls_are_refused_without_repeating_a_password(url: str):
    with pytest.raises(InvalidRequest) as wrong:
        parse_broker_url(url)
    assert wrong.value.field == "broker"
    assert "secret" not in str(wrong.value).replace("mqtts", "")
    assert wrong.value.__cause__ is None


def test_a_password_in_the_url_is_told_where_to_go():
    with pytest.raises(InvalidRequest, match="set DRUMLINE_MQTT_PASSWORD, or name its file by --password-file"):
        parse_broker_url("mqtt://me:secret@host")


def test_tls_files_need_tls():
    with pytest.raises(InvalidRequest, match="must be mqtts://"):
        parse_broker_url("mqtt://host", Tls(Path("ca.pem")))


def test_credentials_come_from_the_environment(tmp_path: Path):
    file = tmp_path / "password"
    file.write_text("pass word \nnot this\n")
    environment = {"DRUMLINE_MQTT_USERNAME": "them", "DRUMLINE_MQTT_PASSWORD": "pw"}
    assert with_credentials(BrokerAddress("home"), {}) == BrokerAddress("home")
    assert with_credentials(BrokerAddress("home"), dict.fromkeys(environment, "")) == BrokerAddress("home")
    assert with_credentials(BrokerAddress("home"), environment) == BrokerAddress("home", 1883, "them", "pw")
    assert with_credentials(HOME, environment).username == "me"
    assert with_credentials(HOME, environment, file).password == "pass word "
    assert with_credentials(HOME, {"DRUMLINE_MQTT_PASSWORD_FILE": str(file)}).password == "pass word "


def test_a_password_is_in_no_representation():
    address = BrokerAddress("home", 1883, "me", "secret")
    for value in (address, ConnectOptions(address, "id"), address.url):
        assert "secret" not in f"{value} {value!r}"


@pytest.mark.parametrize(
    ("content", "limit"),
    [(None, "cannot read .*: No such file"), (b"", "has an empty first line"), (b"\nsecret", "empty first line"),
     (b"\xffsecret", "no UTF-8")],
)  # fmt: skip
def test_a_password_file_that_holds_none(tmp_path: Path, content: bytes | None, limit: str):
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=limit) as wrong:
        with_credentials(HOME, {}, file)
    assert wrong.value.field == "password_file"
    assert "secret" not in str(wrong.value)


@pytest.mark.parametrize(
    ("address", "environment", "field"),
    [
        (BrokerAddress("home"), {"DRUMLINE_MQTT_PASSWORD": "secret"}, "password"),
        (HOME, {"DRUMLINE_MQTT_PASSWORD": "secret\0"}, "password"),
        (HOME, {"DRUMLINE_MQTT_PASSWORD": "secret\udcff"}, "password"),
        (HOME, {"DRUMLINE_MQTT_PASSWORD": "secret" * 11_000}, "password"),
        (BrokerAddress("home"), {"DRUMLINE_MQTT_USERNAME": "\0"}, "username"),
        (
            HOME,
            {"DRUMLINE_MQTT_PASSWORD": "secret", "DRUMLINE_MQTT_PASSWORD_FILE": "/x"},
            "DRUMLINE_MQTT_PASSWORD_FILE",
        ),
        (HOME, {"DRUMLINE_MQTT_PASSWORD_FILE": "/nowhere/x"}, "DRUMLINE_MQTT_PASSWORD_FILE"),
    ],
)
def test_credentials_that_cannot_be_meant(address: BrokerAddress, environment: dict[str, str], field: str):
    with pytest.raises(InvalidRequest) as wrong:
        with_credentials(address, environment)
    assert wrong.value.field == field
    assert "secret" not in str(wrong.value)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("tls")
    authority = Authority(directory, "ca")
    (certificate, key), (_, other) = authority.issue("device"), authority.issue("other")
    locked, both, rubbish = directory / "locked.key", directory / "both.pem", directory / "rubbish.pem"
    openssl = program("openssl")
    subprocess.run([openssl, "pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out", locked], check=True)
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    rubbish.write_text("rubbish")
    return {
        "ca": authority.certificate, "certificate": certificate, "key": key, "other": other, "locked": locked,
        "both": both, "rubbish": rubbish, "missing": directory / "missing", "folder": directory,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ca", "certificate", "key", "field", "limit"),
    [
        ("missing", None, None, "tls_ca", "cannot read .*: No such file"),
        ("folder", None, None, "tls_ca", "cannot read .*: Is a directory"),
        ("rubbish", None, None, "tls_ca", "holds no certificate"),
        ("key", None, None, "tls_ca", "holds no certificate"),
        ("ca", "missing", "key", "tls_cert", "cannot read"),
        ("ca", "rubbish", "key", "tls_cert", "holds no certificate"),
        ("ca", "certificate", None, "tls_cert", "holds no key"),
        ("ca", "certificate", "missing", "tls_key", "cannot read"),
        ("ca", "certificate", "rubbish", "tls_key", "holds no key"),
        ("ca", "certificate", "other", "tls_key", "is not the key of"),
        ("ca", "certificate", "locked", "tls_key", "has a passphrase"),
        ("ca", None, "key", "tls_key", "needs the certificate"),
    ],
)
def test_files_that_cannot_be_used(files: dict[str, Path], ca, certificate, key, field: str, limit: str):
    with pytest.raises(InvalidRequest, match=limit) as wrong:
        Tls(files.get(ca), files.get(certificate), files.get(key)).context()
    assert wrong.value.field == field


def test_files_that_can(files: dict[str, Path]):
    for tls in (
        Tls(),
        Tls(files["ca"]),
        Tls(files["ca"], files["certificate"], files["key"]),
        Tls(None, files["both"]),
    ):
        assert tls.context().check_hostname
