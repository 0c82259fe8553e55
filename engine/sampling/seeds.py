"""Seeds that depend on nothing but what they are derived from."""

from hashlib import blake2b


def derive_seed(*parts: int) -> int:
    """Return a seed of 63 bits that is a function of `parts`."""
    digest = blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one of a request's continuations: the request's own for the first, one apart for the others.

    So each continuation can be had alone: by a request whose seed is this one.
    """
    return seed if choice == 0 else derive_seed(seed, choice)
