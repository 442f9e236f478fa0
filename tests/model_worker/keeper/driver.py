"""A stand-in for CUDA's driver, with the C types of its functions: memory is files in memory, and mapping is mmap's."""

from __future__ import annotations

import ctypes
import mmap
import os
from ctypes import CFUNCTYPE, c_int, c_long, c_size_t, c_void_p
from typing import Any

from model_worker.keeper.cuda_pieces import PROTOTYPES, Access, Properties

UNIT = 2 << 20
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
ILLEGAL_ADDRESS = 700
NOT_SUPPORTED = 801
# The primary context of the first GPU.
PRIMARY = 1 << 41
_TEXTS = {
    1: b"invalid argument",
    2: b"out of memory",
    101: b"invalid device ordinal",
    201: b"invalid device context",
    400: b"invalid resource handle",
    700: b"an illegal memory access was encountered",
    801: b"operation not supported",
}
# mman.h
_NO_ACCESS = 0
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, c_long)
_libc.munmap.argtypes = (c_void_p, c_size_t)
_libc.mprotect.argtypes = (c_void_p, c_size_t, c_int)


class Driver:
    """The driver of a machine with two GPUs, as one process sees it. Physical memory is what `files` have."""

    def __init__(self, able: bool = True, most: int = 8 * UNIT, reads_alone: bool = True) -> None:
        """`reads_alone`: memory may be mapped that a GPU only reads."""
        self.able = able
        self.reads_alone = reads_alone
        # Of the calling thread. torch has the primary one, which is broken where a kernel failed.
        self.contexts: list[int] = []
        self.retained = 1
        self.broken = False
        self.left = most
        self.files: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.waits = 0
        self._next = 1 << 40  # handles have 64 bits
        for name, arguments in PROTOTYPES.items():
            setattr(self, name, CFUNCTYPE(c_int, *arguments)(getattr(self, f"_{name}")))

    def _cuInit(self, flags: int) -> int:
        return 0

    def _cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device[0] = ordinal
        return 0 if ordinal < 2 else 101

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        value[0] = int(self.able or attribute != 103)
        return 0

    def _cuGetErrorString(self, code: int, text: Any) -> int:
        text[0] = _TEXTS[code]
        return 0

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        self.retained += 1
        context[0] = PRIMARY + device
        return 0

    def _cuDevicePrimaryCtxRelease_v2(self, device: int) -> int:
        self.retained -= 1
        return 0

    def _cuCtxPushCurrent_v2(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def _cuCtxPopCurrent_v2(self, context: Any) -> int:
        if not self.contexts:
            return INVALID_CONTEXT
        context[0] = self.contexts.pop()
        return 0

    def _cuCtxSynchronize(self) -> int:
        if self.contexts[-1:] != [PRIMARY + 1]:
            return INVALID_CONTEXT
        self.waits += 1
        return ILLEGAL_ADDRESS if self.broken else 0

    def _cuMemCreate(self, handle: Any, size: int, given: Any, flags: int) -> int:
        properties: Properties = given[0]
        right = (properties.type, properties.handle_types, properties.location.type, properties.location.id)
        if right != (1, 1, 1, 1) or properties.flags or flags or size % UNIT:
            return INVALID_VALUE
        if size > self.left:
            return OUT_OF_MEMORY
        self.left -= size
        file = os.memfd_create("gpu")
        os.ftruncate(file, size)
        handle[0] = self._handle(file)
        return 0

    def _handle(self, file: int) -> int:
        self._next += 1
        self.files[self._next] = file
        return self._next

    def _cuMemRelease(self, handle: int) -> int:
        if handle not in self.files:
            return INVALID_HANDLE
        os.close(self.files.pop(handle))
        return 0

    def _cuMemExportToShareableHandle(self, descriptor: Any, handle: int, kind: int, flags: int) -> int:
        if handle not in self.files or kind != 1 or flags:
            return INVALID_VALUE
        descriptor[0] = os.dup(self.files[handle])
        return 0

    def _cuMemImportFromShareableHandle(self, handle: Any, descriptor: int | None, kind: int) -> int:
        if kind != 1:
            return INVALID_VALUE
        handle[0] = self._handle(os.dup(descriptor or 0))
        return 0

    def _cuMemAddressReserve(self, address: Any, size: int, alignment: int, wanted: int, flags: int) -> int:
        found = _libc.mmap(None, size, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.reserved[found] = size
        address[0] = found
        return 0

    def _cuMemAddressFree(self, address: int, size: int) -> int:
        if self.reserved.pop(address, None) != size or address in self.mapped:
            return INVALID_VALUE
        _libc.munmap(address, size)
        return 0

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> int:
        if self.reserved.get(address) != size or offset or flags or os.fstat(self.files[handle]).st_size != size:
            return INVALID_VALUE
        _libc.mmap(address, size, _NO_ACCESS, mmap.MAP_SHARED | _MAP_FIXED, self.files[handle], 0)
        self.mapped[address] = size
        return 0

    def _cuMemUnmap(self, address: int, size: int) -> int:
        if self.mapped.pop(address, None) != size:
            return INVALID_VALUE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _libc.mmap(address, size, _NO_ACCESS, flags, -1, 0)
        return 0

    def _cuMemSetAccess(self, address: int, size: int, given: Any, count: int) -> int:
        access: Access = given[0]
        wanted = {1: mmap.PROT_READ, 3: mmap.PROT_READ | mmap.PROT_WRITE}.get(access.flags)
        if (access.location.type, access.location.id, count) != (1, 1, 1) or wanted is None:
            return INVALID_VALUE
        if access.flags == 1 and not self.reads_alone:
            return NOT_SUPPORTED
        return int(_libc.mprotect(address, size, wanted))
