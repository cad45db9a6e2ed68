"""Training clients by name: `client=local`, `tinker`, `skyrl`, `mock`, one of your own.

    register_client("mine", ClientSpec(MyClient.capabilities, build, describe))      # or client=package.module:SPEC

A spec holds the client's capabilities and the functions that describe and build it from a `ClientRequest`, so that a
run can be checked and planned before anything heavy is loaded. A new client is one file and one entry in `_BUILT_IN`.
Left out on purpose: samplers that cannot train (`rlvr.clients.endpoint`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlvr.clients.client_options import (
    ClientOptions,
    LocalOptions,
    MockOptions,
    SkyrlOptions,
    TinkerOptions,
)
from rlvr.clients.client_spec import ClientSpec
from rlvr.clients.sharded.sharding_options import ShardingOptions
from rlvr.core.plugins import describe_plugins, load_plugins
from rlvr.core.protocols import TrainingClient
from rlvr.core.registry import did_you_mean, load_object
from rlvr.core.variants import Variants, make_variant


@dataclass(frozen=True)
class BuiltInClient:
    """The entry of a client that comes with the package: where its spec is, and its options.

    The spec is loaded when it is asked for; none imports torch before its model is built.
    """

    path: str
    options: type[ClientOptions]


_BUILT_IN = {
    entry.options.name: entry
    for entry in (
        BuiltInClient("rlvr.clients.local_engine:LOCAL", LocalOptions),
        BuiltInClient("rlvr.clients.mock.mock_client:MOCK", MockOptions),
        BuiltInClient("rlvr.clients.tinker:TINKER", TinkerOptions),
        BuiltInClient("rlvr.clients.skyrl:SKYRL", SkyrlOptions),
        BuiltInClient("rlvr.clients.sharded.sharded_client:SHARDED", ShardingOptions),
    )
}
CLIENTS = Variants("client", ClientOptions, *(entry.options for entry in _BUILT_IN.values()))
_registered: dict[str, ClientSpec] = {}


def register_client(name: str, spec: ClientSpec) -> None:
    """Make `spec` available as `client=name`."""
    if name in _BUILT_IN or _registered.get(name, spec) != spec:
        raise ValueError(f"client {name!r} is registered already; choose another name")
    _registered[name] = spec


def resolve_client(name: str) -> ClientSpec:
    """The spec of a registered client, or the one at `package.module:SPEC`."""
    check_client(name)
    if name in _registered:
        return _registered[name]
    spec = load_object("client", _BUILT_IN[name].path if name in _BUILT_IN else name)
    if not isinstance(spec, ClientSpec):
        raise ValueError(f"client={name!r}: the object is of type {type(spec).__name__}, expected a ClientSpec(...)")
    return spec


def check_client(name: str) -> None:
    """ValueError for a name that is neither registered nor a path; nothing is imported but plug-ins."""
    if name not in known_clients() and ":" not in name:
        load_plugins()
    names = known_clients()
    if name not in names and ":" not in name:
        expected = f"expected {', '.join(names)}; or a path 'package.module:SPEC'{describe_plugins()}"
        raise ValueError(f"client={name!r}{did_you_mean(name, names)}; {expected}")


def make_options(name: str, options: Mapping[str, Any], kwargs: Mapping[str, Any]) -> ClientOptions:
    """The options of a client: `options` of one that comes with the package, `kwargs` of another one."""
    if name in _BUILT_IN:
        return _BUILT_IN[name].options(**options)
    kind = resolve_client(name).options
    return make_variant(f"client {name!r}", kind, kwargs)


def known_clients() -> list[str]:
    return [*_BUILT_IN, *_registered]


def close_client(client: TrainingClient) -> None:
    """Close a client at the end of a run; a server that is gone by now is no error."""
    with suppress(ValueError, RuntimeError, OSError):
        client.close()
