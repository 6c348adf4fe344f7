"""Read nested mappings into a tree of dataclasses, with checked keys and types.

Unknown keys and wrong types are errors that name the key.

Proof: `python -m pytest tests/test_config.py`.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

from .core.nearest import nearest

Tree = TypeVar("Tree")
KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}


def read_fields(tree: type[Tree], values: Mapping[str, Any], *, inside: str = "") -> Tree:
    """Build a `tree` from `values`, which runs its own checks.

    `inside` is the key that holds the values, for error messages.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{inside or 'the configuration'} must be a block of keys, got {values!r}")
    hints = typing.get_type_hints(tree)
    names = [field.name for field in fields(tree)]  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            raise ValueError(f"{_path(inside, key)} is no key; {_nearest(str(key), names, inside)}")
    found = {
        name: _read(hints[name], values[name], _path(inside, name))
        for name in names
        if name in values
    }
    try:
        return tree(**found)
    except ValueError as error:
        raise ValueError(f"{inside}.{error}" if inside else str(error)) from error


def flat_keys(tree: type, *, inside: str = "") -> list[str]:
    """Return every key of a tree in its dotted form, such as `optimizer.beta1`."""
    keys = []
    for name, kind in typing.get_type_hints(tree).items():
        path = _path(inside, name)
        if is_dataclass(kind) and isinstance(kind, type):
            keys += flat_keys(kind, inside=path)
        else:
            keys.append(path)
    return keys


def nearest_key(key: str, keys: list[str]) -> str:
    """Suggest the closest key for a misspelled one, or list all keys."""
    by_last_part = {name.rsplit(".", 1)[-1]: name for name in keys}
    last_part = nearest(key.rsplit(".", 1)[-1], by_last_part)
    meant = nearest(key, keys) or (by_last_part[last_part] if last_part else None)
    return f"did you mean {meant}?" if meant else f"the keys are {', '.join(keys)}"


def _read(kind: Any, value: Any, path: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        return value if isinstance(value, kind) else read_fields(kind, value, inside=path)
    for choice in _choices(kind):
        done, result = _as(choice, value)
        if done:
            return result
    raise ValueError(f"{path} must be {_told(kind)}; got {value!r}" + _meant(kind, value))


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _as(kind: Any, value: Any) -> tuple[bool, Any]:
    """Return whether `value` is of this kind, and the converted value."""
    if get_origin(kind) is Literal:
        return value in get_args(kind), value
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            return False, value
        items = [_as(get_args(kind)[0], item) for item in value]
        if not all(fits for fits, _ in items):
            return False, value
        return True, tuple(item for _, item in items)
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return True, float(value)  # YAML reads 3e-4 as text
        except ValueError:
            return False, value
    if kind in (dict, Mapping) or get_origin(kind) in (dict, Mapping):
        return isinstance(value, Mapping), value
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool)), value


def _told(kind: Any) -> str:
    """Describe the accepted values in words."""
    words = []
    for choice in _choices(kind):
        if get_origin(choice) is Literal:
            words += [str(value) for value in get_args(choice)]
        elif get_origin(choice) is tuple:
            words.append("a list")
        else:
            words.append(KINDS.get(choice, "a block of keys"))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _meant(kind: Any, value: Any) -> str:
    """Suggest the closest accepted word for a misspelled one."""
    values = [
        str(word)
        for choice in _choices(kind)
        if get_origin(choice) is Literal
        for word in get_args(choice)
    ]
    meant = nearest(str(value), values)
    return f"; did you mean {meant}?" if meant else ""


def _nearest(key: str, names: list[str], inside: str) -> str:
    return nearest_key(_path(inside, key), [_path(inside, name) for name in names])


def _path(inside: str, key: object) -> str:
    return f"{inside}.{key}" if inside else str(key)
