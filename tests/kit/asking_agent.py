"""An agent that asks the policy its prompt once, and leaves it at that. Standard library only."""

from __future__ import annotations

import json
import os
import sys
import urllib.request

if __name__ == "__main__":
    body = {"model": "any", "messages": [{"role": "user", "content": sys.stdin.read()}]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
    urllib.request.urlopen(request).read()
