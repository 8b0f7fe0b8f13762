"""When Python looks for garbage, and when freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import platform

import pytest

from automodel_lite.interpreter import relaxed_gc, trim_malloc


def test_garbage_collection_is_as_before_after_the_imports() -> None:
    before = gc.get_threshold()
    with relaxed_gc():
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before


def test_an_error_leaves_the_collector_as_it_was() -> None:
    before = gc.get_threshold()
    with pytest.raises(ImportError), relaxed_gc():
        raise ImportError
    assert gc.get_threshold() == before


class _Mallinfo(ctypes.Structure):
    """glibc's mallinfo2; hblks: blocks that were mapped, and are unmapped as soon as they are freed."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *(
            (name, ctypes.c_size_t)
            for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
        ),
    ]


def mapped(size: int, number: int = 40) -> int:
    """How many of so many blocks are mapped by themselves; nothing is written into them, so they take no memory."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    libc.mallinfo2.restype = _Mallinfo
    before = libc.mallinfo2().hblks
    blocks = [libc.malloc(size) for _ in range(number)]
    found = libc.mallinfo2().hblks - before
    for block in blocks:
        libc.free(block)
    return int(found)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of another system")
def test_freed_blocks_go_back_to_the_system() -> None:
    """After one of 31 MiB was freed, glibc keeps smaller ones on its heap."""
    mapped(31 << 20, 1)
    assert mapped(24 << 20) == 0
    with trim_malloc():
        assert mapped(24 << 20) > 30  # none of them may fit into a hole of the heap
        assert mapped(1 << 19) == 0
    assert mapped(24 << 20) == 0
