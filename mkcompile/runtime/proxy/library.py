"""The proxy's shared library: where it lies, and its functions with their types. Calls release the GIL."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from mkcompile.errors import ProxyUnavailableError
from mkcompile.runtime.proxy import abi

LIBRARY_NAME = "libmkproxy.so"

_U8_P, _U32, _U64 = ctypes.POINTER(ctypes.c_uint8), ctypes.c_uint32, ctypes.c_uint64
_U32_P, _U64_P = ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint64)
_HANDLE, _ERROR_P = ctypes.c_void_p, ctypes.POINTER(abi.Error)

#: Name -> arguments and result, as `csrc/host/c_api.h` declares them.
_FUNCTIONS: dict[str, tuple[tuple[type, ...], type | None]] = {
    "mk_layouts": ((_U32_P,), ctypes.POINTER(abi.Layout)),
    "mk_transport_missing": ((_U32, ctypes.c_char_p, _U32), None),
    "mk_proxy_open": ((ctypes.POINTER(abi.ProxyOptions), ctypes.POINTER(_HANDLE), _ERROR_P), ctypes.c_int),
    "mk_proxy_endpoint": ((_HANDLE, _U32, _U8_P, _U32_P, _ERROR_P), ctypes.c_int),
    "mk_proxy_connect": ((_HANDLE, _U32, _U8_P, _U32, _ERROR_P), ctypes.c_int),
    "mk_proxy_finish": ((_HANDLE, _U64, _ERROR_P), ctypes.c_int),
    "mk_proxy_start": ((_HANDLE, _ERROR_P), ctypes.c_int),
    "mk_proxy_facts": ((_HANDLE, ctypes.POINTER(abi.Facts)), None),
    "mk_proxy_fault": ((_HANDLE, _ERROR_P), ctypes.c_int),
    "mk_proxy_counters": ((_HANDLE, _U64_P), None),
    "mk_proxy_timeline": ((_HANDLE, _U64, ctypes.POINTER(abi.ProxyEvent), _U32, _U64_P), _U32),
    "mk_proxy_push": ((_HANDLE, ctypes.POINTER(abi.Command), _U64, _U64_P), ctypes.c_int),
    "mk_proxy_wait_retired": ((_HANDLE, _U64, _U64), ctypes.c_int),
    "mk_proxy_wait_flag": ((_HANDLE, _U32, _U32, _U64, _U32_P), ctypes.c_int),
    "mk_cuda_engine_open": (
        (ctypes.c_int, _U32, ctypes.POINTER(_HANDLE), ctypes.POINTER(abi.CudaHooks), _ERROR_P),
        ctypes.c_int,
    ),
    "mk_cuda_engine_close": ((_HANDLE,), None),
    "mk_cuda_export": ((_HANDLE, _U64, _U64, ctypes.POINTER(ctypes.c_int), _U64_P, _ERROR_P), ctypes.c_int),
    "mk_proxy_close": ((_HANDLE, _U64, _ERROR_P), ctypes.c_int),
}


def library_path() -> Path | None:
    """The library of an installed package, or what `make` built in a checkout; None where there is neither."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "lib", package.parent / "build" / "host"):
        if (folder / LIBRARY_NAME).is_file():
            return folder / LIBRARY_NAME
    return None


def load(path: Path) -> ctypes.CDLL:
    """Load and declare one library.

    Raises: ProxyUnavailableError where it can't be loaded, or was built from other sources than this package.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ProxyUnavailableError(f"the host proxy can't be loaded: {error}") from error
    try:
        for name, (arguments, result) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
    except AttributeError as error:
        raise ProxyUnavailableError(f"{path} is from another version of mkcompile: {error}") from error
    count = ctypes.c_uint32()
    layouts = library.mk_layouts(ctypes.byref(count))
    wrong = abi.drifted(layouts[i] for i in range(count.value))
    if wrong:
        raise ProxyUnavailableError(f"{path} is from another version of mkcompile: {'; '.join(wrong)}")
    return library


@cache
def library() -> ctypes.CDLL:
    """The library of this process.

    Raises: ProxyUnavailableError, with what to do.
    """
    path = library_path()
    if path is None:
        raise ProxyUnavailableError(
            "the host proxy was not built: mkcompile was installed without a C++20 compiler. Install one "
            "(apt-get install g++) and reinstall mkcompile, or run `make proxy` in a checkout"
        )
    return load(path)


def missing(transport: str) -> str:
    """Why this build or machine has no such transport; empty where nothing is known to be missing.

    Raises: ProxyUnavailableError where there is no library.
    """
    text = ctypes.create_string_buffer(512)
    library().mk_transport_missing(abi.TRANSPORTS.index(transport), text, len(text))
    return text.value.decode()
