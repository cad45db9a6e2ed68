"""Runs an answer inside the sandbox, then answers calls on the channel. It holds no expected value.

`main` runs in a new fork that something else has confined. The answer may rewrite everything here: what leaves is data,
and the other side (`rlvr.sandbox.checker`) trusts it no further. Standard library only.

Requests are frames of `marshal` data, replies frames of JSON (`rlvr.sandbox.protocol`). Requests:
`["batch", [[name, args, kwargs] or [name], ...]]` (a result each), `["call", target, args, kwargs]` (reports changed
arguments), `["op", name, target, args]`, `["get", name]`, `["weak", test, entry point]`. A result is `["v", value]`,
`["x", type names, message, arguments, attributes]`, `["n", name]` (not defined), `["u", why]` (cannot travel) or
`["large", why]`. The first frame is `["ready"]` or `["bad", reason, detail]`. A job with `stdin` runs the answer as a
program on descriptors 0 and 1 instead, the latter being the channel.
`python -m pytest tests/test_sandbox_solver.py` exercises it.
"""

from __future__ import annotations

import builtins
import importlib
import json
import marshal
import operator
import os
import sys
import types
import warnings
from typing import Any

from rlvr.sandbox.codec import MODULES, PLAIN_TYPES, CodecError, Decoder, Encoder, ValueTooLarge
from rlvr.sandbox.protocol import NO_PROGRAM, OUTPUT, frame, read_frame, write_all

HANDLES = 10_000
OPS = {
    **{
        name: getattr(operator, name)
        for name in ["eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "matmul"]
    },
    **{
        name: getattr(operator, name)
        for name in ["and_", "or_", "xor", "pow", "neg", "pos", "abs", "getitem", "setitem", "delitem"]
    },
    **dict(getattr=getattr, setattr=setattr, len=len, str=str, repr=repr, bool=bool, isinstance=isinstance),
    **dict(int=int, float=float, next=next),
    "iter": lambda value: (item for item in value),
    "state": lambda value: [type(value).__qualname__, state_of(value)],
    "radd": lambda value, other: other + value,
    "rmul": lambda value, other: other * value,
    "rmatmul": lambda value, other: other @ value,
    "rpow": lambda value, other: other**value,
}


# `json.dumps` without a new encoder for each call; nothing here is cyclic.
_make: Any = getattr(json.encoder, "c_make_encoder", None)
_text = json.encoder.encode_basestring_ascii
_json: Any = _make(None, repr, _text, None, ":", ",", False, False, True) if _make else lambda x, _: [json.dumps(x)]


class UndefinedName(Exception):
    """A name that the answer does not define."""


def warm() -> None:
    """Run one answer before forking, so that forks share the warmed pages."""
    read, write = os.pipe()
    namespace: dict[str, Any] = {"__name__": "answer"}
    source = "import math\ndef f(x, y=1):\n  z = [a + y for a in x]\n  return {'a': (z, 1.5, 'b')}\n"
    exec(compile(source, "<answer>", "exec", dont_inherit=True), namespace)
    server = AnswerServer(-1, namespace, OUTPUT)
    reply = json.dumps(server.call(["n", "f"], ["l", ["l", 1, 2]], ["d"], False))
    os.write(write, reply.encode())
    json.loads(os.read(read, 1 << 16))
    server.handle(["call", ["n", "f"], ["l", 5], ["d"]])
    os.close(read)
    os.close(write)


def main(job: dict[str, Any], channel: int) -> None:
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)  # `site` would define these
    sys.argv = ["answer.py"]
    if "stdin" in job:
        run_program(job, channel)
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
    sys.modules["answer"] = module  # dataclasses and pickling look up a class's module
    namespace = module.__dict__
    server = AnswerServer(channel, namespace, job.get("output", OUTPUT))
    server.write(load(job, namespace))
    server.serve()


def load(job: dict[str, Any], namespace: dict[str, Any]) -> list[Any]:
    """Run imports, answer and setup; returns the first frame."""
    try:
        code = compile(job["solution"], "<answer>", "exec", dont_inherit=True)
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


def run_program(job: dict[str, Any], channel: int) -> None:
    """Run the answer as `__main__`. Its output streams to the channel and ends with it."""
    data = job["stdin"].encode("utf-8", "surrogateescape")
    read, write = os.pipe()

    def feed() -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(write, left[: 1 << 16]) :]
        finally:
            os.close(write)

    if len(data) <= 4096:
        feed()
    else:
        import threading

        threading.Thread(target=feed, daemon=True).start()
    os.dup2(read, 0)
    os.close(read)
    os.dup2(channel, 1)
    os.dup2(os.open("/dev/null", os.O_RDWR), 2)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        code = compile(job["solution"], "<answer>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        os._exit(NO_PROGRAM)
    try:
        for text in job.get("imports", ()):
            exec(compile(text, "<imports>", "exec", dont_inherit=True), module.__dict__)
        exec(code, module.__dict__)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise RuntimeError("exit status") from None
    finally:
        sys.stdout.flush()


class AnswerServer:
    """Answers requests from one namespace; `handles` are objects that cannot travel.

    `output` is how many bytes the checker takes. It counts them itself: here they give an honest answer its reason.
    """

    def __init__(self, channel: int, namespace: dict[str, Any], output: int) -> None:
        self.channel, self.namespace = channel, namespace
        self.output = self.output_left = output
        self.handles: list[Any] = []
        self.keys: dict[int, int] = {}

    def serve(self) -> Any:
        """Answer until the input ends, or until the reply to a callback, which is returned."""
        while body := read_frame(self.channel):
            request = marshal.loads(body)
            if request[0] == "ret":
                return request[1]
            if request[0] == "batch":  # a frame per call: earlier results survive a crash
                for name, *given in request[1]:
                    reply = self.call(["n", name], given[0], given[1], False) if given else self.handle(["get", name])
                    self.write(reply)
            else:
                self.write(self.handle(request))
        os._exit(0)

    def write(self, message: Any) -> None:
        data = frame("".join(_json(message, 0)).encode())
        if len(data) > self.output_left:
            why = f"{len(data):,} bytes would come back, {self.output_left:,} are left of limits.output={self.output:,}"
            data = frame(json.dumps(["large", f"{why}; raise it or test a smaller case"]).encode())
        self.output_left -= len(data)
        write_all(self.channel, data)

    def handle(self, request: list[Any]) -> Any:
        kind = request[0]
        if kind == "call":
            return self.call(request[1], request[2], request[3], True)
        if kind == "weak":
            return self.weak(request[1], request[2])
        try:
            if kind == "get":
                return ["v", Encoder(self.encode_opaque).encode(self.target(["n", request[1]]))]
            args = Decoder(self.decode_opaque).decode(request[3])
            return ["v", Encoder(self.encode_opaque).encode(OPS[request[1]](self.target(request[2]), *args))]
        except BaseException as error:
            return self.failure(error)

    def call(self, target: list[Any], args: Any, kwargs: Any, changes: bool) -> list[Any]:
        try:
            function = self.target(target)
            given = Decoder(self.decode_opaque).decode(args)
            named = Decoder(self.decode_opaque).decode(kwargs)
            try:
                result = ["v", Encoder(self.encode_opaque).encode(function(*given, **named))]
            except BaseException as error:
                result = self.failure(error)
            if changes:
                result.append(self.changed_arguments([args, kwargs], [given, named]))
            return result
        except BaseException as error:
            return [*self.failure(error), None] if changes else self.failure(error)

    def changed_arguments(self, before: list[Any], after: list[Any]) -> Any:
        """The arguments as they are now; None if the call did not change them."""
        try:
            now = [Encoder(self.encode_argument).encode(part) for part in after]
        except CodecError:
            return None
        return None if now == before else now

    def target(self, target: list[Any]) -> Any:
        kind, key = target
        if kind == "h":
            return self.handles[key]
        if key in self.namespace:
            return self.namespace[key]
        raise UndefinedName(key)

    def decode_opaque(self, data: list[Any]) -> Any:
        """Decode what the codec has no tag for: names, handles, builtins, functions of the test."""
        kind, key = data
        if kind in ("n", "h"):
            return self.target(data)
        if kind == "builtin":
            owner, _, name = key.rpartition(".")
            return getattr(getattr(builtins, owner) if owner else builtins, name)
        if kind == "m":
            return importlib.import_module(key)
        return self.callback(key)

    def callback(self, key: int) -> Any:
        def test_function(*args: Any, **kwargs: Any) -> Any:
            encoder = Encoder(self.encode_opaque)
            self.write(["cb", key, encoder.encode(args), encoder.encode(kwargs)])
            kind, value = self.serve()
            if kind == "x":
                raise getattr(builtins, value[0], Exception)(value[1])
            return Decoder(self.decode_opaque).decode(value)

        test_function.key = key  # type: ignore[attr-defined]
        return test_function

    def encode_opaque(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind is types.ModuleType and value.__name__ in MODULES:
            return ["m", value.__name__]
        plain = kind is type and (value.__name__ in PLAIN_TYPES or issubclass(value, BaseException))
        if plain and getattr(builtins, value.__name__, None) is value:
            return ["builtin", value.__name__]
        key = self.keys.get(id(value), len(self.handles))  # an object with a handle stays alive, so its id is unique
        if key == len(self.handles):
            if key >= HANDLES:
                raise CodecError("too many opaque values")
            self.handles.append(value)
            self.keys[id(value)] = key
        return ["h", key, kind.__name__]

    def encode_argument(self, value: Any) -> list[Any]:
        """Encode an argument as it came: `["h", key]`, `["n", name]`, `["builtin", name]` or `["cb", key]`."""
        if hasattr(value, "key") and getattr(value, "__name__", "") == "test_function":
            return ["cb", value.key]
        if getattr(builtins, getattr(value, "__name__", ""), None) is value:
            return ["builtin", value.__name__]
        for name, one in self.namespace.items():
            if one is value:
                return ["n", name]
        return self.encode_opaque(value)[:2]

    def failure(self, error: BaseException) -> list[Any]:
        if type(error) is UndefinedName:
            return ["n", error.args[0]]
        if isinstance(error, CodecError):
            return ["large" if isinstance(error, ValueTooLarge) else "u", str(error)[:200]]
        names = [kind.__name__ for kind in type(error).__mro__]
        try:
            args, attributes = Encoder().encode(list(error.args)), Encoder().encode(vars(error))
        except BaseException:
            args = attributes = None
        return ["x", names, message_of(error), args, attributes]

    def weak(self, test: str, entry_point: str | None) -> list[Any]:
        try:
            exec(compile(test, "<test>", "exec", dont_inherit=True), self.namespace)
            if entry_point and "check" in self.namespace:
                self.namespace["check"](self.namespace[entry_point])
        except BaseException as error:
            return [False, "assertion" if isinstance(error, AssertionError) else reason_of(error), describe(error)]
        return [True, "", ""]


def state_of(value: Any) -> dict[str, Any]:
    """The state of an object: its slots and its `__dict__`."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


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
