"""Fake tensors, faster: results of operations are remembered by the shapes they came from.

A model of many equal layers asks for the same few results again and again. torch remembers them
too, but its keys have to cover much (symbolic shapes, other devices) that a prediction never meets,
and looking them up takes most of a prediction's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
UNPREDICTABLE = {  # these look at data, or change what their input is
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}


class _Unknown(Exception):
    """An argument that a key cannot hold."""


class RememberedResults:
    """Calls operations on fake tensors; what they returned for the same shapes is made anew.

    Only the result's metadata are remembered: a result has storage of its own where the operation
    gives it one, shares its argument's where the operation is a view, and is the argument itself
    where it works in place. Whatever is none of these goes to torch every time.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple, Callable | None] = {}
        self._kinds: dict[Any, str | None] = {}

    def call(self, func, args: tuple, kwargs: dict) -> Any:
        """`func(*args, **kwargs)`."""
        kind = self._kinds.get(func, "")
        if kind == "":
            kind = self._kinds[func] = _kind_of_operation(func)
        if kind is None:
            return func(*args, **kwargs)
        try:
            key = (func, *map(_key, args), *((k, _key(v)) for k, v in kwargs.items()))
            make = self._entries[key]
        except _Unknown:
            return func(*args, **kwargs)
        except KeyError:
            result = func(*args, **kwargs)
            self._entries[key] = _recipe(kind, args, result)
            return result
        return func(*args, **kwargs) if make is None else make(args)


def _kind_of_operation(func) -> str | None:
    """ "new", "view" or "in place"; None for operations that are not to be remembered."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return None
    if UNPREDICTABLE & set(func.tags) or not func._schema.arguments:
        return None
    aliases = [argument.alias_info for argument in func._schema.arguments]
    if any(alias is not None and alias.is_write for alias in aliases):
        first_only = aliases[0] is not None and aliases[0].is_write and not any(aliases[1:])
        return "in place" if first_only and len(func._schema.returns) <= 1 else None
    return "view" if any(aliases) else "new"


def _key(value: Any) -> Any:
    if type(value) is FakeTensor:
        if value.constant is not None or value.fake_device != CPU or value.dtype.is_complex:
            raise _Unknown
        return value.dtype, value.shape, value.stride(), value.storage_offset()
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if value is None or isinstance(value, (bool, int, float, torch.dtype, torch.device)):
        return type(value), value  # True, 1 and 1.0 are equal, their results are not
    if isinstance(value, (torch.memory_format, torch.layout, str)):
        return value
    raise _Unknown


def _recipe(kind: str, args: tuple, result: Any) -> Callable | None:
    """A function of the arguments that makes such a result again, or None where that is unsafe."""
    if kind == "in place":
        if result is None:  # a whole list at once
            return lambda args: None
        return (lambda args: args[0]) if result is args[0] else None
    given = [_storage(tensor) for tensor in tree_leaves(args) if type(tensor) is FakeTensor]
    if type(result) is FakeTensor:
        # Some that are no views by their schema are, such as _unsafe_view.
        if given and _storage(result) == given[0] and type(args[0]) is FakeTensor:
            return _view_maker(result)
        return None if kind == "view" or _storage(result) in given else _maker(result)
    if kind == "new" and isinstance(result, (tuple, list)):
        results = [one for one in result if one is not None]
        if not all(type(one) is FakeTensor for one in results):
            return None
        owned = {_storage(one) for one in results}
        makers = [None if one is None else _maker(one) for one in result]
        if len(owned) == len(results) == sum(map(bool, makers)) and not owned & set(given):
            of_kind = type(result)
            return lambda args: of_kind(maker and maker(args) for maker in makers)
    return None


def _storage(tensor: FakeTensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) is FakeTensor
        and tensor.layout is torch.strided
        and tensor.constant is None
        and tensor.fake_device == CPU
        and not (tensor.requires_grad or tensor.dtype.is_complex)
    )


def _maker(tensor: Any) -> Callable | None:
    if not _is_plain(tensor) or tensor.storage_offset():
        return None
    shape, stride, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
    mode = tensor.fake_mode

    def make(args: tuple) -> FakeTensor:
        with in_kernel_invocation_manager(mode):
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(mode, empty, CPU)

    example = make(())
    has_own_size = example.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    return make if has_own_size else None


def _view_maker(tensor: FakeTensor) -> Callable | None:
    if not _is_plain(tensor):
        return None
    shape, stride, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
    offset, mode = tensor.storage_offset(), tensor.fake_mode

    def make(args: tuple) -> FakeTensor:
        storage = args[0].untyped_storage()
        with in_kernel_invocation_manager(mode):
            empty = torch.empty(0, dtype=dtype, device="meta")
            empty.set_(storage, offset, shape, stride)
        return FakeTensor(mode, empty, CPU)

    return make
