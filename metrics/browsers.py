"""Requests that a browser sends on behalf of somebody else's page, who could not reach this machine otherwise."""

import re
from collections.abc import Mapping
from ipaddress import IPv6Address, ip_address
from socket import gethostname

OF_OUR_OWN = ("same-origin", "none")
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/?#@\s]+)(:\d*)?", re.IGNORECASE)


def sent_by_another_site(headers: Mapping[str, str]) -> bool:
    """Whether a page of another origin made the browser send it; programs say nothing of a site.

    https://www.w3.org/TR/fetch-metadata/, and `Origin` for browsers that know no `Sec-Fetch-Site`.
    """
    if "sec-fetch-site" in headers:
        return headers["sec-fetch-site"] not in OF_OUR_OWN
    return "origin" in headers and headers["origin"].partition("://")[2] != headers.get("host")


def is_loopback(address: str) -> bool:
    """Whether an address reaches no further than this machine; one of IPv4 in IPv6's clothes, too."""
    found = ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback


def names_loopback(host: str, bound: str) -> bool:
    """Whether the header `Host` of a request to a loopback address means it: an address, localhost, this machine's
    name (to which Debian gives a loopback address), or as it was bound.

    Any other name is one that somebody lets resolve to loopback, so that a browser takes our answers for those of
    their own site (DNS rebinding).
    """
    found = HOST.fullmatch(host.strip())
    if found is None:
        return False
    name = found[1].strip("[]").rstrip(".").lower()
    ours = ("localhost", gethostname().lower(), bound.rstrip(".").lower())
    return name in ours or name.endswith(".localhost") or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
