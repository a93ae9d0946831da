"""The user of a client, by its secret, its certificate or its address."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from nsqtools.authd.authority import Authority, JSONTokens
from nsqtools.authd.passwords import (
    FREE_FAILURES,
    LONGEST_WAIT_S,
    GuessLimit,
    TooManyFailures,
    hash_password,
)
from nsqtools.authd.users import Client, Issuer, hash_token
from nsqtools.errors import ConfigurationError

HERE = Client("127.0.0.1")
WriteUsers = Callable[[str], Path]


@pytest.fixture
def write_users(tmp_path: Path) -> WriteUsers:
    def write(text: str) -> Path:
        path = tmp_path / "users.toml"
        path.write_text(text)
        path.chmod(0o600)
        return path

    return write


def names(authority: Authority, *secrets: str, client: Client = HERE) -> list[str]:
    async def identify() -> list[str]:
        identities = [await authority.identify(secret, client) for secret in secrets]
        return [
            f"{identity.user.name} by {identity.method}" if identity else ""
            for identity in identities
        ]

    return asyncio.run(identify())


def test_a_token_identifies_its_user_with_or_without_the_name(write_users: WriteUsers) -> None:
    hashes = hash_token("new"), hash_token("old").upper().replace("SHA", "sha")
    authority = Authority(write_users(f"[users.ann]\ntokens = ['{hashes[0]}', '{hashes[1]}']"))

    secrets = ("new", "old", "ann:new", "bob:new", "", "x", hashes[0], "\udcff", "a.b.c")
    by_token = "ann by token"
    assert names(authority, *secrets) == [by_token] * 3 + [""] * 6


def test_a_password_needs_the_user_name_and_guesses_are_limited(
    write_users: WriteUsers,
) -> None:
    authority = Authority(write_users(f"[users.ann]\npassword = '{hash_password('a:b c')}'"))

    assert names(authority, "ann:a:b c", "a:b c", "ann:a") == ["ann by password", "", ""]

    async def guess() -> None:
        for number in range(FREE_FAILURES + 1):
            await authority.identify(f"nobody-{number}:x", Client("10.0.0.1"))

    with pytest.raises(TooManyFailures):
        asyncio.run(guess())
    assert names(authority, "ann:a:b c", client=Client("10.0.0.1")) == ["ann by password"]


def test_guesses_are_limited_however_many_there_were() -> None:
    limit = GuessLimit(FREE_FAILURES, lambda: 0.0)
    for _ in range(2000):  # a client that tries again for a day and a half
        limit.add("10.0.0.1")

    assert limit.wait_s("10.0.0.1") == LONGEST_WAIT_S


def test_a_client_known_by_its_address_is_never_locked_out(write_users: WriteUsers) -> None:
    entries = "[users.ann]\ntokens = ['{}']\n[users.printers]\naddresses = ['127.0.0.0/8']"
    authority = Authority(write_users(entries.format(hash_token("t"))))

    reconnects = ["printer:3"] * (FREE_FAILURES + 2)
    assert names(authority, *reconnects) == ["printers by address"] * len(reconnects)


def test_the_first_matching_entry_is_used(write_users: WriteUsers) -> None:
    token = f"tokens = ['{hash_token('t')}']"
    authority = Authority(
        write_users(
            f"[users.inside]\n{token}\naddresses = ['10.0.0.0/8']\n"
            f"[users.outside]\n{token}\ntls = true\n"
            "[users.certified]\ncommon_name = 'c'\n"
            "[users.anybody]\naddresses = ['127.0.0.0/8']\n"
        )
    )

    assert names(authority, "t", client=Client("10.0.0.1")) == ["inside by token"]
    assert names(authority, "t", client=Client("11.0.0.1", tls=True)) == ["outside by token"]
    assert names(authority, "t", client=Client("11.0.0.1")) == [""]
    assert names(authority, ".", client=Client("1.1.1.1", common_name="c")) == [
        "certified by common_name"
    ]
    assert names(authority, ".", "") == ["anybody by address"] * 2


def test_a_byte_order_mark_before_the_users_is_ignored(write_users: WriteUsers) -> None:
    path = write_users(f"\ufeff[users.ann]\ntokens = ['{hash_token('t')}']")

    assert names(Authority(path), "t") == ["ann by token"]


def test_a_changed_file_is_read_and_a_broken_one_is_refused(
    write_users: WriteUsers, caplog: pytest.LogCaptureFixture
) -> None:
    def entry(name: str) -> str:
        return f"[users.{name}]\ntokens = ['{hash_token('t')}']\n"

    authority = Authority(write_users(entry("ann")))
    for text, user, rejection in (
        (entry("bob-2"), "bob-2", ""),
        (entry("carol") + "publish = ['(']", "bob-2", "line 3: invalid pattern"),
        ("", "bob-2", "has no user"),  # truncated before it is written again
        (entry("dave-dave"), "dave-dave", ""),
    ):
        path = write_users(text)
        authority.refresh()
        authority.refresh()
        assert names(authority, "t") == [f"{user} by token"]
        assert rejection in authority.rejection
    assert (
        len([message for message in caplog.messages if "using the previous content" in message])
        == 2
    )
    path.unlink()
    authority.refresh()
    assert names(authority, "t") == ["dave-dave by token"]
    assert "cannot read" in authority.rejection


KEYS = {
    "RS256": rsa.generate_private_key(65537, 2048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}
WEAK_KEYS = [rsa.generate_private_key(65537, 1024), ec.generate_private_key(ec.SECP384R1())]


def pem_of(key: Any) -> str:
    form = PublicFormat.SubjectPublicKeyInfo
    text: str = key.public_key().public_bytes(Encoding.PEM, form).decode()
    return text


def signed(key: Any, algorithm: str, **changes: Any) -> str:
    claims = {"sub": "ann", "iss": "i", "aud": "nsq", "exp": time.time() + 60} | changes
    present = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(present, key, algorithm)


@pytest.mark.parametrize("algorithm", KEYS)
def test_a_jwt_identifies_a_user_while_it_is_valid(algorithm: str, write_users: WriteUsers) -> None:
    key = KEYS[algorithm]
    entries = f'[[jwt]]\nissuer = "i"\naudience = "nsq"\nkey = """{pem_of(key)}"""\n'
    users = f"[users.ann]\njwt = true\n[users.bob]\ntokens = ['{hash_token('t')}']\n"
    authority = Authority(write_users(users + entries))

    good = signed(key, algorithm)
    bad = [
        signed(key, algorithm, **changes)
        for changes in (
            {"sub": "bob"},  # has no jwt = true
            {"sub": None},
            {"exp": time.time() - 3600},
            {"exp": None},
            {"exp": 10**400},  # more than a float can be
            {"aud": "other"},
            {"aud": None},
            {"iss": "other"},
            {"iss": None},
        )
    ]
    bad += [signed(other, name) for name, other in KEYS.items() if name != algorithm]
    bad += [jwt.encode({"sub": "ann"}, "", "none"), good[:-4] + "AAAA", "..", "eyJ" * 9 + ".a.b"]
    assert names(authority, good, *bad) == ["ann by jwt", *[""] * len(bad)]

    identity = asyncio.run(authority.identify(good, HERE))
    assert identity is not None
    assert 0 < identity.valid_s <= 60


@pytest.mark.parametrize("key", ["no key", *map(pem_of, WEAK_KEYS)])
def test_an_invalid_or_weak_key_is_refused_with_its_line(key: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^f.toml, line 7: jwt i"):
        JSONTokens([Issuer("i", "nsq", key, "sub", 7)], "f.toml")
