"""Objects in a state: stored as plain data, and made into objects again where the program may hold their classes.

A checkpoint holds tensors and plain values only, so that `torch.load(weights_only=True)` reads it. An object is stored
as what its `__reduce_ex__` returns: the name of its class, arguments, state and entries. `Rules` decide which names
become classes again; nothing is imported for them.
"""

from __future__ import annotations

import argparse
import collections
import copy
import copyreg
import datetime
import decimal
import enum
import functools
import pathlib
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from determined import errors
from determined.pytorch._checkpoint import code
from determined.pytorch._data.tree import map_plain

Place = tuple[str, ...]

_ARRAY = "__ndarray__"
_OBJECT = "__object__"
_GLOBAL = "__global__"
_PARTS = ("args", "kwargs", "state", "items", "pairs")

_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device}
)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
_BLOCKED_MODULES = ("builtins", "os", "posix", "nt", "sys", "subprocess")
"""Modules whose functions must not make objects: with `getattr`, which pickles bound methods, any name is in reach."""

_HARMLESS_VALUES = (bool, int, float, complex, str, bytes, object)
"""Classes that a state may name, as a defaultdict factory, but not instantiate: they could fill the memory."""
_HARMLESS = (
    *(set, frozenset, dict, list, tuple, slice),
    *(collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter),
    *(argparse.Namespace, types.SimpleNamespace, decimal.Decimal, uuid.UUID, uuid.SafeUUID),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath),
)
"""Classes whose constructors only store their arguments."""


class Use(enum.Enum):
    """What a name in a state stands for."""

    VALUE = "a reference to"
    NEW = "an instance of"  # made without calling its constructor, the usual result of `__reduce_ex__`
    CALL = "a result of"


class Named(NamedTuple):
    """A class or function that a state holds."""

    place: Place
    name: str
    use: Use
    target: Any


def name_of(target: Any) -> str:
    """Return the name of a class or function in files, as in `torch.serialization.add_safe_globals`."""
    return f"{_module_name(target.__module__)}.{target.__qualname__}"


def _module_name(module: str) -> str:
    """Return the name of a module in files: the same for a script that is run or imported, and for every Python."""
    return "pathlib" if module == "pathlib._local" else code.import_name(module)


# To plain data


class Encoder:
    """Turns nested values into what `weights_only` loading admits, and lists the classes and functions in them."""

    def __init__(self) -> None:
        self.found: list[Named] = []
        self._open: set[int] = set()

    def encode(self, value: Any, place: Place = ()) -> Any:
        """Return a value as plain data; raises `InvalidExperimentException` for one that cannot be made again."""
        kind = type(value)
        if kind in _PLAIN or isinstance(value, Tensor):
            return value
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
            return {_ARRAY: torch.from_numpy(native).reshape(value.shape)}
        if isinstance(value, np.generic) and not isinstance(number := value.item(), np.generic):
            return self.encode(number, place)
        if kind in (set, collections.Counter) and _is_plain_key(tuple(value)):
            return value
        if isinstance(value, _NAMED):
            return {_GLOBAL: self._name(value, value.__qualname__, place, Use.VALUE)}
        if id(value) in self._open:
            raise _refusal(place, f"a {kind.__name__} that refers to itself")
        self._open.add(id(value))
        try:
            return self._encode_parts(value, place)
        finally:
            self._open.remove(id(value))

    def _encode_parts(self, value: Any, place: Place) -> Any:
        kind = type(value)
        if kind in (list, tuple):
            return map_plain(lambda index, one: self.encode(one, (*place, str(index))), value)
        if kind in (dict, collections.OrderedDict):
            keys = {key: key.item() if isinstance(key, np.generic) else key for key in value}
            if all(map(_is_plain_key, keys.values())):
                entries = {keys[key]: self.encode(one, (*place, str(key))) for key, one in value.items()}
                copied = copy.copy(value)  # keeps the metadata that torch attaches to state dicts
                copied.clear()
                copied.update(entries)
                return copied
        return self._reduced(value, place)

    def _reduced(self, value: Any, place: Place) -> dict[str, Any]:
        """Return what `__reduce_ex__` returns for an object, as plain data."""
        kind = type(value)
        try:
            reducer: Callable[[Any], Any] | None = copyreg.dispatch_table.get(kind)
            reduced = reducer(value) if reducer else value.__reduce_ex__(4)
        except Exception as error:
            raise _refusal(place, f"a {name_of(kind)}, which cannot be pickled ({error})") from error
        if isinstance(reduced, str):
            return {_GLOBAL: self._name(value, reduced, place, Use.VALUE)}
        make, args, state, items, pairs, setter = (*reduced, None, None, None, None)[:6]
        kwargs: Mapping[str, Any] = {}
        is_new = make in (copyreg.__newobj__, copyreg.__newobj_ex__)  # type: ignore[attr-defined]  # typeshed lacks it
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]  # likewise
            make, *args = args
        elif is_new:
            make, args, kwargs = args
        is_blocked = not isinstance(make, type) and getattr(make, "__module__", None) in _BLOCKED_MODULES
        if setter is not None or is_blocked or not hasattr(make, "__qualname__"):
            raise _refusal(place, f"a {name_of(kind)}, which is made by {make!r}")
        given = (list(args), dict(kwargs), state, list(items or ()), [list(pair) for pair in pairs or ()])
        parts = {
            name: self.encode(part, _part_place(place, name, part))
            for name, part in zip(_PARTS, given, strict=True)
            if part is not None and (name == "state" or part)
        }
        name = self._name(make, make.__qualname__, place, Use.NEW if is_new else Use.CALL)
        return {_OBJECT: {"class": name, "new": is_new, **parts}}

    def _name(self, target: Any, qualname: str, place: Place, use: Use) -> str:
        """Return the name of a class or function, and list it; raise if the name does not lead back to it."""
        module = getattr(target, "__module__", None) or type(target).__module__
        if module == "torch" and vars(torch).get(name := qualname.rpartition(".")[2]) is target:
            qualname = name  # the __qualname__ of torch.relu names a class that torch does not have
        try:
            found: Any = functools.reduce(getattr, qualname.split("."), sys.modules[module])
        except (KeyError, AttributeError):
            found = None
        if found is not target and not (isinstance(found, types.MethodType) and found == target):
            raise _refusal(
                place, f"{module}.{qualname}, which has no such name there: define it at the top level of a module"
            )
        name = f"{_module_name(module)}.{qualname}"
        self.found.append(Named(place, name, use, target))
        return name


def _is_plain_key(key: Any) -> bool:
    return all(map(_is_plain_key, key)) if type(key) is tuple else type(key) in _PLAIN


def _part_place(place: Place, name: str, part: Any) -> Place:
    """Return the place of a part of an object; attributes have the place of the object itself."""
    return place if name == "state" and isinstance(part, dict) else (*place, name)


def _refusal(place: Place, what: str) -> errors.InvalidExperimentException:
    return errors.InvalidExperimentException(
        f"The checkpoint would hold, under {'.'.join(place)}, what cannot be loaded safely: {what}. Plain values, "
        "containers, arrays, tensors, and functions and instances of classes defined in modules can be. Convert the "
        "rest in state_dict() or on_checkpoint_save_start()."
    )


# What may become an object again


class Rules:
    """Which classes and functions a state may hold, by place.

    Everywhere: harmless classes of the standard library, and those given to `torch.serialization.add_safe_globals`.
    Under an entry of the state: the ones that the program holds there before it loads anything (`initial`). With
    `modules`, the names of the program's own modules, also its classes if making an instance runs none of their code,
    and its functions in entries that `initial` does not have, since only the program itself reads those.
    """

    def __init__(
        self, initial: Mapping[str, Any] | None = None, modules: Callable[[], Iterable[str]] = lambda: ()
    ) -> None:
        encoder = Encoder()
        encoder.encode(dict(initial or {}))
        self._held = {(one.place[:2], one.use, one.name): one.target for one in encoder.found}
        self._known = set(initial or {})
        self._modules = modules

    def admits(self, one: Named) -> bool:
        """Return whether what an encoder found would be loaded."""
        return bool(self.target(one.place, one.name, one.use) == one.target)

    def target(self, place: Place, name: str, use: Use) -> Any:
        """Return the class or function that a name stands for; None if it is not allowed here."""
        harmless = (*_HARMLESS, *_HARMLESS_VALUES) if use is Use.VALUE else _HARMLESS
        everywhere = _safe_globals() | {name_of(kind): kind for kind in harmless}
        found = everywhere.get(name, self._held.get((place[:2], use, name)))
        if found is not None:
            return found
        found = self._of_program(name)
        if isinstance(found, types.FunctionType):
            return found if use is Use.VALUE and place[0] not in self._known else None
        return found if found is not None and (use is Use.VALUE or _runs_no_code(found, use)) else None

    def _of_program(self, name: str) -> type | types.FunctionType | None:
        for module in self._modules():
            if name.startswith(module + "."):
                found: Any = code.imported_module(module)
                for part in name.removeprefix(module + ".").split("."):
                    found = getattr(found, "__dict__", {}).get(part)  # no getattr, which could run code of the module
                if isinstance(found, (type, types.FunctionType)) and name_of(found) == name:  # not what it imported
                    return found
        return None


def _safe_globals() -> dict[str, Any]:
    """Return the classes and functions that the program added to torch's safe globals, by name."""
    given: list[Any] = torch.serialization.get_safe_globals()
    named = (one if isinstance(one, tuple) else (one, name_of(one)) for one in given)
    return {name: target for target, name in named}


_OF_PYTHON = (types.NoneType, types.MethodDescriptorType, types.WrapperDescriptorType)
"""Types of methods that are missing, or inherited from a class that is built into Python."""


def _runs_no_code(kind: type, use: Use) -> bool:
    """Return whether an instance of a class of the program can be made and filled without running code of the class."""
    if issubclass(kind, enum.Enum):
        return use is Use.CALL  # looked up by its value
    if use is Use.CALL or hasattr(kind, "__del__"):
        return False
    fill = getattr(kind, "__setstate__", None)
    is_named_tuple = issubclass(kind, tuple) and kind.__new__.__module__ == f"namedtuple_{kind.__name__}"
    return (
        (isinstance(kind.__new__, types.BuiltinFunctionType) or is_named_tuple)
        and (isinstance(fill, _OF_PYTHON) or getattr(fill, "__module__", None) == "dataclasses")
        and all(isinstance(getattr(kind, name, None), _OF_PYTHON) for name in ("__setitem__", "extend"))
    )


# From plain data


def with_arrays(value: Any) -> Any:
    """Return nested values with NumPy arrays restored; objects stay plain data."""
    if type(value) is dict and set(value) == {_ARRAY}:
        return value[_ARRAY].numpy()
    return map_plain(lambda _, one: with_arrays(one), value)


def decode(value: Any, rules: Rules, place: Place = ()) -> Any:
    """Return nested values with the objects that an `Encoder` took apart.

    Raises `InvalidCheckpointException` for one that the rules do not admit.
    """
    if type(value) is dict and len(value) == 1:
        if _OBJECT in value:
            return _made(value[_OBJECT], rules, place)
        if _GLOBAL in value:
            return _admitted(value[_GLOBAL], rules, place, Use.VALUE)
    return map_plain(lambda key, one: decode(one, rules, (*place, str(key))), value)


def _made(entry: Any, rules: Rules, place: Place) -> Any:
    try:
        make = _admitted(entry["class"], rules, place, Use.NEW if entry["new"] else Use.CALL)
        args, kwargs, state, items, pairs = (
            decode(entry.get(name), rules, _part_place(place, name, entry.get(name))) for name in _PARTS
        )
        made = make.__new__(make, *(args or ()), **(kwargs or {})) if entry["new"] else make(*(args or ()))
        if isinstance(made, enum.Enum):
            return made  # shared by the whole program, so a checkpoint must not change it
        if items:
            made.extend(items)
        for key, one in pairs or ():
            made[key] = one
        _fill(made, state)
        return made
    except errors.InvalidCheckpointException:
        raise
    except Exception as error:  # a class may raise anything for what it did not save itself
        raise errors.InvalidCheckpointException(
            f"{'.'.join(place)} of the checkpoint does not hold an object that can be made again "
            f"({type(error).__name__}: {error}); use another checkpoint."
        ) from error


def _fill(made: Any, state: Any) -> None:
    """Give an object its attributes, as unpickling does."""
    if state is None:
        return
    if (own := getattr(type(made), "__setstate__", None)) is not None:
        own(made, state)
        return
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if attributes:
        made.__dict__.update(attributes)
    for name, value in (slots or {}).items():
        if not isinstance(getattr(type(made), name, None), types.MemberDescriptorType):
            raise ValueError(f"{name!r} is not a slot of {name_of(type(made))}")
        object.__setattr__(made, name, value)


def _admitted(name: Any, rules: Rules, place: Place, use: Use) -> Any:
    found = rules.target(place, name, use) if isinstance(name, str) else None
    if found is None:
        raise errors.InvalidCheckpointException(
            f"The checkpoint holds, under {'.'.join(place)}, {use.value} {name}, "
            "which is not loaded, since this program holds no such thing in the same place. If you trust the "
            f"checkpoint, call torch.serialization.add_safe_globals([{str(name).rpartition('.')[2]}]) before."
        )
    return found
