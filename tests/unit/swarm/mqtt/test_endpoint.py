"""URLs of brokers: their parts, their files, and what is said about those that are none."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

import pytest
import trustme

from swarm.errors import InvalidConfig
from swarm.mqtt.endpoint import parse_url


def test_a_url_gives_host_port_and_credentials_and_shows_no_password() -> None:
    end = parse_url("mqtt://me:s%3Acret@broker.example:1884")
    assert (end.host, end.port, end.username, end.password) == ("broker.example", 1884, "me", "s:cret")
    assert "cret" not in end.shown
    assert parse_url("mqtt://broker").port == 1883


@pytest.mark.parametrize(
    "url",
    [
        *("broker:1883", "http://broker", "mqtt://", "mqtt://host:x", "mqtt://host:99999", "mqtt://host/path", ""),
        *("mqtt://host?ca=x", "mqtts://host?color=red", "mqtts://host?ca", "mqtts://host?key=k.pem", "mqtts://host#ca"),
    ],
)
def test_a_wrong_url_is_refused_with_a_hint(url: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_url(url)
    assert "mqtt://" in caught.value.hint


@pytest.mark.parametrize(
    "url",
    [
        *("http://me:secret@broker", "mqtt://me:secret/1@broker", "mqtt://me:/secret@broker:1883"),
        *("mqtt://me:a?secret@broker", "mqtt://me:a#secret@broker", "mqtt://me:a@secret@broker/x"),
        *("mqtt://broker:secret", "mqtt://[::1]:secret", "mqtts://broker?password=secret", "mqtts://broker?secret"),
        *("mqtt://broker?user=me&pass=secret", "mqtt://broker/#secret", "mqtt://broker/?x=secret"),
        "me:secret@broker:1883",
    ],
)
def test_a_wrong_url_shows_no_password_either(url: str) -> None:
    """Its query was shown whole, and the text of the library has what it took for the port."""
    with pytest.raises(InvalidConfig) as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)
    assert "broker" in caught.value.message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("broker:1883", "broker:1883"),
        ("http://[::1]:1883", "http://[::1]:1883"),
        ("http://me:a@lab", "http://lab"),
        ("mqtt://lab/x", "mqtt://lab…"),
    ],
)
def test_a_wrong_url_shows_what_is_wrong_with_it(url: str, shown: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(f'"{shown}" is not valid')):
        parse_url(url)


def test_mqtts_trusts_the_authorities_of_this_machine_or_the_one_that_is_named(tmp_path: Path) -> None:
    end = parse_url("mqtts://broker.example")
    assert (end.port, end.shown) == (8883, "mqtts://broker.example:8883")
    assert end.tls is not None
    context = end.tls.context()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    authority, file = trustme.CA(), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(file)
    ours = authority.issue_cert("peer-1")
    ours.private_key_and_cert_chain_pem.write_to_path(tmp_path / "ours.pem")
    named = parse_url(f"mqtts://broker.example:1?ca={file}&cert={tmp_path / 'ours.pem'}").tls
    assert named is not None
    assert [cert["serialNumber"] for cert in named.context().get_ca_certs()]


@pytest.mark.parametrize("option", ["ca", "cert"])
def test_a_file_that_is_missing_or_no_certificate_is_named_at_once(tmp_path: Path, option: str) -> None:
    file = tmp_path / "file.pem"
    for _ in range(2):
        with pytest.raises(InvalidConfig, match=r"file\.pem of the broker's URL cannot be used"):
            parse_url(f"mqtts://broker?{option}={file}")
        file.write_text("no certificate")
