"""The choice of a node's training address."""

from __future__ import annotations

from typing import Any

import pytest

from distflow.backends.machines.connection.training_address import choose_address

LO = {"interface": "lo", "address": "127.0.0.1", "family": "inet"}
ETH0 = {"interface": "eth0", "address": "10.0.0.2", "family": "inet"}
IB0 = {"interface": "ib0", "address": "10.1.0.2", "family": "inet"}
ETH0_6 = {"interface": "eth0", "address": "fd00::2", "family": "inet6"}


def chosen(*addresses: dict[str, str], ssh_server: str = "", **given: Any) -> tuple[str, str]:
    facts = {"addresses": [LO, *addresses], "ssh_server": ssh_server}
    return choose_address(**{"configured": None, "reached": None, "named": (), "host": "gpu1", "facts": facts, **given})


def test_the_configured_address_wins() -> None:
    everything: dict[str, Any] = {"reached": "10.0.0.2", "named": ("10.0.0.2",), "ssh_server": "10.0.0.2"}
    assert chosen(ETH0, IB0, configured="10.1.0.2", **everything) == ("10.1.0.2", "ib0")


def test_the_reached_address_is_second() -> None:
    assert chosen(ETH0, IB0, reached="10.0.0.2", named=("10.1.0.2",), ssh_server="10.1.0.2") == ("10.0.0.2", "eth0")


def test_a_reached_nat_address_has_the_interface_of_sshd() -> None:
    assert chosen(ETH0, IB0, reached="203.0.113.7", ssh_server="10.0.0.2") == ("203.0.113.7", "eth0")
    assert chosen(ETH0, IB0, reached="203.0.113.7") == ("203.0.113.7", "")


def test_an_own_address_of_the_host_name_is_third() -> None:
    assert chosen(ETH0, IB0, named=("10.9.9.9", "10.1.0.2"), ssh_server="10.0.0.2") == ("10.1.0.2", "ib0")


def test_a_foreign_address_of_the_host_name_is_ignored() -> None:
    assert chosen(ETH0, IB0, named=("10.9.9.9",), ssh_server="10.0.0.2") == ("10.0.0.2", "eth0")


def test_the_address_at_which_sshd_accepted_is_fourth() -> None:
    assert chosen(ETH0, IB0, ssh_server="10.1.0.2") == ("10.1.0.2", "ib0")
    assert chosen(ETH0_6, IB0, ssh_server="fd00::2") == ("fd00::2", "eth0")


def test_the_zone_of_a_link_local_address_is_removed() -> None:
    local = {"interface": "eth0", "address": "fe80::2", "family": "inet6"}
    assert chosen(local, ssh_server="fe80::2%eth0") == ("fe80::2", "eth0")


def test_the_only_ipv4_address_is_fifth() -> None:
    assert chosen(ETH0, ETH0_6) == ("10.0.0.2", "eth0")


def test_with_several_ipv4_addresses_the_host_is_used() -> None:
    assert chosen(ETH0, IB0) == ("gpu1", "")
    assert chosen(ETH0, IB0, host="10.1.0.2") == ("10.1.0.2", "ib0")


@pytest.mark.parametrize("loopback", ["127.0.0.1", "127.0.1.1", "::1"])
def test_loopback_addresses_come_after_all_others(loopback: str) -> None:
    # A tunnel ends at the localhost of the node, and a line in /etc/hosts may map its name to loopback.
    assert chosen(ETH0, named=(loopback,), ssh_server=loopback) == ("10.0.0.2", "eth0")
    assert chosen(ssh_server=loopback) == (loopback, "lo")


def test_a_forwarded_port_is_not_the_nodes_address() -> None:
    assert chosen(ETH0, reached="127.0.0.1", ssh_server="10.0.0.2") == ("10.0.0.2", "eth0")


def test_a_reached_loopback_address_of_the_node_itself_is_used() -> None:
    assert chosen(ETH0, reached="127.0.1.3", ssh_server="127.0.1.3") == ("127.0.1.3", "lo")


def test_without_facts_the_host_is_used() -> None:
    assert choose_address(configured=None, reached=None, named=(), host="gpu1", facts={}) == ("gpu1", "")


@pytest.mark.parametrize("text", ["10.0.0.2'; id >/tmp/x; '", "$(id)", "-oProxyCommand=id", "10.0.0.2 x", "fe80::2%$(id)"])
def test_a_node_cannot_put_other_text_than_an_address_into_commands_of_other_nodes(text: str) -> None:
    hostile = {"interface": "eth0", "address": text, "family": "inet"}
    assert chosen(hostile) == ("gpu1", "")
    assert chosen(hostile, ETH0) == ("10.0.0.2", "eth0")
    assert chosen(ETH0, ssh_server=text.partition("%")[2] or text) == ("10.0.0.2", "eth0")
