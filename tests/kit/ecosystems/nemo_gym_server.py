"""A resources server that NeMo-Gym has itself, unmodified: run by an interpreter that has `nemo_gym`.

python nemo_gym_server.py NAME PORT      serves resources_servers/NAME; NAME is a folder of the package
"""

from __future__ import annotations

import importlib
import sys
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.server_utils import ServerClient

if __name__ == "__main__":
    name, port = sys.argv[1], int(sys.argv[2])
    module = importlib.import_module(f"resources_servers.{name}.app")
    own = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    (server,) = [one for one in own if issubclass(one, SimpleResourcesServer)]
    config: type[BaseResourcesServerConfig] = server.model_fields["config"].annotation
    made = server(
        config=config(host="127.0.0.1", port=port, entrypoint="app.py", name=name),
        server_client=MagicMock(spec=ServerClient),  # calls other servers, which it has none of
    )
    uvicorn.run(made.setup_webserver(), host="127.0.0.1", port=port, log_level="warning")
