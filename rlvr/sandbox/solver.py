"""Runs an answer inside the sandbox, then answers calls on the channel. It holds no expected value.

`main` runs in a new fork that something else has confined. The answer may rewrite everything here: what leaves is data,
and the other side (`rlvr.sandbox.checker`) trusts it no further. Standard library only.

Requests are frames of `marshal` data, replies frames of JSON (`rlvr.sandbox.protocol`). Requests:
`["batch", [[name, args, kwargs] or [name], ...]]` (a result each), `["call", target, args, kwargs]` (reports changed
arguments), `["op", name, target, args]`, `["get", name]`, `["weak", test, entry point]`. A result is `["v", value]`,
`["x", type names, message, arguments, attributes]`, `["n", name]` (not defined), `["u", why]` (cannot travel) or
`["large", why]`. The first frame is `["ready"]` or `["bad", reason, detail]`. A job with `stdin` runs the answer as a
program on descriptors 0 and 1 instead, the latter being the channel.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import importlib
import json
import marshal
import operator
import os
import sys
import time
import types
import warnings
from _thread import RLock, get_ident
from typing import Any

from rlvr.sandbox import answer_loop, answer_program
from rlvr.sandbox.answer_loop import name_of
from rlvr.sandbox.codec import MODULES, PLAIN_TYPES, CodecError, Decoder, Encoder, ValueTooLarge
from rlvr.sandbox.operators import OPERATORS
from rlvr.sandbox.protocol import OUTPUT, frame, read_frame, write_all

HANDLES = 10_000
WARM_TURNS = 20
IMMUTABLE = (
    bool,
    type(None),
    int,
    float,
    complex,
    str,
    bytes,
    range,
    type(NotImplemented),
    type(...),
    tuple,
    frozenset,
)
CHANGEABLE = (list, dict, set, bytearray, tuple, *(getattr(collections, name) for name in (
    "deque", "OrderedDict", "Counter", "defaultdict",
)))  # fmt: skip


def _step(items: Any) -> tuple[bool, Any]:
    """The next item with whether there is none: an answer's StopIteration ends no loop of the test by itself."""
    try:
        return (False, next(items))
    except StopIteration:
        return (True, None)


def _next(items: Any, *rest: Any) -> Any:
    if rest and rest[0] in ("__next__", "send", "throw") and hasattr(items, rest[0]):
        return getattr(items, rest[0])(*rest[1:])
    return next(items, *rest)


def _leave(context: Any, error: BaseException | None) -> Any:
    return type(context).__exit__(
        context, type(error) if error is not None else None, error, getattr(error, "__traceback__", None)
    )


def _display(kind: str, items: list[Any]) -> Any:
    return {"list": list, "tuple": tuple, "set": set, "dict": dict}[kind](items)


def _seed(value: Any) -> None:
    importlib.import_module("random").seed(value)


OPS = {
    **OPERATORS,
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "contains", "is_")},
    **dict(getattr=getattr, setattr=setattr, delattr=delattr, bool=bool, iter=iter, next=_next, step=_step),
    **dict(aiter=lambda value: value.__aiter__(), anext=answer_loop.next_item),
    **dict(seed=_seed, mapping=dict, hold=lambda value: value, print=print),
    **dict(await_value=answer_loop.run, await_call=answer_loop.await_call),
    **dict(exit=_leave, aexit=answer_loop.leave, display=_display, data=lambda value: value),
}


def draw(step: Any) -> Any:
    """A generator for an iterator of the test: each item is drawn there when it is asked for here."""
    given = None
    while True:
        ended, item = step(given)
        if ended:
            return item
        given = yield item


# `json.dumps` without a new encoder for each call; nothing here is cyclic.
_make: Any = getattr(json.encoder, "c_make_encoder", None)
_text = json.encoder.encode_basestring  # escaped as ASCII, two halves of a surrogate pair would become one character
_json: Any = (
    _make(None, repr, _text, None, ":", ",", False, False, True)
    if _make
    else lambda x, _: [json.dumps(x, ensure_ascii=False)]
)


class UndefinedName(Exception):
    """A name that the answer does not define."""


def warm() -> None:
    """Run an answer before forking, so that forks share its pages: often, since Python adapts code as it runs."""
    read, write = os.pipe()
    source = "import math\ndef f(x, y=1):\n  z = [a + y for a in x]\n  return {'a': (z, 1.5, 'b')}\n"
    for _ in range(WARM_TURNS):
        namespace: dict[str, Any] = {"__name__": "answer"}
        exec(compile(source, "<answer>", "exec", dont_inherit=True), namespace)
        server = AnswerServer(-1, namespace, OUTPUT)
        reply = json.dumps(server.call(["n", "f"], ["l", ["l", 1, 2]], ["d"]))
        os.write(write, reply.encode())
        json.loads(os.read(read, 1 << 16))
        server.handle(["call", ["n", "f"], ["l", 5], ["d"]])
    os.close(read)
    os.close(write)


def main(job: dict[str, Any], channel: int) -> None:
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)  # `site` would define these
    sys.argv = ["answer.py"]
    if "stdin" in job:
        answer_program.run(job, channel)
        return
    if not job.get("quiet"):  # else the zygote did so for all its forks
        warnings.simplefilter("ignore")
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            if descriptor != channel:
                os.dup2(null, descriptor)
        files = [open(fd, mode, closefd=False) for fd, mode in ((0, "r"), (1, "w"), (2, "w"))]  # noqa: SIM115
        sys.stdin, sys.stdout, sys.stderr = files
    module = types.ModuleType("answer")
    module.__file__ = "/tmp/answer.py"
    sys.modules["answer"] = module  # dataclasses and pickling look up a class's module
    namespace = module.__dict__
    server = AnswerServer(channel, namespace, job.get("output", OUTPUT))
    server.write(load(job, namespace))
    server.serve()


def load(job: dict[str, Any], namespace: dict[str, Any]) -> list[Any]:
    """Run imports, answer and setup; returns the first frame."""
    try:
        code = compile(job["solution"].removeprefix("\ufeff"), "<answer>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        return ["bad", "syntax_error", describe(error)]
    try:
        for text in job.get("imports", ()):
            exec(compile(text, "<imports>", "exec", dont_inherit=True), namespace)
        exec(code, namespace)
        if job.get("setup"):
            exec(compile(job["setup"], "<setup>", "exec", dont_inherit=True), namespace)
    except BaseException as error:
        return ["bad", reason_of(error), describe(error)]
    return ["ready"]


class AnswerServer:
    """Answers requests from one namespace; `handles` are objects that cannot travel.

    `output` is how many bytes the checker takes. It counts them itself: here they give an honest answer its reason.
    """

    def __init__(self, channel: int, namespace: dict[str, Any], output: int) -> None:
        self.channel, self.namespace = channel, namespace
        self.output = self.output_left = output
        self.handles: list[Any] = []
        self.keys: dict[int, int] = {}
        self.callbacks: dict[int, Any] = {}
        self.callback_lock: Any = None
        self.is_waiting, self.callers = False, set[int]()
        self.in_coroutine = False
        self.tuples: dict[tuple[str, ...], Any] = {}
        self.of_test: dict[tuple[str, int], Any] = {}  # stand-ins of the test's exceptions and plain objects

    def serve(self, is_nested: bool = False) -> Any:
        """Answer until the input ends, or until the reply to a callback, which is returned."""
        while body := read_frame(self.channel):
            request = marshal.loads(body)
            if request[0] == "ret":
                return request[1]
            if request[0] == "loop":
                self.in_coroutine = request[1]
            elif request[0] == "drop":
                self.drop(request[1])
            elif request[0] == "batch":  # a frame per call: earlier results survive a crash
                for name, *given in request[1]:
                    reply = self.call(["n", name], given[0], given[1]) if given else self.handle(["get", name])
                    self.write(reply)
            else:
                self.write(self.handle(request) if is_nested else self.handle_with_threads(request))
        os._exit(0)

    def drop(self, keys: list[int]) -> None:
        """Let go of objects that the test has no reference to any more; classes keep their handles."""
        for key in keys:
            if not isinstance(self.handles[key], type):
                self.keys.pop(id(self.handles[key]), None)
                self.handles[key] = None

    def handle_with_threads(self, request: list[Any]) -> Any:
        """The reply; meanwhile threads of the answer may call the test, which listens only until it has the reply."""
        if self.is_waiting:
            self.callback_lock.release()
        reply = self.handle(request)
        for _ in range(100 if self.callers else 0):
            time.sleep(0.001)
            if not self.callers:
                break
        self.is_waiting = self.callback_lock is not None and self.callback_lock.acquire()
        return reply

    def write(self, message: Any) -> None:
        data = frame("".join(_json(message, 0)).encode("utf-8", "surrogatepass"))
        if len(data) > self.output_left:
            why = f"{len(data):,} bytes would come back, {self.output_left:,} are left of limits.output={self.output:,}"
            data = frame(json.dumps(["large", f"{why}; raise it or test a smaller case"]).encode())
        self.output_left -= len(data)
        write_all(self.channel, data)

    def handle(self, request: list[Any]) -> Any:
        if not self.in_coroutine:
            return self.reply(request)
        events = importlib.import_module("asyncio.events")
        events._set_running_loop(answer_loop.event_loop())  # the test is in a coroutine: tasks can be made
        try:
            return self.reply(request)
        finally:
            events._set_running_loop(None)

    def reply(self, request: list[Any]) -> Any:
        kind = request[0]
        if kind == "call":
            return self.call_with_changes(lambda: self.decode(request[1]), request[2], request[3])
        if kind == "method":
            return self.call_with_changes(lambda: getattr(self.decode(request[1]), request[2]), request[3], request[4])
        if kind == "library":
            return self.call_with_changes(lambda: self.library(request[1]), request[2], request[3])
        if kind == "weak":
            return self.weak(request[1], request[2])
        try:
            if kind == "get":
                return ["v", Encoder(self.encode_opaque).encode(self.target(["n", request[1]]))]
            if kind == "classes":
                value = self.decode(request[1])
                kinds = value if type(value) is tuple else (value,)
                return ["m", [self.classes(one) for one in kinds if issubclass(one, BaseException)]]
            if kind == "raise":
                raise self.decode(request[1])
            return self.operate(request[1], request[2])
        except BaseException as error:
            return self.failure(error)

    def operate(self, name: str, given: Any) -> list[Any]:
        args = self.decode(given)
        if name == "define":
            return ["v", self.result(self.define(*args))]
        before = len(self.handles)
        value = OPS[name](*args)
        if name in ("step", "anext"):
            return ["v", ["t", value[0], self.result(value[1])]]
        result = ["v", self.result(value)]
        if name != "data":
            changed = self.changed_arguments([given], [args], before)
            result.append(changed and changed[0][1:])
        return result

    def library(self, path: str) -> Any:
        function = name_of(*path.split(":"))
        if path not in ("builtins:eval", "builtins:exec"):
            return function

        def run(code: Any, *spaces: Any) -> Any:
            try:
                return function(code, *(spaces or [self.namespace]))
            finally:
                for space in spaces:
                    space.pop("__builtins__", None)

        return run

    def define(self, name: str, text: str, values: dict[str, Any]) -> Any:
        if not name:  # a lambda expression
            made = eval(
                compile(f"lambda {', '.join(values)}: {text}", "<test>", "eval", dont_inherit=True), self.namespace
            )
            return made(**values)
        self.namespace.update(values)
        exec(compile(text, "<test>", "exec", dont_inherit=True), self.namespace)
        return self.namespace[name]

    def decode(self, data: Any) -> Any:
        return Decoder(self.decode_opaque).decode(data)

    def result(self, value: Any) -> Any:
        """Plain immutable data as itself; else a handle with the data that the value can be read as."""
        kind = type(value)
        if kind in IMMUTABLE and kind not in (tuple, frozenset):
            return Encoder(self.encode_opaque).encode(value)
        if kind is type or kind is types.ModuleType or self.find_place(value) is not None:
            return self.encode_opaque(value)
        encoder = Encoder(draws=False)
        try:
            data = [encoder.encode(value)]
        except CodecError as error:
            if isinstance(error, ValueTooLarge):
                raise
            data = []
        if data and encoder.exact and kind in (tuple, frozenset) and all(type(item) in IMMUTABLE for item in value):
            return data[0]
        if data and type(data[0]) is not list and encoder.exact:
            return data[0]
        exact = 0
        if data:
            base = next((one for one in kind.__mro__ if one.__module__ in ("builtins", "collections")), object)
            exact = 1 if encoder.exact else 3 if kind.__eq__ is not base.__eq__ else 2
        return [*self.encode_opaque(value)[:3], exact, data]

    def call_with_changes(self, find: Any, args: Any, kwargs: Any) -> list[Any]:
        """Call and report the arguments that the call changed."""
        try:
            function, given, named = find(), self.decode(args), self.decode(kwargs)
            before = len(self.handles)
            try:
                result = ["v", self.result(function(*given, **named))]
            except BaseException as error:
                result = self.failure(error)
            result.append(self.changed_arguments([args, kwargs], [given, named], before))
            return result
        except BaseException as error:
            return [*self.failure(error), None]

    def call(self, target: list[Any], args: Any, kwargs: Any) -> list[Any]:
        """Call a function with plain data; the reply's third part says whether its value is of a subclass."""
        try:
            function, given, named = self.target(target), self.decode(args), self.decode(kwargs)
            encoder = Encoder(self.encode_opaque)
            data = encoder.encode(function(*given, **named))
            return ["v", data] if encoder.exact else ["v", data, True]
        except BaseException as error:
            return self.failure(error)

    def changed_arguments(self, before: list[Any], after: list[Any], handles: int) -> Any:
        """The arguments as they are now; None if the call did not change them. `handles`: how many there were.

        A container that got its handle in this call, because the call returned its argument, is still written as data.
        """

        def find(value: Any) -> list[Any] | None:
            found = self.find_handle(value)
            kind = type(value)
            is_new = found is not None and found[1] >= handles
            return None if is_new and (kind in CHANGEABLE or kind.__name__ == "array") else found

        try:
            now = [Encoder(self.encode_argument, draws=False, known=find).encode(part) for part in after]
        except CodecError:
            return None
        return None if now == before else now

    def target(self, target: list[Any]) -> Any:
        kind, key = target[:2]
        if kind == "h":
            return self.handles[key]
        if key in self.namespace:
            return self.namespace[key]
        if hasattr(builtins, key):
            return getattr(builtins, key)
        raise UndefinedName(key)

    def decode_opaque(self, data: list[Any]) -> Any:
        """Decode what the codec has no tag for: names, handles, builtins, functions of the test."""
        kind, key, *rest = data
        if kind in ("n", "h"):
            return self.target(data)
        if kind == "builtin":
            owner, _, name = key.rpartition(".")
            return getattr(getattr(builtins, owner) if owner else builtins, name)
        if kind == "m":
            return importlib.import_module(key)
        if kind == "lib":
            return name_of(*key.split(":"))
        if kind in ("exc", "object"):
            if (kind, key) not in self.of_test:
                self.of_test[kind, key] = self.test_exception(*rest) if kind == "exc" else object()
            return self.of_test[kind, key]
        if kind == "make":
            return name_of(*key.split(":"))(*map(self.decode, rest[0]), **self.decode(rest[1]))
        if kind == "match":
            name, *given = rest
            return getattr(self.decode(key), name)(*given)
        if kind == "random":
            made = importlib.import_module("random").Random()
            made.setstate(self.decode(key))
            return made
        if kind == "N":
            return self.named_tuple(key, *rest)
        if kind == "DD":
            return collections.defaultdict(self.decode(key), self.decode(rest[0]))
        if kind == "iter":
            if ("iter", key) not in self.of_test:
                self.of_test["iter", key] = draw(self.callback(key))
            return self.of_test["iter", key]
        return self.callback(key, *rest)

    def test_exception(self, module: str, base: str, name: str, text: str, args: Any, attributes: Any) -> Any:
        """An exception of the test, as one with its nearest builtin or library base."""
        kind, given = name_of(module, base), self.decode(args)
        if name != base:
            kind = type(name, (kind,), {})
        try:
            error = kind(*given)
        except Exception:
            error = kind.__new__(kind, *given)
        if name != base and message_of(error) != text:  # the test's class writes it in its own way
            kind.__str__ = lambda self: text
        for key, value in attributes.items():
            with contextlib.suppress(Exception):
                setattr(error, key, self.decode(value))
        return error

    def find_place(self, value: Any) -> list[Any] | None:
        """How an exception or a plain object of the test is written."""
        if type(value) is not object and not isinstance(value, BaseException):
            return None
        return next((list(key) for key, one in self.of_test.items() if one is value), None)

    def named_tuple(self, name: str, fields: list[str], items: list[Any]) -> Any:
        key = (name, *fields)
        if key not in self.tuples:
            self.tuples[key] = collections.namedtuple(name, fields)
        return self.tuples[key](*map(self.decode, items))

    def callback(self, key: int, name: str = "", documentation: str | None = None, signature: str = "") -> Any:
        if key in self.callbacks:
            return self.callbacks[key]

        if self.callback_lock is None:
            self.callback_lock = RLock()

        def test_function(*args: Any, **kwargs: Any) -> Any:
            encoder = Encoder(self.encode_argument, False, self.encode_subclass, self.find_handle)
            caller = get_ident()
            self.callers.add(caller)
            try:
                with self.callback_lock:  # threads of the answer may call it at the same time
                    self.write(["cb", key, encoder.encode(args), encoder.encode(kwargs)])
                    kind, value = self.serve(is_nested=True)
            finally:
                self.callers.discard(caller)
            if kind == "x":
                raise self.decode(value)
            return self.decode(value)

        test_function.key = key  # type: ignore[attr-defined]
        test_function.__name__ = test_function.__qualname__ = name or "test_function"
        test_function.__doc__ = documentation
        with contextlib.suppress(Exception):
            scope = dict(self.namespace)
            exec(compile(f"def _signed{signature}: pass", "<test>", "exec", dont_inherit=True), scope)
            test_function.__annotations__ = scope["_signed"].__annotations__
            test_function.__signature__ = importlib.import_module("inspect").signature(scope["_signed"])  # type: ignore[attr-defined]
        self.callbacks[key] = test_function
        return test_function

    def encode_subclass(self, value: Any) -> list[Any]:
        """An argument of a function of the test whose class is derived from a builtin one."""
        if type(value) is collections.defaultdict:
            return Encoder(self.encode_argument, draws=False, known=self.find_handle).encode(value)
        return self.result(value)

    def find_handle(self, value: Any) -> list[Any] | None:
        """The handle of an object that has one."""
        key = self.keys.get(id(value))
        return None if key is None else ["h", key]

    def encode_opaque(self, value: Any) -> list[Any]:
        kind = type(value)
        if (written := self.find_place(value)) is not None:
            return written
        if kind is types.ModuleType and value.__name__ in MODULES:
            return ["m", value.__name__]
        plain = kind is type and (value.__name__ in PLAIN_TYPES or issubclass(value, BaseException))
        if plain and getattr(builtins, value.__name__, None) is value:
            return ["builtin", value.__name__]
        key = self.keys.get(id(value), len(self.handles))  # an object with a handle stays alive, so its id is unique
        if key == len(self.handles):
            if len(self.keys) >= HANDLES:
                raise CodecError("too many objects of the answer are sent as references")
            self.handles.append(value)
            self.keys[id(value)] = key
        return ["h", key, kind.__name__]

    def encode_argument(self, value: Any) -> list[Any]:
        """Encode an argument as it came: `["h", key]`, `["n", name]`, `["builtin", name]` or `["cb", key]`."""
        for (kind, key), one in self.of_test.items():
            if kind == "iter" and one is value:
                return ["cb", key]
        for key, function in self.callbacks.items():
            if function is value:
                return ["cb", key]
        if getattr(builtins, getattr(value, "__name__", ""), None) is value:
            return ["builtin", value.__name__]
        for name, one in self.namespace.items():
            if one is value:
                return ["n", name]
        if type(value).__name__ == "Random" and type(value).__module__ == "random":
            return ["random", Encoder().encode(value.getstate())]
        return self.encode_opaque(value)[:2]

    def failure(self, error: BaseException) -> list[Any]:
        if type(error) is UndefinedName:
            return ["n", error.args[0]]
        if isinstance(error, CodecError):
            return ["large" if isinstance(error, ValueTooLarge) else "u", str(error)[:200]]
        return ["x", self.exception(error)]

    def exception(self, error: BaseException, depth: int = 0) -> list[Any]:
        """[classes, message, arguments, handle, exceptions of a group]."""
        try:
            args: Any = Encoder(draws=False).encode(error.args)
        except BaseException:
            args = None
        try:
            handle: Any = self.encode_opaque(error) if depth >= 0 else None
        except CodecError:
            handle = None
        inner: list[Any] = []
        if isinstance(error, BaseExceptionGroup) and depth < 5:
            inner = [self.exception(one, depth + 1) for one in error.exceptions[:100]]
        place = self.find_place(error)
        return [
            self.classes(type(error)),
            message_of(error),
            args,
            handle,
            inner,
            place and place[1],
        ]

    def classes(self, kind: type) -> list[Any]:
        """A class and its bases in the order of resolution: builtin, of a library, or a handle with a name."""
        found: list[Any] = []
        for one in type.__dict__["__mro__"].__get__(kind):
            if one is object:
                continue
            module, name = one.__module__, one.__qualname__
            if getattr(builtins, one.__name__, None) is one:
                found.append(["builtin", one.__name__])
                continue
            try:
                of_library = (
                    type(module) is str
                    and module.split(".")[0] in sys.stdlib_module_names
                    and name_of(module, name) is one
                )
            except (ImportError, AttributeError, ValueError):
                of_library = False
            found.append(["lib", module, name] if of_library else self.encode_opaque(one)[:2] + [one.__name__])
        return found

    def weak(self, test: str, entry_point: str | None) -> list[Any]:
        try:
            exec(compile(test, "<test>", "exec", dont_inherit=True), self.namespace)
            if entry_point and "check" in self.namespace:
                self.namespace["check"](self.namespace[entry_point])
        except BaseException as error:
            return [False, "assertion" if isinstance(error, AssertionError) else reason_of(error), describe(error)]
        return [True, "", ""]


def reason_of(error: BaseException) -> str:
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return "exited"
    if isinstance(error, MemoryError):
        return "memory"
    return "wrong_name" if isinstance(error, NameError) else "exception"


def message_of(error: BaseException) -> str:
    try:
        return str(error)[:200]
    except BaseException:
        return ""


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {message_of(error)}"[:200]
