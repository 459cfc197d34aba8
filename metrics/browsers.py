"""Requests that a browser sends on behalf of somebody else's page, who could not reach this machine otherwise."""

from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

OF_OUR_OWN = ("same-origin", "none")


def sent_by_another_site(headers: Mapping[str, str]) -> bool:
    """Whether a page of another origin made the browser send it; programs say nothing of a site.

    https://www.w3.org/TR/fetch-metadata/, and `Origin` for browsers that know no `Sec-Fetch-Site`.
    """
    if "sec-fetch-site" in headers:
        return headers["sec-fetch-site"] not in OF_OUR_OWN
    return "origin" in headers and headers["origin"].partition("://")[2] != headers.get("host")


def names_loopback(host: str, bound: str) -> bool:
    """Whether the header `Host` of a request to a loopback address means it: an address, localhost, or as it was bound.

    Any other name is one that somebody lets resolve to loopback, so that a browser takes our answers for those of
    their own site (DNS rebinding).
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name in ("localhost", bound.lower()) or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
