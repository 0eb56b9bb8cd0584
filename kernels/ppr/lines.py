"""Cache lines: arrays that begin with one, and asking for one before it is needed.

The loops over edges visit rows of an array far larger than any cache, in an order known some edges ahead.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import DTypeLike, NDArray

LINE_BYTES = 64
LINE_FLOATS = LINE_BYTES // 4
AHEAD_EDGES = 16
"""How many edges ahead rows are asked for: about what a core has under way at once."""


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray:
    """Return zeros that begin with a cache line, so that rows of 64 bytes do not spread over two.

    Parameters
    ----------
    shape : tuple of int
    dtype : dtype

    Returns
    -------
    ndarray
        Pages that are never written take no memory.
    """
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size_bytes + LINE_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + size_bytes].view(dtype).reshape(shape)


def aligned_copy(array: NDArray) -> NDArray:
    """Return a copy that begins with a cache line."""
    copy = aligned_zeros(array.shape, array.dtype)
    copy[...] = array
    return copy


@intrinsic
def prefetch(context: Any, array: Any, row: Any, offset_bytes: Any) -> Any:  # noqa: ARG001 - numba's form
    """Ask for the cache line ``offset_bytes`` behind the beginning of a row, for use in compiled loops.

    Nothing is read: a line outside the array does no harm.
    """

    def code(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = target.make_array(signature.args[0])(target, builder, arguments[0])
        word, flag, pointer = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
        stride = cgutils.unpack_tuple(builder, data.strides, signature.args[0].ndim)[0]
        behind = builder.add(builder.mul(arguments[1], stride), arguments[2])
        address = builder.inttoptr(builder.add(builder.ptrtoint(data.data, word), behind), pointer)
        kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        read, into_all_caches, of_data = ir.Constant(flag, 0), ir.Constant(flag, 3), ir.Constant(flag, 1)
        builder.call(function, [address, read, into_all_caches, of_data])
        return target.get_dummy_value()

    return types.void(array, types.int64, types.int64), code
