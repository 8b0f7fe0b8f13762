"""Random numbers as a function of (seed, step, rank), so that a continued run draws what an uninterrupted one would."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts; the same on every machine."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_all(*parts: object) -> None:
    """Seeds Python, NumPy and torch (every device) with `derive_seed(*parts)`."""
    seed = derive_seed(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # libraries draw from the global generator
    torch.manual_seed(seed)
