"""Read pickles without importing, calling or building anything that they name.

    read_pickle(data)               # plain containers only; any name of a class is refused
    read_pickle(data, names=True)   # names and calls become inert `Named` and `Built` values

The opcodes of protocols 0 to 5 are interpreted here, in Python. Lengths are compared with what is
left of the data before anything is read, keys that would be expensive to hash are refused, and the
memory of the result is counted while it grows. So a forged file costs a bounded amount of memory,
and ends in one RefusedPickle with one line.

Proof: `python -m pytest tests/core/test_unpickle.py`.
"""

import codecs
import mmap
import pickle
import struct
from collections.abc import Callable
from typing import Any

# Memory that the result may take, by the sizes below.
MOST_BYTES = 2**31
LONGEST_INTEGER = 1024
# Keys are hashed: the depth and the number of elements of a tuple that is one.
DEEPEST_KEY = 8
MOST_KEY_ELEMENTS = 1000

# Bytes that CPython 3.11 takes for an object, an entry of a dict or of the memo, an element.
OBJECT_BYTES = 64
ENTRY_BYTES = 104
ELEMENT_BYTES = 16

_PLAIN_KEYS = (str, int, float, bytes, bool, complex, type(None))


class RefusedPickle(ValueError):
    """A pickle that is damaged, too large, or that names what its reader does not allow."""


class Named:
    """A class or function that a pickle names; it is never imported."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash((self.module, self.name))

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"Named({str(self)!r:.200})"


class Built:
    """A call or a construction in a pickle, with what the pickle would set on its result."""

    __slots__ = ("arguments", "entries", "function", "items", "state")

    def __init__(self, function: Any, arguments: Any) -> None:
        self.function = function
        self.arguments = arguments
        self.state: Any = None
        # Appended elements, and set entries, as an OrderedDict or a subclass of list has them.
        self.items: list[Any] = []
        self.entries: list[tuple[Any, Any]] = []

    def __repr__(self) -> str:
        return f"Built({self.function!r:.200}, ...)"


class Persistent:
    """A reference to something outside of the pickle, such as a tensor's storage."""

    __slots__ = ("id",)

    def __init__(self, reference: Any) -> None:
        self.id = reference

    def __repr__(self) -> str:
        return "Persistent(...)"


def read_pickle(
    data: bytes | mmap.mmap, *, names: bool = False, most_bytes: int = MOST_BYTES
) -> Any:
    """Return what a pickle holds; with `names`, classes and calls as inert values.

    Bytes after the end of the pickle are ignored, as `pickle.loads` does.
    """
    return PickleReader(data, names=names, most_bytes=most_bytes).load()


class PickleReader:
    """Reads the pickles in `data` one after the other, from `position` on.

    `on_dict` is called with each dict after its first entries were set, at most a thousand; what it
    returns takes the dict's place, so that a caller can store the parts of a large file densely.
    `named` and `references` collect what the pickles name and refer to.
    """

    __slots__ = (
        "_data",
        "_end",
        "_left_bytes",
        "_marked",
        "_memo",
        "_most_bytes",
        "_names",
        "_on_dict",
        "_places",
        "_stack",
        "_stopped",
        "named",
        "position",
        "references",
    )

    def __init__(
        self,
        data: bytes | mmap.mmap,
        *,
        names: bool = False,
        most_bytes: int = MOST_BYTES,
        position: int = 0,
        on_dict: Callable[[dict[Any, Any]], Any] | None = None,
    ) -> None:
        self.position = position
        self._data = data
        self._end = len(data)
        self._names = names
        self._left_bytes = most_bytes
        self._most_bytes = most_bytes
        self._on_dict = on_dict
        # Of each dict that is still empty, its place in the memo.
        self._places: dict[int, int] = {}
        self.named: set[str] = set()
        self.references: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._stopped = False

    def load(self) -> Any:
        """Read one pickle and return its value; raise RefusedPickle."""
        data = self._data
        actions = _ACTIONS
        self._begin()
        try:
            while not self._stopped:
                position = self.position
                self.position = position + 1
                actions[data[position]](self)
            if len(self._stack) != 1 or self._marked:
                raise RefusedPickle(f"it ends with {len(self._stack)} values in place of one")
            return self._stack[0]
        except RefusedPickle as error:
            raise RefusedPickle(f"byte {self.position:,}: {error}") from error
        except IndexError as error:
            raise RefusedPickle(
                f"byte {self.position:,}: it is cut off, or takes a value that it has not pushed"
            ) from error
        except KeyError as error:
            raise RefusedPickle(
                f"byte {self.position:,}: it uses value {error}, which it has not stored"
            ) from error
        except (ValueError, TypeError, AttributeError, struct.error) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RefusedPickle(f"byte {self.position:,}: {reason:.200}") from error

    # Take bytes and values.

    def _take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > self._end:
            raise RefusedPickle(
                f"it needs {num_bytes:,} bytes, and {self._end - self.position:,} are left"
            )
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def _number(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self.position)
        if end < 0:
            raise RefusedPickle("it is cut off inside a line")
        line = self._take(end - self.position)
        self.position += 1
        return line

    def _pay(self, num_bytes: int) -> None:
        self._left_bytes -= num_bytes
        if self._left_bytes < 0:
            raise RefusedPickle(f"its content takes more than {self._most_bytes:,} bytes of memory")

    def _push(self, value: Any) -> None:
        self._left_bytes -= OBJECT_BYTES
        if self._left_bytes < 0:
            self._pay(0)
        self._stack.append(value)

    def _to_mark(self) -> list[Any]:
        values = self._stack
        self._stack = self._marked.pop()
        self._left_bytes += OBJECT_BYTES
        return values

    # Numbers and strings.

    def _digit(self) -> None:
        """Push an integer of one byte, of which Python has all 256 already."""
        position = self.position
        self.position = position + 1
        self._stack.append(self._data[position])

    def _text_integer(self) -> None:
        line = self._line()
        if line in (b"00", b"01"):
            self._push(line == b"01")
        else:
            self._push(self._parsed(line))

    def _text_long(self) -> None:
        self._push(self._parsed(self._line().removesuffix(b"L")))

    def _parsed(self, line: bytes) -> int:
        if len(line) > LONGEST_INTEGER:
            raise RefusedPickle(f"an integer has {len(line):,} digits")
        return int(line)

    def _long(self, length_bytes: int) -> None:
        num_bytes = self._number(length_bytes)
        if num_bytes > LONGEST_INTEGER:
            raise RefusedPickle(f"an integer has {num_bytes:,} bytes")
        self._push(int.from_bytes(self._take(num_bytes), "little", signed=True))

    def _string(self, length_bytes: int, decode: Callable[[bytes], Any]) -> None:
        num_bytes = self._number(length_bytes)
        # Decoded text takes up to four bytes for each.
        self._pay(4 * num_bytes)
        self._push(decode(self._take(num_bytes)))

    def _quoted(self) -> None:
        line = self._line()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise RefusedPickle("a string has no quotes")
        self._pay(4 * len(line))
        self._push(codecs.escape_decode(line[1:-1])[0].decode("latin-1"))

    def _raw_text(self) -> None:
        line = self._line()
        self._pay(4 * len(line))
        self._push(line.decode("raw-unicode-escape"))

    # Containers.

    def _append_all(self, values: list[Any]) -> None:
        target = self._stack[-1]
        self._pay(ELEMENT_BYTES * len(values))
        if type(target) is list:
            target.extend(values)
        elif type(target) is Built:
            target.items.extend(values)
        else:
            raise RefusedPickle(f"it appends to a {type(target).__name__}")

    def _append(self) -> None:
        value = self._stack.pop()
        self._append_all([value])

    def _set_all(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if len(values) % 2:
            raise RefusedPickle("a key has no value")
        self._pay(ENTRY_BYTES * (len(values) // 2))
        pairs = zip(values[::2], values[1::2], strict=True)
        if type(target) is Built:
            target.entries.extend(pairs)
            return
        if type(target) is not dict:
            raise RefusedPickle(f"it sets an entry of a {type(target).__name__}")

        was_empty = not target
        for key, value in pairs:
            target[key if type(key) is str else self._key(key)] = value
        if was_empty and self._on_dict is not None:
            self._replace(target, self._on_dict(target))

    def _replace(self, old: dict[Any, Any], new: Any) -> None:
        """Put what the caller made of a dict in its place, on the stack and in the memo."""
        self._stack[-1] = new
        index = self._places.pop(id(old), None)
        if index is not None and new is not old:
            self._memo[index] = new
            self._left_bytes += ENTRY_BYTES * len(old)

    def _set(self) -> None:
        value = self._stack.pop()
        self._set_all([self._stack.pop(), value])

    def _dict_to_mark(self) -> None:
        values = self._to_mark()
        self._push({})
        self._set_all(values)

    def _add_items(self) -> None:
        values = self._to_mark()
        target = self._stack[-1]
        self._pay(ENTRY_BYTES * len(values))
        if type(target) is set:
            target.update(map(self._key, values))
        elif type(target) is Built:
            target.items.extend(values)
        else:
            raise RefusedPickle(f"it adds elements to a {type(target).__name__}")

    def _frozen(self) -> None:
        values = self._to_mark()
        self._pay(ENTRY_BYTES * len(values))
        self._push(frozenset(map(self._key, values)))

    def _tuple(self, length: int) -> None:
        start = len(self._stack) - length
        if start < 0:
            raise IndexError
        values = tuple(self._stack[start:])
        del self._stack[start:]
        self._push(values)

    def _tuple_to_mark(self) -> None:
        values = self._to_mark()
        self._pay(ELEMENT_BYTES * len(values))
        self._push(tuple(values))

    def _key(self, value: Any) -> Any:
        """Return a key if it hashes at a bounded cost; hashes of tuples are not cached."""
        if type(value) in _PLAIN_KEYS:
            return value
        level = [value]
        num_elements = 0
        for _ in range(DEEPEST_KEY):
            level = [item for one in level if type(one) is tuple for item in one]
            num_elements += len(level)
            if not level:
                # Lists and dicts raise a TypeError where they are hashed.
                return value
            if num_elements > MOST_KEY_ELEMENTS:
                break
        raise RefusedPickle("a key is a deeply nested tuple")

    # The memo.

    def _put(self, index: int) -> None:
        self._left_bytes -= ENTRY_BYTES
        if self._left_bytes < 0:
            self._pay(0)
        value = self._stack[-1]
        self._memo[index] = value
        if self._on_dict is not None and type(value) is dict and not value:
            self._places[id(value)] = index

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _get_recent(self) -> None:
        position = self.position
        self.position = position + 1
        self._stack.append(self._memo[self._data[position]])

    def _mark(self) -> None:
        self._left_bytes -= OBJECT_BYTES
        if self._left_bytes < 0:
            self._pay(0)
        self._marked.append(self._stack)
        self._stack = []

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._to_mark()

    def _stop(self) -> None:
        self._stopped = True

    def _protocol(self) -> None:
        if (protocol := self._number(1)) > pickle.HIGHEST_PROTOCOL:
            raise RefusedPickle(f"it has protocol {protocol}")

    def _frame(self) -> None:
        if (num_bytes := self._number(8)) > self._end - self.position:
            raise RefusedPickle(f"a frame of {num_bytes:,} bytes is longer than what is left")

    # Names, calls and references, which are recorded and never followed.

    def _name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise RefusedPickle("a name is no text")
        if not self._names:
            raise RefusedPickle(f"it names {module:.80}.{name:.80}, and no name is allowed here")
        named = Named(module, name)
        self.named.add(str(named))
        self._pay(2 * (len(module) + len(name)))
        self._push(named)

    def _line_name(self) -> None:
        module = self._line()
        self._name(module.decode(), self._line().decode())

    def _stack_name(self) -> None:
        name = self._stack.pop()
        self._name(self._stack.pop(), name)

    def _instance(self) -> None:
        arguments = tuple(self._to_mark())
        self._line_name()
        self._construct(self._stack.pop(), arguments)

    def _object(self) -> None:
        function, *arguments = self._to_mark()
        self._construct(function, tuple(arguments))

    def _call(self) -> None:
        arguments = self._stack.pop()
        self._construct(self._stack.pop(), arguments)

    def _call_with_keywords(self) -> None:
        keywords = self._stack.pop()
        arguments = self._stack.pop()
        self._construct(self._stack.pop(), (arguments, keywords))

    def _construct(self, function: Any, arguments: Any) -> None:
        if not self._names:
            raise RefusedPickle("it calls a function, and no call is allowed here")
        self._pay(4 * OBJECT_BYTES)
        self._push(Built(function, arguments))

    def _set_state(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is not Built:
            raise RefusedPickle(f"it sets the state of a {type(target).__name__}")
        target.state = state

    def _refer(self, reference: Any) -> None:
        if not self._names:
            raise RefusedPickle("it refers to something outside of the pickle")
        self.references.append(reference)
        self._push(Persistent(reference))

    def _unsupported(self) -> None:
        code = self._data[self.position - 1]
        raise RefusedPickle(f"{bytes([code])!r} is no opcode that is read")


def _latin(data: bytes) -> str:
    return data.decode("latin-1")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


_Action = Callable[[PickleReader], None]
_NAMED_ACTIONS: dict[bytes, _Action] = {
    pickle.MARK: PickleReader._mark,
    pickle.STOP: PickleReader._stop,
    pickle.POP: PickleReader._pop,
    pickle.POP_MARK: lambda self: self._to_mark().clear(),
    pickle.DUP: lambda self: self._stack.append(self._stack[-1]),
    pickle.PROTO: PickleReader._protocol,
    pickle.FRAME: PickleReader._frame,
    pickle.NONE: lambda self: self._push(None),
    pickle.NEWTRUE: lambda self: self._push(True),
    pickle.NEWFALSE: lambda self: self._push(False),
    pickle.INT: PickleReader._text_integer,
    pickle.LONG: PickleReader._text_long,
    pickle.BININT: lambda self: self._push(struct.unpack("<i", self._take(4))[0]),
    pickle.BININT1: PickleReader._digit,
    pickle.BININT2: lambda self: self._push(self._number(2)),
    pickle.LONG1: lambda self: self._long(1),
    pickle.LONG4: lambda self: self._long(4),
    pickle.FLOAT: lambda self: self._push(float(self._line()[:100])),
    pickle.BINFLOAT: lambda self: self._push(struct.unpack(">d", self._take(8))[0]),
    pickle.STRING: PickleReader._quoted,
    pickle.BINSTRING: lambda self: self._string(4, _latin),
    pickle.SHORT_BINSTRING: lambda self: self._string(1, _latin),
    pickle.BINBYTES: lambda self: self._string(4, bytes),
    pickle.SHORT_BINBYTES: lambda self: self._string(1, bytes),
    pickle.BINBYTES8: lambda self: self._string(8, bytes),
    pickle.BYTEARRAY8: lambda self: self._string(8, bytes),
    pickle.UNICODE: PickleReader._raw_text,
    pickle.BINUNICODE: lambda self: self._string(4, _text),
    pickle.SHORT_BINUNICODE: lambda self: self._string(1, _text),
    pickle.BINUNICODE8: lambda self: self._string(8, _text),
    pickle.EMPTY_LIST: lambda self: self._push([]),
    pickle.LIST: lambda self: self._push(self._to_mark()),
    pickle.APPEND: PickleReader._append,
    pickle.APPENDS: lambda self: self._append_all(self._to_mark()),
    pickle.EMPTY_DICT: lambda self: self._push({}),
    pickle.DICT: PickleReader._dict_to_mark,
    pickle.SETITEM: PickleReader._set,
    pickle.SETITEMS: lambda self: self._set_all(self._to_mark()),
    pickle.EMPTY_SET: lambda self: self._push(set()),
    pickle.ADDITEMS: PickleReader._add_items,
    pickle.FROZENSET: PickleReader._frozen,
    pickle.EMPTY_TUPLE: lambda self: self._push(()),
    pickle.TUPLE: PickleReader._tuple_to_mark,
    pickle.TUPLE1: lambda self: self._tuple(1),
    pickle.TUPLE2: lambda self: self._tuple(2),
    pickle.TUPLE3: lambda self: self._tuple(3),
    pickle.PUT: lambda self: self._put(self._parsed(self._line())),
    pickle.BINPUT: lambda self: self._put(self._number(1)),
    pickle.LONG_BINPUT: lambda self: self._put(self._number(4)),
    pickle.MEMOIZE: lambda self: self._put(len(self._memo)),
    pickle.GET: lambda self: self._get(self._parsed(self._line())),
    pickle.BINGET: PickleReader._get_recent,
    pickle.LONG_BINGET: lambda self: self._get(self._number(4)),
    pickle.GLOBAL: PickleReader._line_name,
    pickle.STACK_GLOBAL: PickleReader._stack_name,
    pickle.INST: PickleReader._instance,
    pickle.OBJ: PickleReader._object,
    pickle.REDUCE: PickleReader._call,
    pickle.NEWOBJ: PickleReader._call,
    pickle.NEWOBJ_EX: PickleReader._call_with_keywords,
    pickle.BUILD: PickleReader._set_state,
    pickle.PERSID: lambda self: self._refer(self._line().decode("ascii")),
    pickle.BINPERSID: lambda self: self._refer(self._stack.pop()),
}
# Registered extensions and buffers outside of the pickle are in no file that is read here.
_ACTIONS: list[_Action] = [
    _NAMED_ACTIONS.get(bytes([code]), PickleReader._unsupported) for code in range(256)
]
