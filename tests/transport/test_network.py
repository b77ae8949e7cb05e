"""What is checked before a process takes part in a network: its keys, its interface, the folder of its sockets."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ppd_runtime.runtime import PPDRuntime
from ppd_runtime.settings.config import RuntimeConfig
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.transport.network import Network, check_interface, read_network, socket_path
from ppd_runtime.transport.sockets import make_networks, open_endpoint
from ppd_runtime.workers.process import start_order

LOOPBACK = "127.0.0.1"


@pytest.fixture
def networks() -> dict[int, Network]:
    return make_networks("auto", "", LOOPBACK, [CLIENT, DECIDER, 1])


@pytest.mark.parametrize(
    ("interface", "complaint"),
    [
        ("", "give an IP address of this host"),
        ("localhost", "give an IP address of this host"),
        ("127.0.0.1:5000", "give an IP address of this host"),
        ("eth0", "give an IP address of this host"),
        ("*", "give an IP address of this host"),
        ("0.0.0.0", "the address of one interface"),
        ("::", "the address of one interface"),
        ("224.0.0.1", "the address of one interface"),
        ("fe80::1%lo", "the address of one interface"),
        ("192.0.2.1", "not an address of this host"),
        ("2001:db8::1", "not an address of this host"),
    ],
)
def test_an_interface_is_an_address_of_this_host(interface: str, complaint: str) -> None:
    for check in (check_interface, lambda it: PPDRuntime(bind_interface=it)):
        with pytest.raises(ValueError, match=complaint) as error:
            check(interface)
        assert repr(interface) in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("transport", ["unix", "local"])
def test_an_interface_needs_a_transport_that_leaves_the_host(transport: str) -> None:
    with pytest.raises(ValueError, match=f"transport='{transport}', which stays on one host: choose transport auto, "):
        RuntimeConfig(bind_interface=LOOPBACK, transport=transport)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777])
@pytest.mark.parametrize("transport", ["unix", "zeromq"])
def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, mode: int, transport: str) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ValueError, match="others may enter it; give one of your own with mode 0700"):
        open_endpoint(Network(transport, str(folder)), DECIDER)
    assert not list(folder.iterdir())


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert socket_path(str(tmp_path), CLIENT) == tmp_path / "client"
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ValueError, match="others may enter it"):
        socket_path(str(tmp_path), CLIENT)


def test_everybody_has_keys_of_its_own_for_this_run_alone(networks: dict[int, Network]) -> None:
    others = make_networks("auto", "", LOOPBACK, list(networks))
    keys = [network.keys for network in (*networks.values(), *others.values())]
    assert len({key.public for key in keys}) == len({key.secret for key in keys}) == 6
    for address, network in networks.items():
        assert network.keys.peers[address] == network.keys.public
        assert network.keys.peers == networks[CLIENT].keys.peers


def test_a_network_travels_with_the_order(networks: dict[int, Network]) -> None:
    spec = PPDRuntime(k=1)._specs[DECIDER]
    for network in (Network("unix", "/x"), replace(networks[DECIDER], client="tcp://127.0.0.1:1")):
        assert read_network(json.loads(start_order(spec, network))["network"]) == network


def with_keys(network: Network, **changes: object) -> Network:
    return replace(network, keys=replace(network.keys, **changes))


def test_without_good_keys_nothing_is_bound(networks: dict[int, Network], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmq.Context", lambda: pytest.fail("something was about to be bound"))
    network, other = networks[DECIDER], networks[1].keys
    peers = network.keys.peers
    for bad, complaint in (
        (replace(network, keys=None), "no keys: nothing leaves the host in plain text"),
        (replace(network, interface=""), "bind_interface=''"),
        (with_keys(network, secret=""), "secret key of process 0 is empty"),
        (with_keys(network, secret=None), "secret key of process 0 is empty"),
        (with_keys(network, secret="é" * 40), "secret key of process 0 is no CURVE key"),
        (with_keys(network, secret="#" * 40), "secret key of process 0 is no CURVE key"),
        (with_keys(network, secret="~" * 40), "secret key of process 0 is no CURVE key"),
        (with_keys(network, secret=network.keys.secret[:-1]), "secret key of process 0 is no CURVE key"),
        (with_keys(network, secret=other.secret), "secret key of process 0 does not belong to its public key"),
        (with_keys(network, public=other.public), "secret key of process 0 does not belong to its public key"),
        (with_keys(network, peers=peers | {DECIDER: other.public}), "does not belong to its public key"),
        (with_keys(network, peers={}), "does not belong to its public key"),
        (with_keys(network, peers=peers | {1: ""}), "public 1 key of process 0 is empty"),
        (with_keys(network, peers=peers | {1: "x"}), "public 1 key of process 0 is no CURVE key"),
    ):
        with pytest.raises(ValueError, match=complaint) as error:
            open_endpoint(bad, DECIDER)
        assert network.keys.secret not in str(error.value)
        assert "\n" not in str(error.value)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o600)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link", "nothing"):
        with pytest.raises(ValueError, match=name):
            socket_path(str(tmp_path / name), DECIDER)


def test_no_secret_is_ever_shown(networks: dict[int, Network]) -> None:
    secret = networks[DECIDER].keys.secret
    for shown in (networks[DECIDER], networks[DECIDER].keys, [networks]):
        assert secret not in f"{shown}"
        assert secret not in repr(shown)
