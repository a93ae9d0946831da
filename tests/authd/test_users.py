"""The users file: what an entry allows, and errors with their line."""

import sys

import pytest

from nsqtools.authd.users import Client, Users, convert_permissions, hash_token, parse_users
from nsqtools.errors import ConfigurationError

ANN = f"""\
[users.ann]
tokens = ["{hash_token("secret")}"]
publish = ['orders\\..*']

[users.ann.subscribe]
'orders\\..*' = [
  'billing.*',
  'audit',
]
"""


def users(text: str) -> Users:
    return parse_users(text, "users.toml")


def test_patterns_match_whole_names_and_are_anchored_for_nsqd() -> None:
    ann = users(ANN).by_name["ann"]

    assert ann.grant_to_publish("orders.eu")
    assert not ann.grant_to_publish("old.orders.eu")
    assert not ann.grant_to_publish("orders")
    assert ann.grant_to_subscribe("orders.eu", "billing-2")
    assert not ann.grant_to_subscribe("orders.eu", "my-billing")
    assert [grant.as_authorization() for grant in ann.grants] == [
        {"topic": "^(?:orders\\..*)$", "channels": [".*"], "permissions": ["publish"]},
        {
            "topic": "^(?:orders\\..*)$",
            "channels": ["^(?:billing.*)$", "^(?:audit)$"],
            "permissions": ["subscribe"],
        },
    ]


def test_a_publisher_sees_all_channels_of_a_topic_and_a_subscriber_its_own() -> None:
    text = "[users.a]\njwt = true\npublish = ['x']\n[users.b]\njwt = true\nsubscribe.x = ['c']\n"
    publisher, subscriber = users(text).by_name.values()

    assert publisher.sees("x")
    assert publisher.sees("x", "anything")
    assert subscriber.sees("x")
    assert subscriber.sees("x", "c")
    assert not subscriber.sees("x", "anything")
    assert not subscriber.sees("y")


def test_users_whose_entry_is_the_same_after_a_reload_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or their open pages of nsq web would begin again. With re2 some patterns are cached."""
    monkeypatch.setitem(sys.modules, "re2", None)
    before, after = (users(ANN).by_name for _ in range(2))
    assert before == after
    assert set(before.values()) == set(after.values())


@pytest.mark.parametrize(
    ("condition", "client", "reason"),
    [
        ("tls = true", Client(), "the connection has no TLS"),
        ("tls = true", Client(tls=True), ""),
        ("common_name = 'a'", Client(common_name="b"), "the certificate's common name is not a"),
        ("common_name = 'a'", Client(common_name="a"), ""),
        ("addresses = ['10.0.0.0/8']", Client("11.0.0.1"), "the address 11.0.0.1 is in none of"),
        ("addresses = ['10.0.0.0/8']", Client("::ffff:10.1.2.3"), ""),
        ("addresses = ['fd00::/8']", Client("fd00::1"), ""),
        ("addresses = ['fd00::/8']", Client("localhost"), "the address localhost is in none of"),
    ],
)
def test_a_client_must_meet_all_conditions(condition: str, client: Client, reason: str) -> None:
    user = users(f"[users.ann]\njwt = true\n{condition}").by_name["ann"]

    assert user.reason_to_refuse(client).startswith(reason)
    assert bool(user.reason_to_refuse(client)) == bool(reason)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ANN.replace("'audit'", "'au(dit'"), "line 8: invalid pattern 'au(dit'"),
        (ANN + "[users.bob]\n\nx = 1", "line 12: user bob: unknown key 'x'"),
        (ANN + "[users.bob]\ntls = true", "line 10: user bob needs tokens, password, jwt"),
        (ANN + "[users.bob]\njwt = 1", "line 11: jwt must be true or false"),
        (ANN + "[users.bob]\ntokens = ['hunter2']", "line 11: a token is not a hash"),
        (ANN + "[users.bob]\npassword = 'hunter2'", "line 11: user bob: password is no hash"),
        (ANN + "[users.bob]\naddresses = ['10.0.0.0/99']", "line 11: addresses: '10.0.0.0/99'"),
        (ANN + "[users.bob]\nsubscribe = { 'x' = [] }", "line 11: subscribe: 'x' has no channels"),
        (ANN + "[users.'b:b']\njwt = true", "line 10: a user cannot be called 'b:b'"),
        (ANN + "[[jwt]]\nissuer = 'x'", "line 10: jwt needs audience"),
        (ANN + "[other]", "line 10: unknown entry 'other'"),
        ('[users.a]\npublish = ["\\\\Q"]', "line 2: invalid pattern"),
        ("users = 3", "line 1: users must be a table"),
        ("[users.a", "Expected"),
        ("[" * 5000, ""),
    ],
)
def test_an_error_has_the_line_of_the_file_and_no_secret(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        users(text)

    assert "users.toml" in str(caught.value)
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


PERMISSIONS = """\
login,ip,tls_required,topic,channel,subscribe,publish
,127.0.0.3,false,test,test,subscribe,
test,,false,test,test,subscribe,
test_local,127.0.0.1,true,local,.*,subscribe,publish
test_local,,false,local,one,subscribe,
test_publish,127.0.0.1,false,test_publish,,,publish
"""


def test_permissions_of_pynsqauthd_become_entries_with_hashes() -> None:
    text = convert_permissions(PERMISSIONS, "permissions.csv")
    converted = users(text)

    assert "test_local" not in text
    [narrow, broad] = converted.by_token[hash_token("test_local")]
    assert narrow.needs_tls
    assert [str(network) for network in narrow.addresses] == ["127.0.0.1/32"]
    assert narrow.grant_to_publish("local")
    assert narrow.grant_to_subscribe("local", "anything")
    assert not broad.reason_to_refuse(Client("10.0.0.1"))
    assert not broad.grant_to_publish("local")
    assert broad.grant_to_subscribe("local", "one")
    [printer] = converted.without_secret
    assert not printer.reason_to_refuse(Client("127.0.0.3"))
    assert printer.grant_to_subscribe("test", "test")


def test_patterns_beyond_the_basic_plane_are_converted() -> None:
    text = convert_permissions(f"{PERMISSIONS}ann,,,\U0001f600.*,,subscribe,publish\n", "csv")

    [ann] = users(text).by_token[hash_token("ann")]
    assert ann.grant_to_publish("\U0001f600")
    assert ann.grant_to_subscribe("\U0001f600")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("login,ip\n", "no column tls_required"),
        (PERMISSIONS.replace("127.0.0.3", "127.0.0.300"), "line 2: '127.0.0.300'"),
    ],
)
def test_invalid_permissions_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        convert_permissions(text, "permissions.csv")
