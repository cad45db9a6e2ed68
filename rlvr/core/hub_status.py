"""Whether the Hugging Face hub answers, by one short request: a machine without network begins or fails in seconds.

`HF_ENDPOINT`, proxies and `HF_HUB_OFFLINE` are honoured.
"""

from __future__ import annotations

import os
import ssl
import time
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

PATIENCE = 3.0  # seconds that the hub has to answer anything
_VALID = 30.0  # seconds for which an answer, or none, counts
_answers: dict[str, tuple[float, bool]] = {}


def hub_endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def is_offline() -> bool:
    """Whether the environment says that no hub is to be asked."""
    names = ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


class HubProbe:
    """One request to the hub, made in a thread: looking a name up may take longer than any timeout."""

    def __init__(self) -> None:
        self._url, self._has_answer = hub_endpoint(), False
        at, known = _answers.get(self._url, (0.0, False))
        self._thread = None
        if at and time.monotonic() - at < _VALID:
            self._has_answer = known
        else:
            self._thread = Thread(target=self._ask, daemon=True)
            self._thread.start()

    def _ask(self) -> None:
        try:
            urlopen(Request(self._url, method="HEAD"), timeout=PATIENCE).close()
            self._has_answer = True
        except HTTPError as error:  # a status is an answer, unless a proxy or gateway says that there is none
            self._has_answer = error.code < 500
        except URLError as error:  # certificates are for the library to check, which has its own
            self._has_answer = isinstance(error.reason, ssl.SSLError)
        except (OSError, ValueError):
            pass

    def has_answer(self) -> bool:
        if self._thread is not None:
            self._thread.join(PATIENCE)
            _answers[self._url] = (time.monotonic(), self._has_answer)
        return self._has_answer


def reads_cache_only(name: str) -> bool:
    """Whether the model `name` is a hub name, and the hub does not answer or is not to be asked."""
    return not Path(name).expanduser().exists() and (is_offline() or not HubProbe().has_answer())


def describe_hub() -> str:
    """What to do where a model is not in the cache and the hub gave nothing, as the end of a message."""
    if is_offline():
        return "there is no such folder, it is not in the cache, and HF_HUB_OFFLINE is set; give the folder of a model"
    return (
        f"there is no such folder, it is not in the cache, and the hub at {hub_endpoint()} does not answer within "
        f"{PATIENCE:g} s; connect to it (HF_ENDPOINT names another one), or give the folder of a model"
    )
