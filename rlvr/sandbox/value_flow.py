"""Which names of a test may hold values of the answer, and what the test does with them, told from its text alone.

`find_tainted` follows assignments, loops, calls; `find_held` finds the containers that an answer may keep;
`uses_answer_objects` says whether the test uses more than plain data. None of it looks at an answer, so no answer can
change how its test is judged.
Standard library only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from rlvr.sandbox.codec import MODULES
from rlvr.sandbox.differences import Difference, find_condition, find_difference
from rlvr.sandbox.setup_parts import BUILTINS, FUNCTIONS, IMPORTS, OF_DATA, bound_names, nodes, used_names, walk

NATIVE_MODULES = (
    "asyncio", "builtins", "code", "concurrent", "contextlib", "doctest", "io", "logging", "queue", "random", "sys",
    "threading", "timeit", "unittest.mock", "warnings", "weakref", "glob", "os", "pathlib", "shutil", "tempfile",
    "functools.singledispatch", "functools.singledispatchmethod",
)  # fmt: skip
DISPATCHING = {"singledispatch", "singledispatchmethod"}  # by the class of an object, which only its process knows
FILES = ("glob", "os", "pathlib", "shutil", "tempfile")
LOOK_AT_FILES = {"exists", "is_dir", "is_file", "isdir", "isfile"}
CAPTURING = {"assertLogs", "assertNoLogs", "assertWarns", "assertWarnsRegex"}  # of what happens beside the answer
THREADING = {"Thread", "Timer", "submit", "start_new_thread", "run_in_executor", "to_thread"}
KEY_METHODS = {"add", "discard", "setdefault", "get", "pop", "move_to_end", "isdisjoint", "issubset", "union"}
CHANGING = {"heappush", "heappop", "heapify", "heappushpop", "heapreplace", "insort", "insort_left", "insort_right"}
ITERATING = {"all", "any", "dict", "enumerate", "list", "max", "min", "set", "sorted", "sum", "tuple", "zip"}
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.Call, ast.ListComp, ast.DictComp, ast.SetComp)


def find_tainted(trees: list[ast.Module], free: set[str], native: set[str]) -> set[str]:
    """Names whose values may come from the answer, or hold such a value, wherever in the trees they are bound.

    A name is tainted in all scopes if it is in one, control flow is ignored, and so are the values of parameters: those
    of a function that gets a tainted argument, or that is passed on, are tainted.
    """
    tainted = set(free)
    everything = [node for tree in trees for node in nodes(tree)]
    tainted |= set().union(*map(native_names, everything))
    modules = MODULES | set().union(
        *(bound_names(ast.Module([node], [])) for node in everything if isinstance(node, IMPORTS))
    )
    if captures_output(trees):
        tainted.add("print")
    if any("open" in used_names(tree) for tree in trees):  # files are where the answer is
        tainted.add("open")
    dispatching = [node for node in everything if isinstance(node, ast.Attribute) and node.attr in DISPATCHING]
    tainted |= set().union(*(base_names(node) for node in dispatching))  # functools.singledispatch
    functions = {node.name: node for node in everything if isinstance(node, FUNCTIONS)}
    if "check" in functions:
        tainted |= parameters(functions["check"].args)
    plain = [node for node in everything if isinstance(node, ast.ClassDef) and node.name not in native]
    of_plain = {one for node in plain if not has_assertion(node) and not used_names(node) & free for one in node.body}
    bodies = {node.name: node.body for node in everything if isinstance(node, ast.ClassDef)}
    methods = {one for body in bodies.values() for one in body}
    called = {id(node.func) for node in everything if isinstance(node, ast.Call)}

    drawing = {name for node in everything for name in native_names(node, ("random",))}

    def is_tainted(*parts: ast.AST | None) -> bool:
        """Whether a value of the answer is used; values that the test draws at random are its own."""
        return any(used_names(part) & (tainted - drawing) for part in parts if part is not None)

    before = None
    while before != (len(tainted), len(of_plain)):
        before = len(tainted), len(of_plain)
        for node in everything:
            if isinstance(node, FUNCTIONS):
                if is_tainted(*node.body, *node.decorator_list) or node.name in native:
                    tainted.add(node.name)
                if (node in methods and node not in of_plain) or node.decorator_list:
                    tainted |= parameters(node.args)
            elif isinstance(node, ast.Lambda):
                tainted |= parameters(node.args)
            elif isinstance(node, ast.ClassDef):
                if is_tainted(node) or node.name in native:
                    tainted.add(node.name)
            elif isinstance(node, ast.Name) and node.id in functions and id(node) not in called:
                if isinstance(node.ctx, ast.Load):
                    tainted |= parameters(functions[node.id].args)
            elif isinstance(node, ast.Call):
                given = [*node.args, *(word.value for word in node.keywords)]
                if isinstance(node.func, ast.Name) and node.func.id in functions and is_tainted(*given):
                    tainted |= parameters(functions[node.func.id].args)
                if of_plain and is_tainted(*given):  # a constructor, a method or the object itself gets it
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    for kind, body in bodies.items():
                        if name == kind or {name, "__call__"} & {getattr(one, "name", "") for one in body}:
                            of_plain -= set(body)
                if isinstance(node.func, ast.Attribute) and is_tainted(*given):
                    tainted |= base_names(node.func.value) - modules
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                if node.value is not None and is_tainted(node.value):
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        tainted |= base_names(target)
            elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
                if is_tainted(node.iter):
                    tainted |= base_names(node.target)
            elif isinstance(node, ast.Attribute) and node.attr in CAPTURING:
                tainted |= base_names(node.value)
            elif isinstance(node, ast.withitem):
                if node.optional_vars is not None and is_tainted(node.context_expr):
                    tainted |= base_names(node.optional_vars)
            elif isinstance(node, (ast.With, ast.AsyncWith)):  # `with assertRaises(E) as caught:`
                if is_tainted(*node.body):
                    tainted |= set().union(*(base_names(one.optional_vars) for one in node.items if one.optional_vars))
            elif isinstance(node, (ast.Try, ast.TryStar)) and is_tainted(*node.body):
                tainted |= {handler.name for handler in node.handlers if handler.name}
    return tainted


def find_filled(trees: list[ast.Module], tainted: set[str]) -> set[str]:
    """Names of arguments of the answer's functions, and of `exec`: containers that these may fill with objects."""
    found = set[str]()
    for node in (node for tree in trees for node in nodes(tree) if isinstance(node, ast.Call)):
        given = [*node.args, *(word.value for word in node.keywords)]
        runs = isinstance(node.func, ast.Name) and node.func.id in ("exec", "eval")
        if used_names(node.func) & tainted or (runs and any(used_names(one) & tainted for one in given)):
            found |= {one.id for one in given if isinstance(one, ast.Name)}
    return found - BUILTINS


def find_held(trees: list[ast.Module], tainted: set[str], native: set[str], deciding: set[str]) -> set[str]:
    """Names of containers that have to be made beside the answer, because it may keep them or they hold its objects.

    They are given to a function of the answer whose value is kept, or to a method, or the test asks whether something
    is the same object as what it gave; they get a value of the answer as a
    key; definitions that run there (`native`) use them; or they are part of what is given so. A container that is only
    compared with is never held: it would tell the answer what is expected.
    """
    everything = [node for tree in trees for node in nodes(tree)]
    values: dict[str, list[ast.expr]] = {}
    for node in everything:
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
            for target, value in pairs:
                if (
                    isinstance(target, (ast.Tuple, ast.List))
                    and isinstance(value, ast.Tuple)
                    and len(value.elts) == len(target.elts)
                ):
                    pairs += zip(target.elts, value.elts, strict=True)
                if isinstance(target, ast.Name):
                    values.setdefault(target.id, []).append(value)
    made = {name for name, given in values.items() if all(isinstance(one, DISPLAYS) for one in given)}

    def is_tainted(*parts: ast.AST) -> bool:
        return any(used_names(part) & tainted for part in parts)

    held: set[str] = set()
    functions = {node.name for node in everything if isinstance(node, (*FUNCTIONS, ast.ClassDef))}
    modules = set().union(*(bound_names(ast.Module([node], [])) for node in everything if isinstance(node, IMPORTS)))
    own = functions | modules | {"self", "cls"}

    def is_of_answer(function: ast.expr) -> bool:
        """Whether a function is the answer's: what it gets it may keep, and learns anyway."""
        if isinstance(function, ast.Attribute):
            checks = function.attr.startswith("assert")  # of a mock
            return not checks and is_tainted(function.value) and not used_names(function.value) & own
        return isinstance(function, ast.Name) and function.id in tainted - own

    kept = [node.value for node in everything if isinstance(node, (ast.Assign, ast.Return)) and node.value is not None]
    kept += [node.context_expr for node in everything if isinstance(node, ast.withitem)]
    for node in everything:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            kept += node.decorator_list
        elif isinstance(node, ast.Call) and is_of_answer(node.func):
            kept += [*node.args, *(word.value for word in node.keywords)]
    identical = set[str]()  # names in `a is b`, where neither is a constant
    for node in everything:
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            constant = any(isinstance(one, ast.Constant) for one in (node.left, *node.comparators))
            identical |= set() if constant else used_names(node)
    kept_calls = {id(one) for value in kept for one in nodes(value) if isinstance(one, ast.Call)}
    for node in everything:
        if isinstance(node, ast.Call):
            args = [*node.args, *(word.value for word in node.keywords)]
            names = {one.id for one in args if isinstance(one, ast.Name)}
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if isinstance(node.func, ast.Attribute) and name in KEY_METHODS and any(map(is_tainted, args)):
                held |= base_names(node.func.value)
            if name in CHANGING and any(map(is_tainted, args)):
                held |= names
            runs_here = name in (*THREADING, "map") and names & functions - native  # see `Operations.keep_arguments`
            if is_of_answer(node.func) and not runs_here:
                nested = {one for one in names for value in values.get(one, ()) if has_names(value)} | names & identical
                held |= names if id(node) in kept_calls or isinstance(node.func, ast.Attribute) else nested
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and is_tainted(node.slice):
            held |= base_names(node.value)
    for node in everything:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and runs_whole(node, tainted, native, deciding):
            held |= used_names(node)
    before = -1
    while before < len(held):
        before = len(held)
        for name in tuple(held):
            for value in values.get(name, ()):
                if isinstance(value, (ast.List, ast.Tuple, ast.Set, ast.Dict)):
                    held |= {one.id for one in walk(value) if isinstance(one, ast.Name)}
    return held & made


def find_deciding(trees: list[ast.Module], free: set[str]) -> set[str]:
    """Functions of a test that are not given to the answer's process, since their text holds expected values.

    They compare what a function of the answer returns, or return it with what the test compares it with, or they are
    generators over which only the test iterates.
    """
    everything = [node for tree in trees for node in nodes(tree)]
    functions = [node for node in everything if isinstance(node, FUNCTIONS)]
    found = {node.name for node in functions if has_comparison(node, free)}
    mixed = {node.name for node in functions if isinstance(node, ast.AsyncFunctionDef) and mixes_values(node, free)}
    if mixed and compares_results(everything, find_tainted(trees, free, set())):
        found |= mixed
    iterated = {id(node.iter) for node in everything if isinstance(node, (ast.For, ast.comprehension))}
    for call in (node for node in everything if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in ITERATING - free:
            iterated |= set(map(id, call.args))
    names = {id(node.func) for node in everything if isinstance(node, ast.Call) and id(node) in iterated}
    others = {node.id for node in everything if isinstance(node, ast.Name) and id(node) not in names}
    others |= {node.attr for node in everything if isinstance(node, ast.Attribute)}
    for node in functions:
        yields = any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in walk(node))
        if yields and isinstance(node, ast.FunctionDef) and not node.decorator_list and node.name not in others:
            found.add(node.name)
    return found


def has_comparison(node: ast.AST, free: set[str]) -> bool:
    """Whether a function compares a value that a function of the answer has just returned."""

    def calls(part: ast.AST) -> bool:
        inside = [one.func for one in nodes(part) if isinstance(one, ast.Call)]
        return any(isinstance(one, ast.Name) and one.id in free for one in inside)

    made: set[str] = set()
    for one in walk(node):
        if isinstance(one, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and one.value is not None and calls(one.value):
            awaited = one.value.value if isinstance(one.value, ast.Await) else one.value
            if isinstance(awaited, ast.Call) and isinstance(awaited.func, ast.Name) and awaited.func.id in free:
                made |= set().union(*map(base_names, one.targets if isinstance(one, ast.Assign) else [one.target]))
    for one in walk(node):
        if isinstance(one, ast.Compare) and not any(isinstance(op, (ast.Is, ast.IsNot)) for op in one.ops):
            sides = [one.left, *one.comparators]
            if any(calls(side) or (isinstance(side, ast.Name) and side.id in made) for side in sides):
                return True
    return False


def mixes_values(function: ast.AST, free: set[str]) -> bool:
    """Whether a coroutine puts what it got from the answer beside other values: `return await f(1), want`."""
    got = set(free)
    for node in walk(function):
        if isinstance(node, ast.Assign) and is_got(node.value, got):
            got |= set().union(*map(base_names, node.targets))
    displays = [one for one in walk(function) if isinstance(one, (ast.Tuple, ast.List, ast.Dict))]
    parts = [one.values if isinstance(one, ast.Dict) else one.elts for one in displays]
    return any(len({is_got(one, got) for one in given}) > 1 for given in parts)


def is_got(node: ast.AST, got: set[str]) -> bool:
    return bool(used_names(node) & got) or any(isinstance(one, ast.Await) for one in nodes(node))


def compares_results(everything: list[ast.AST], tainted: set[str]) -> bool:
    """Whether a test compares two values of which each may come from the answer."""
    for node in everything:
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "").startswith("assert"):
            sides = node.args[:2]
        if len(sides) > 1 and all(used_names(side) & tainted for side in sides):
            return True
    return False


def runs_whole(node: ast.stmt, tainted: set[str], native: set[str], deciding: set[str]) -> bool:
    """Whether a definition goes to the answer's process as text: it is `native`, or suspends itself.

    It does not if it holds an assertion, is `deciding`, or changes variables of the test.
    """
    if not isinstance(node, (*FUNCTIONS, ast.ClassDef)) or has_assertion(node) or node.name in deciding:
        return False
    if isinstance(node, ast.ClassDef) or node.name in native:
        return node.name in native
    inner = walk(node)
    if any(isinstance(one, (ast.Global, ast.Nonlocal)) for one in inner):
        return False
    suspends = isinstance(node, ast.AsyncFunctionDef) or any(
        isinstance(one, (ast.Yield, ast.YieldFrom)) for one in inner
    )
    return suspends and bool({one.id for one in [node, *inner] if isinstance(one, ast.Name)} & tainted)


def is_generator(function: ast.AST) -> bool:
    return isinstance(function, ast.FunctionDef) and any(
        isinstance(one, (ast.Yield, ast.YieldFrom)) for one in walk(function)
    )


def find_coroutine_fault(trees: list[ast.Module], free: set[str], deciding: set[str]) -> str:
    """Why tests cannot be run: a coroutine with assertions would run in the answer's event loop. '' if none would."""
    everything = [node for tree in trees for node in nodes(tree)]
    asserting = {
        node.name: node
        for node in everything
        if isinstance(node, ast.AsyncFunctionDef) and (has_assertion(node) or node.name in deciding)
    }
    if not asserting:
        return ""
    for call in (node for node in everything if isinstance(node, ast.Call)):
        given = [*call.args, *(word.value for word in call.keywords)]
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        passed = set().union(*map(used_names, given)) & asserting.keys()
        if passed and (used_names(call.func) & free or name in ("gather", "create_task", "ensure_future", "wait_for")):
            name = min(passed)
            return (
                f"the coroutine {name!r} of the test holds expected values and would run in the answer's event loop: "
                "compare its result outside"
            )
    for node in (one for function in asserting.values() for one in walk(function)):
        if isinstance(node, ast.AsyncWith) and any("asyncio" in used_names(one.context_expr) for one in node.items):
            return "a coroutine of the test asserts in the scope of a task group or timeout: move the scope to another"
    return ""


def find_objects(everything: list[ast.AST], name: str) -> set[str]:
    """A class, and the names that may hold it, an object of it, a container of such or a function that makes them."""
    objects = {name}
    before = -1
    while before < len(objects):
        before = len(objects)
        for node in everything:
            if isinstance(node, ast.Assign) and whole_names(node.value) & objects:
                objects |= set().union(*map(base_names, node.targets))
            elif isinstance(node, (ast.For, ast.comprehension)) and whole_names(node.iter) & objects:
                objects |= base_names(node.target)
            elif isinstance(node, FUNCTIONS) and any(whole_names(one) & objects for one in return_values(node)):
                objects.add(node.name)
    return objects


def return_values(function: ast.AST) -> list[ast.expr]:
    """What a function returns or yields."""
    found = [one.value for one in walk(function) if isinstance(one, (ast.Return, ast.Yield, ast.YieldFrom))]
    return [one for one in found if one is not None]


def whole_names(node: ast.AST) -> set[str]:
    """Names that are read in an expression, but for those of which only an attribute is."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return set()
    if isinstance(node, ast.Name):
        return {node.id}
    return set().union(*map(whole_names, ast.iter_child_nodes(node)))


def has_names(value: ast.expr) -> bool:
    return isinstance(value, DISPLAYS) and any(isinstance(one, ast.Name) for one in walk(value))


def native_names(node: ast.AST, modules: Iterable[str] = NATIVE_MODULES) -> set[str]:
    """Names that an import binds to what has to be made where the answer runs: locks, streams, patches, seeds."""

    def is_native(name: str) -> bool:
        return any(name == one or name.startswith(one + ".") for one in modules)

    if isinstance(node, ast.Import):
        return {(one.asname or one.name).split(".")[0] for one in node.names if is_native(one.name)}
    if isinstance(node, ast.ImportFrom):
        inside = is_native(node.module or "")
        return {one.asname or one.name for one in node.names if inside or is_native(f"{node.module}.{one.name}")}
    return set()


def captures_output(trees: Iterable[ast.AST]) -> bool:
    """Whether tests redirect what is printed."""
    names = ("redirect_stdout", "redirect_stderr", "stdout", "stderr")
    return any(
        isinstance(one, (ast.Attribute, ast.Name)) and getattr(one, "attr", getattr(one, "id", "")) in names
        for tree in trees
        for one in nodes(tree)
    )


def parameters(args: ast.arguments) -> set[str]:
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *(one for one in (args.vararg, args.kwarg) if one)]
    return {one.arg for one in every}


def base_names(target: ast.AST) -> set[str]:
    """The names that an assignment to `target` changes: `x` of `x`, `x[0]`, `x.a` and `(x, y)`."""
    if isinstance(target, (ast.Attribute, ast.Subscript)):
        return base_names(target.value)
    if isinstance(target, (ast.Tuple, ast.List)):
        return set().union(*map(base_names, target.elts))
    if isinstance(target, ast.Starred):
        return base_names(target.value)
    return {target.id} if isinstance(target, ast.Name) else set()


def has_assertion(node: ast.AST) -> bool:
    for one in walk(node):
        if isinstance(one, ast.Assert):
            return True
        if isinstance(one, ast.Attribute) and one.attr.startswith("assert"):
            return True
    return False


def reads_attributes(trees: list[ast.Module], tainted: set[str]) -> bool:
    """Whether tests read attributes or call methods of the answer's objects, which could count what they are asked."""
    attributes = (node for tree in trees for node in nodes(tree) if isinstance(node, ast.Attribute))
    return any(node.attr not in OF_DATA and used_names(node.value) & tainted for node in attributes)


def uses_answer_objects(trees: list[ast.Module], free: set[str], tainted: set[str]) -> bool:
    """Whether tests use objects of the answer by their own text: attributes and methods, contexts, classes.

    It decides what an operation on an opaque object may reveal, so it must not depend on the answer. A capitalized name
    is a class if its value is kept, passed on, or used with another value of the answer: `Sum(60) == 10` calls a
    function, `a = Money(5)` and `V(1) + V(2)` make objects.
    """

    files = {name for tree in trees for node in nodes(tree) for name in native_names(node, FILES)}

    def is_tainted(node: ast.AST) -> bool:
        return bool(used_names(node) & tainted)

    def makes_object(node: ast.AST | None) -> bool:
        name = node.func.id.lstrip("_") if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        return name[:1].isupper() and node.func.id in free and "_" not in name  # type: ignore[union-attr]

    everything = [node for tree in trees for node in nodes(tree)]
    differences: dict[str, Difference] = {}
    for node in everything:
        found = find_difference(node.value, {}, free) if isinstance(node, ast.Assign) else None
        if found and isinstance(node.targets[0], ast.Name):  # type: ignore[attr-defined]
            differences[node.targets[0].id] = found  # type: ignore[attr-defined]
    for node in everything:
        if isinstance(node, (ast.UnaryOp, ast.Compare)):
            found = find_condition(node, differences, free)
            if found and any(map(makes_object, (found.left, found.right))):  # other differences are asked about too
                return True
        if isinstance(node, ast.Attribute):
            if node.attr not in OF_DATA and is_tainted(node.value) and not base_names(node.value) & files:
                return True
        elif isinstance(node, (ast.With, ast.AsyncWith, ast.AsyncFor, ast.Await)):
            if is_tainted(node):
                return True
        elif isinstance(node, ast.ExceptHandler):
            if node.type is not None and used_names(node.type) & free:
                return True
        elif isinstance(node, (ast.Assign, ast.For, ast.comprehension)):
            value = node.value if isinstance(node, ast.Assign) else node.iter
            if makes_object(value):
                return True
        elif isinstance(node, (ast.List, ast.Set, ast.Tuple, ast.Dict)):
            if any(map(makes_object, [*node.keys, *node.values] if isinstance(node, ast.Dict) else node.elts)):
                return True
        elif isinstance(node, ast.Call):
            if any(map(makes_object, node.args)) and is_tainted(node.func):
                return True
        elif isinstance(node, (ast.BinOp, ast.Compare)):
            sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.left, *node.comparators]
            plain = isinstance(node, ast.BinOp) and not isinstance(node.op, (ast.Sub, ast.Mod))
            plain |= (
                isinstance(node, ast.Compare)
                and isinstance(node.ops[0], (ast.In, ast.NotIn))
                and makes_object(sides[1])
            )
            if any(map(makes_object, sides)) and (plain or sum(map(is_tainted, sides)) > 1):
                return True
            if isinstance(node, ast.BinOp) and is_tainted(node) and any(has_no_operator(node.op, one) for one in sides):
                return True
    return False


def has_no_operator(op: ast.operator, side: ast.expr) -> bool:
    """Whether plain data has no such operator with this operand, as in `[1, 2] | f` and `"text" >> f`."""
    if isinstance(op, ast.MatMult):
        return True
    is_text = isinstance(side, ast.Constant) and type(side.value) in (str, bytes)
    is_range = isinstance(side, ast.Call) and isinstance(side.func, ast.Name) and side.func.id == "range"
    sequence = is_text or is_range or isinstance(side, (ast.List, ast.Tuple, ast.ListComp, ast.JoinedStr))
    return sequence and not isinstance(op, (ast.Add, ast.Mult, ast.Mod))
