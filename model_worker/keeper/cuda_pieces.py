"""Pieces of a GPU's memory, by the virtual memory management of CUDA's driver (cuda.h, since CUDA 10.2).

Not by cudaIpcMemHandle: such memory ends with the process that made it, while others use it, and belongs to an
allocator. This memory ends with its last handle, descriptor or mapping (cuMemRelease), and making it needs no context
on the GPU. So the keeper takes no memory there, and a worker goes on when its keeper dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import weakref
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

_LIBRARY = "libcuda.so.1"
# CUresult
_OUT_OF_MEMORY = 2
# CUdevice_attribute, and what the device cannot do without it.
_ATTRIBUTES = {102: "manage virtual memory", 103: "share memory by descriptors"}
# CUmemAllocationType, CUmemLocationType, CUmemAllocationHandleType
_PINNED = 1
_ON_DEVICE = 1
_BY_DESCRIPTOR = 1
# CUmemAccess_flags
_READ = 1
_READ_AND_WRITE = 3


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp. The last field is that of eight bytes of flags, all 0 here."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32_meta_data", c_void_p),
        ("flags", c_uint64),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


# The functions of the driver that are called here, and the types of their arguments.
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(Properties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(Access), c_size_t),
}


class CudaPieces:
    """Pieces (pieces.py) of the GPU with this number among those that the process sees."""

    def __init__(self, device: int, library: Any = None) -> None:
        """OSError says why memory of this GPU cannot be shared. `library` takes the place of the driver."""
        self._library = _driver() if library is None else library
        self._call("cuInit", 0)
        number = c_int()
        self._call("cuDeviceGet", byref(number), device)
        self._location = Location(_ON_DEVICE, number.value)
        for attribute, lacking in _ATTRIBUTES.items():
            value = c_int()
            self._call("cuDeviceGetAttribute", byref(value), attribute, number)
            if not value.value:
                raise OSError(errno.ENOTSUP, f"the GPU or its driver cannot {lacking}")

    def make(self, size: int) -> int:
        handle = c_uint64()
        properties = Properties(_PINNED, _BY_DESCRIPTOR, self._location, None, 0)
        self._call("cuMemCreate", byref(handle), size, byref(properties), 0)
        return handle.value

    def export(self, handle: int) -> int:
        descriptor = c_int()
        self._call("cuMemExportToShareableHandle", byref(descriptor), handle, _BY_DESCRIPTOR, 0)
        return descriptor.value

    def free(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def tensor(self, descriptor: int, size: int, writable: bool) -> Tensor:
        # The keeper needs no torch.
        import torch

        mapped = self.map(descriptor, size, writable)
        # The tensor's storage keeps `mapped`, and so the mapping.
        return torch.as_tensor(mapped, device=torch.device("cuda", self._location.id))

    def map(self, descriptor: int, size: int, writable: bool) -> Mapped:
        """Map a piece. OSError says why it cannot be mapped."""
        handle = c_uint64()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), _BY_DESCRIPTOR)
        try:
            address = c_uint64()
            self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
            try:
                self._call("cuMemMap", address, size, 0, handle, 0)
            except OSError:
                self._call("cuMemAddressFree", address, size)
                raise
        finally:
            # The mapping keeps the memory.
            self._call("cuMemRelease", handle)
        mapped = Mapped(address.value, size)
        # Not at the end of the process, when the driver may have gone already.
        weakref.finalize(mapped, self._unmap, address.value, size).atexit = False
        if not writable:
            # Some drivers know no memory that a GPU may only read.
            with contextlib.suppress(OSError):
                self._allow(address.value, size, _READ)
                return mapped
        self._allow(address.value, size, _READ_AND_WRITE)
        return mapped

    def _allow(self, address: int, size: int, flags: int) -> None:
        access = Access(self._location, flags)
        self._call("cuMemSetAccess", address, size, byref(access), 1)

    def _unmap(self, address: int, size: int) -> None:
        """Give a mapping back, from whatever thread, whose current context may be none."""
        try:
            with contextlib.ExitStack() as stack:
                # Whatever goes wrong before.
                stack.callback(self._call, "cuMemAddressFree", address, size)
                stack.callback(self._call, "cuMemUnmap", address, size)
                with self._context():
                    # A kernel may still read what the host has let go of.
                    self._call("cuCtxSynchronize")
        except OSError as error:
            log.warning("while weights that were kept are unmapped, %s", error.strerror)

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """Have the context that torch computes in as this thread's current one."""
        device = self._location.id
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", byref(context))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", device)

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            text = c_char_p()
            self._library.cuGetErrorString(code, byref(text))
            reason = (text.value or b"unknown error").decode(errors="replace")
            raise OSError(errno.ENOMEM if code == _OUT_OF_MEMORY else errno.EIO, f"{name} says {reason} ({code})")


class Mapped:
    """A piece in this process' addresses, as torch takes memory of others. It is unmapped with this object."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def _driver() -> Any:
    """Load CUDA's driver. OSError where there is none, or one that is too old."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        for name, arguments in PROTOTYPES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = c_int
    except (OSError, AttributeError) as error:
        raise OSError(errno.ENOTSUP, f"CUDA's driver shares no memory here ({error})") from None
    return library
