"""An agent that knows nothing of training: it asks a model for arithmetic, calculates what the model asks for, and goes
on. As a program it listens for tasks: `python tool_agent.py`, which prints its port."""

from __future__ import annotations

import json
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MOST_TURNS = 5
CALL, END, ERROR = "<call>", "</call>", "<error>"


def ask(base_url: str, messages: list[dict[str, str]]) -> tuple[str, str]:
    """(what the model said, why it stopped)."""
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        [choice] = json.load(response)["choices"]
    return choice["message"]["content"], choice["finish_reason"]


def calculate(words: list[str]) -> str:
    try:
        name, left, operator, right = words
        a, b = int(left), int(right)
        return str({"+": a + b, "-": a - b, "*": a * b}[operator] % 97) if name == "calculate" else ERROR
    except (ValueError, KeyError):
        return ERROR


def split(said: str) -> tuple[list[list[str]], str]:
    """The calls in a text, each as words, and what is left of it."""
    calls: list[list[str]] = []
    rest = ""
    while CALL in said:
        before, _, after = said.partition(CALL)
        inside, closed, later = after.partition(END)
        if not closed or not inside.split():
            break
        calls.append(inside.split())
        rest, said = rest + before, later
    return calls, rest + said


def play(base_url: str, prompt: str) -> None:
    messages = [{"role": "user", "content": prompt}]
    for turn in range(MOST_TURNS):
        said, reason = ask(base_url, messages)
        calls, rest = split(said)
        if reason == "length" or turn == MOST_TURNS - 1 or not (calls or CALL in rest):
            return
        results = [*map(calculate, calls), *([ERROR] if CALL in rest else [])]
        told = "".join(f" <result> {result} </result> " for result in results)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        task = json.loads(self.rfile.read(int(self.headers["content-length"])))
        play(task["base_url"], task["prompt"])
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class Server(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True


if __name__ == "__main__":
    server = Server(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
