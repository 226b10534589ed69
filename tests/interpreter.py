"""Triton's interpreter without what it does over and over, which is nine tenths of what small kernels take.

In each launch, and in each call of a function inside it, the interpreter looks through every name of
``triton.language`` for what it must replace: here that is done once a launch, and the names are found once a process.
For each value of a kernel it builds the type anew, and for each sum the type of the sum: here these are known after the
first time. What is replaced, for how long, and what each operation does to the numbers stays Triton's own code;
tests/ops/test_interpreter.py holds both to the same bits. Whether an integer overflows is not worked out for each sum
and product: Triton drops the answer, but for kernels compiled with ``debug``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def quickened() -> Iterator[pytest.MonkeyPatch]:
    """Until the end of the block, in this process; Triton as it came is back after ``undo()`` of what is given."""
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        yield patch


def quicken(patch: pytest.MonkeyPatch) -> None:
    """The same, until ``patch`` is undone."""
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    assert not builder.options.debug
    types, operands = _Types(), _Operands(semantic)
    patch.setattr(interpreter, "_patch_lang", _unless_patched(interpreter._patch_lang))
    patch.setattr(interpreter, "_patch_builtin", _names_once())
    patch.setattr(interpreter, "_get_np_dtype", _types_once(interpreter._get_np_dtype))
    patch.setattr(interpreter, "_validate_np_data_size", _fits)
    patch.setattr(interpreter, "_convert_float", _shifted(interpreter._convert_float))
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    patch.setattr(interpreter.InterpretedFunction, "rewrite", _signed(interpreter.InterpretedFunction.rewrite))
    patch.setattr(interpreter.TensorHandle, "__init__", _handle)
    patch.setattr(builder, "create_splat", _splat)
    patch.setattr(builder, "create_expand_dims", _expand_dims)
    patch.setattr(tl.block_type, "__init__", types.block(tl.block_type.__init__))
    patch.setattr(tl.block_type, "with_element_ty", types.with_element_ty())
    patch.setattr(tl.tensor, "__init__", types.tensor())
    patch.setattr(semantic, "binary_op_type_checking_impl", operands.of_one_type)
    patch.setattr(semantic, "broadcast_impl_value", operands.of_one_shape)
    patch.setattr(semantic, "cast", operands.of_type)
    patch.setattr(semantic, "load", operands.loaded(semantic.load))
    for name, how in (("add", (True, True)), ("sub", (True, False)), ("mul", ())):
        patch.setattr(semantic, name, operands.computed(name, how))
    for name, operation in _COMPARISONS.items():
        patch.setattr(semantic, name, operands.compared(name, operation))
    for name in ("and_", "or_"):
        patch.setattr(semantic, name, operands.of_bits(name))


def _unless_patched(patch_all: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Functions that a kernel calls see what was replaced for the kernel; those of Triton see ``tl.core`` besides."""
    seen: dict[Any, list[Any]] = {}

    def patch(function: Any) -> Any:
        if function not in seen:
            modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
            seen[function] = [module for module in modules if module in (tl, tl.core)]
        if seen[function] and not any(tl.core.is_builtin(module.load) for module in (tl, *seen[function])):
            return interpreter._LangPatchScope()
        return patch_all(function)

    return patch


def _names_once() -> Callable[[Any, Any, Any], None]:
    """Replaces the built-in functions of a module or class by calls of them with the interpreter's semantic."""
    names: dict[Any, list[str]] = {}
    calls: dict[Any, Callable[..., Any]] = {}

    def patch(owner: Any, builder: Any, scope: Any) -> None:
        found = [name for name in names.get(owner, dir(owner)) if tl.core.is_builtin(getattr(owner, name, None))]
        names.setdefault(owner, found)
        for name in found:
            member = getattr(owner, name)
            if member not in calls:
                calls[member] = _interpreted(member)
            scope.set_attr(owner, name, calls[member])

    return patch


def _interpreted(member: Any) -> Callable[..., Any]:
    semantic = interpreter.interpreter_semantic
    if member in _OF_TWO:
        return _of_two(*_OF_TWO[member])
    if member in _OF_ONE:
        return _OF_ONE[member](member)
    function = member
    while getattr(function, "__code__", None) is _BUILTIN:  # only asks whether _semantic is there
        function = function.__wrapped__

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


def _signed(rewrite: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What is run knows its signature, for which each launch asks twice."""

    def signed(kernel: Any) -> Any:
        function = rewrite(kernel)
        if "__signature__" not in vars(function):
            function.__signature__ = inspect.signature(function)
        return function

    return signed


def _of_two(name: str, swapped: bool) -> Callable[..., Any]:
    """A method of tensors that does nothing but unwrap its operands."""
    semantic = interpreter.interpreter_semantic

    def call(tensor: Any, other: Any, _semantic: Any = None) -> Any:
        if isinstance(other, tl.constexpr):
            other = other.value
        compute = getattr(semantic, name)
        return compute(other, tensor, True) if swapped else compute(tensor, other, True)

    return call


def _converted(member: Any) -> Callable[..., Any]:
    """``tensor.to``, where nothing but the type is given."""
    semantic = interpreter.interpreter_semantic

    def call(tensor: Any, dtype: Any, *more: Any, **how: Any) -> Any:
        if more or how or type(tensor) is not tl.tensor or type(dtype) is not tl.dtype:
            how["_semantic"] = semantic
            return member(tensor, dtype, *more, **how)
        return semantic.cast(tensor, dtype)

    return call


def _indexed(member: Any) -> Callable[..., Any]:
    """``tensor[:, None]`` and the like: another shape of the same values, known once a shape."""
    semantic = interpreter.interpreter_semantic
    known: dict[Any, Any] = {}

    def call(tensor: Any, slices: Any, _semantic: Any = None) -> Any:
        plain = type(slices) is tuple and all(one is None or one == _ALL for one in slices)
        if not plain or not tensor.type.is_block():
            return member(tensor, slices, _semantic=semantic)
        key = (id(tensor.shape), *(one is None for one in slices))
        if key not in known:
            known[key] = member(tensor, slices, _semantic=semantic).type
        of = known[key].with_element_ty(tensor.dtype)
        data = tensor.handle.data.reshape(of.shape.values)
        return tl.tensor(interpreter.TensorHandle(data, tensor.handle.dtype.scalar), of)

    return call


_ALL = slice(None)
_OF_ONE = {tl.tensor.to: _converted, tl.tensor.__getitem__: _indexed}
_OF_TWO = {
    getattr(tl.tensor, f"__{side}{name}__"): (name, side == "r") for name in ("add", "sub", "mul") for side in ("", "r")
}
_BUILTIN = tl.core.builtin(lambda _semantic=None: None).__code__


def _types_once(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's type for a type of Triton, or for a block of it."""
    known: dict[str, Any] = {}

    def dtype(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, tl.block_type) else of
        if scalar.name not in known:
            known[scalar.name] = find(scalar)
        return known[scalar.name]

    return dtype


class _Types:
    """Types of blocks, and the shape and number of elements of tensors of each, made once a process."""

    def __init__(self) -> None:
        self.built: dict[Any, dict[str, Any]] = {}
        self.same_shape: dict[Any, Any] = {}
        self.of_scalar = tl.tuple([]), tl.constexpr(1)

    def block(self, build: Callable[..., None]) -> Callable[..., None]:
        """``tl.block_type.__init__``."""

        def init(new: Any, element_ty: Any, shape: Any) -> None:
            sizes = [size.value if type(size) is tl.constexpr else size for size in shape]
            key = (_name(element_ty), *sizes)
            if key not in self.built or set(map(type, sizes)) != {int}:
                build(new, element_ty, shape)
                new.of_tensor = tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(new.numel)
                self.built[key] = dict(vars(new))
            else:
                vars(new).update(self.built[key])

        return init

    def with_element_ty(self) -> Callable[..., Any]:
        """``tl.block_type.with_element_ty``."""

        def of_elements(block: Any, element_ty: Any) -> Any:
            key = (id(block.of_tensor), _name(element_ty))  # of_tensor stays in self.built
            if key not in self.same_shape:
                self.same_shape[key] = tl.block_type(element_ty, block.shape)
            return self.same_shape[key]

        return of_elements

    def tensor(self) -> Callable[..., None]:
        """``tl.tensor.__init__``."""
        block, scalar = tl.block_type, self.of_scalar

        def init(new: Any, handle: Any, type: Any) -> None:
            new.handle = handle
            new.type = type
            if type.__class__ is block:
                new.shape, new.numel = type.of_tensor
                new.dtype = type.element_ty
            else:
                new.shape, new.numel = scalar
                new.dtype = type

        return init


def _name(element_ty: Any) -> Any:
    return (element_ty.name, element_ty.address_space) if type(element_ty) is tl.pointer_type else element_ty.name


class _Operands:
    """What two operands become before Triton computes with them: of one type, and of one shape."""

    def __init__(self, semantic: Any) -> None:
        self.check = semantic.binary_op_type_checking_impl
        self.broadcast = semantic.broadcast_impl_value
        self.cast = semantic.cast
        self.semantic = semantic
        self.common: dict[Any, Any] = {}
        self.shapes: dict[Any, list[int]] = {}
        self.constants: dict[Any, Any] = {}

    def of_one_type(self, lhs: Any, rhs: Any, *how: Any) -> Any:
        """``binary_op_type_checking_impl``: tensors of the same plain type stay, and so do offsets of pointers; of two
        plain types both become the one that Triton says, which depends on nothing else.
        """
        left = lhs.dtype if type(lhs) is tl.tensor else None
        right = rhs.dtype if type(rhs) is tl.tensor else None
        if left is not None and right is not None:
            same = left.name == right.name and left.name in _PLAIN
            moved = type(left) is tl.pointer_type and right.name in _INTEGERS and how == (True, True)
            if same or moved:
                return self.of_one_shape(lhs, rhs)
            if left.name not in _PLAIN or right.name not in _PLAIN or how not in _ARITHMETIC:
                return self.check(lhs, rhs, *how)
            names = left.name, right.name
            if names not in self.common:
                self.common[names] = self.semantic.computation_type_impl(left, False, right, False, False)
            common = self.common[names]
            return self.of_one_shape(self.of_type(lhs, common), self.of_type(rhs, common))
        if left is not None and left.name in _PLAIN and type(rhs) in (int, float):
            return self._with_constant((left.name, type(rhs), rhs, id(lhs.shape), how), lhs, rhs, 1, how)
        if right is not None and right.name in _PLAIN and type(lhs) in (int, float):
            return self._with_constant((type(lhs), lhs, right.name, id(rhs.shape), how), lhs, rhs, 0, how)
        return self.check(lhs, rhs, *how)

    def of_one_shape(self, lhs: Any, rhs: Any) -> Any:
        """``broadcast_impl_value``."""
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not lhs.type.is_block():
            return self._filled(lhs, rhs.type), rhs
        if not rhs.type.is_block():
            return lhs, self._filled(rhs, lhs.type)
        key = id(lhs.shape), id(rhs.shape)
        if key not in self.shapes:
            pair = self.broadcast(lhs, rhs)
            self.shapes[key] = pair[0].type.shape.values
            return pair
        return self._spread(lhs, self.shapes[key]), self._spread(rhs, self.shapes[key])

    def of_type(self, value: Any, target: Any, fp_downcast_rounding: str | None = None) -> Any:
        """``cast``: between plain types it is NumPy's. To bool Triton compares with zero."""
        source, scalar = value.dtype.name, target.scalar
        if source not in _PLAIN or scalar.name not in _PLAIN or fp_downcast_rounding is not None or target.is_block():
            return self.cast(value, target, fp_downcast_rounding)
        if source == scalar.name:
            return value
        if scalar.name == "int1":
            return self.cast(value, target)
        data = value.handle.data.astype(interpreter._get_np_dtype(scalar))
        of = value.type.with_element_ty(scalar) if value.type.is_block() else scalar
        return tl.tensor(interpreter.TensorHandle(data, scalar), of)

    def computed(self, name: str, how: tuple[bool, ...]) -> Callable[..., Any]:
        """``add``, ``sub`` or ``mul``: of plain types, one operation of NumPy for all; and a pointer with an offset."""
        compute, plain = getattr(self.semantic.builder, f"create_f{name}"), getattr(self.semantic, name)
        move = self.semantic.builder.create_addptr if name == "add" else None

        def of_two(lhs: Any, rhs: Any, sanitize_overflow: bool) -> Any:
            lhs, rhs = self.of_one_type(lhs, rhs, *how)
            if lhs.dtype.name in _PLAIN and rhs.dtype.name in _PLAIN:
                return tl.tensor(compute(lhs.handle, rhs.handle), lhs.type)
            if move is not None and type(lhs.dtype) is tl.pointer_type and rhs.dtype.name in _SIGNED:
                return tl.tensor(move(lhs.handle, rhs.handle), lhs.type)
            return plain(lhs, rhs, sanitize_overflow)

        return of_two

    def compared(self, name: str, operation: Any) -> Callable[..., Any]:
        """``less_than`` and the like: of plain types, one operation of NumPy for all."""
        builder, plain = self.semantic.builder, getattr(self.semantic, name)

        def of_two(lhs: Any, rhs: Any) -> Any:
            lhs, rhs = self.of_one_type(lhs, rhs)
            if lhs.dtype.name not in _PLAIN or rhs.dtype.name not in _PLAIN:
                return plain(lhs, rhs)
            of = lhs.type.with_element_ty(tl.int1) if lhs.type.is_block() else tl.int1
            return tl.tensor(builder.binary_op(lhs.handle, rhs.handle, operation), of)

        return of_two

    def of_bits(self, name: str) -> Callable[..., Any]:
        """``and_`` or ``or_`` of integers of one type."""
        compute, plain = getattr(self.semantic.builder, f"create_{name.strip('_')}"), getattr(self.semantic, name)

        def of_two(lhs: Any, rhs: Any) -> Any:
            names = {one.dtype.name if type(one) is tl.tensor else None for one in (lhs, rhs)}
            if len(names) > 1 or not names < _INTEGERS:
                return plain(lhs, rhs)
            lhs, rhs = self.of_one_shape(lhs, rhs)
            return tl.tensor(compute(lhs.handle, rhs.handle), lhs.type)

        return of_two

    def loaded(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """``load`` by a block of pointers to plain types, without what only a compiler is told."""
        builder = self.semantic.builder

        def load(ptr: Any, mask: Any, other: Any, *how: Any) -> Any:
            kind = ptr.dtype
            if (
                mask is None or any(how) or type(kind) is not tl.pointer_type or not ptr.type.is_block()
                or kind.element_ty.name not in _PLAIN or kind.element_ty.name == "int1"
            ):  # fmt: skip
                return plain(ptr, mask, other, *how)
            ptr, mask = self.of_one_shape(ptr, mask)
            if other is not None:
                ptr, other = self.of_one_shape(ptr, self.of_type(other, kind.element_ty))
            held = None if other is None else other.handle
            loaded = builder.create_masked_load(ptr.handle, mask.handle, held, None, None, None)
            return tl.tensor(loaded, ptr.type.with_element_ty(kind.element_ty))

        return load

    def _filled(self, scalar: Any, block: Any) -> Any:
        if not block.is_block():
            return scalar
        of = block.with_element_ty(scalar.dtype)
        return tl.tensor(_splat(of, scalar.handle), of)

    def _spread(self, block: Any, sizes: list[int]) -> Any:
        if block.type.shape.values == sizes:
            return block
        handle = interpreter.TensorHandle(np.broadcast_to(block.handle.data, sizes), block.handle.dtype.scalar)
        return tl.tensor(handle, tl.block_type(block.dtype, sizes))

    def _with_constant(self, key: Any, lhs: Any, rhs: Any, place: int, how: Any) -> Any:
        """A tensor and a number, which is at ``place``; where the tensor itself would be cast, nothing is kept."""
        if key not in self.constants:
            pair = self.check(lhs, rhs, *how)
            if pair[1 - place] is not (lhs, rhs)[1 - place]:
                return pair
            self.constants[key] = pair[place].handle.data, pair[place].handle.dtype, pair[place].type
        data, dtype, of = self.constants[key]
        constant = tl.tensor(interpreter.TensorHandle(data, dtype), of)
        return (lhs, constant) if place else (constant, rhs)


_COMPARISONS = {
    "less_than": np.less, "less_equal": np.less_equal, "greater_than": np.greater, "greater_equal": np.greater_equal,
    "equal": np.equal, "not_equal": np.not_equal,
}  # fmt: skip
_SIGNED = {"int1", "int8", "int16", "int32", "int64"}
_INTEGERS = {*_SIGNED, "uint8", "uint16", "uint32", "uint64"}
_PLAIN = {"fp32", "fp64", *_INTEGERS}
#: What ``binary_op_type_checking_impl`` is asked for where operands get a common type, and none is divided.
_ARITHMETIC = {(), (True, True), (True, False)}


def _handle(new: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    """``TensorHandle.__init__``."""
    new.data = data
    new.dtype = dtype
    new.attr = {} if attr is None else attr
    if not _fits(data, dtype):
        new.__post_init__()  # says why not


def _fits(data: Any, of: Any) -> bool:
    """Whether what NumPy made needs no more bits than the type has."""
    return type(of) is tl.pointer_type or data.itemsize == 1 or data.itemsize * 8 <= of.primitive_bitwidth


def _splat(ret_ty: Any, arg: Any) -> Any:
    out = np.empty(tuple(ret_ty.shape.values), dtype=interpreter._get_np_dtype(arg.dtype))
    out[...] = arg.data[0] if isinstance(arg.dtype, tl.block_type) else arg.data
    return interpreter.TensorHandle(out, arg.dtype.scalar)


def _expand_dims(arg: Any, axis: int) -> Any:
    sizes = list(arg.data.shape)
    sizes.insert(axis, 1)
    return interpreter.TensorHandle(arg.data.reshape(sizes), arg.dtype.scalar)


def _shifted(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Between bfloat16 and float32, but for subnormal numbers, what Triton works out bit by bit is a shift."""

    def shifted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        names = source.name, target.name
        if rounding is None and names in (("bf16", "fp32"), ("fp32", "bf16")):
            widening = source.name == "bf16"
            bits = np.ascontiguousarray(data).view(np.uint16 if widening else np.uint32)
            exponent, low = (0x7F80, 0x7F) if widening else (0x7F800000, 0x7FFFFF)
            if not np.any((bits & exponent == 0) & (bits & low != 0)):
                out = bits.astype(np.uint32) << 16 if widening else (bits >> 16).astype(np.uint16)
                return out.reshape(data.shape)
        return convert(data, source, target, rounding)

    return shifted
