"""A host program that embeds drumline and has modules of its own with the names of drumline's folders.

    python host.py SITE [OPTIONS of embed_service.py, a copy of which lies beside this file]

Fails unless drumline was imported from SITE and the host's modules are still the host's.
"""

import sys
from pathlib import Path

import embed_service

import cache_pool  # noqa: TID251
import drumline
import metrics  # noqa: TID251
import model  # noqa: TID251
import scheduler  # noqa: TID251

HERE = Path(__file__).resolve().parent


def main() -> None:
    site, *options = sys.argv[1:]
    embed_service.main([*options, "--port", "0", "--metrics", "127.0.0.1:0", "--once"])
    check(site)


def check(site: str) -> None:
    """Exit with what is wrong, or say that nothing is."""
    found = Path(drumline.__file__).resolve()
    if not found.is_relative_to(Path(site).resolve()):
        sys.exit(f"drumline came from {found}, not from {site}")
    for own in (cache_pool, metrics, model, scheduler):
        if sys.modules[own.__name__] is not own or own.OWNER != "the host" or Path(own.__file__).parent != HERE:
            sys.exit(f"{own.__name__} is not the host's own any more: {own.__file__}")
    print(f"drumline {drumline.__version__} ran beside the host's own modules")


if __name__ == "__main__":
    main()
