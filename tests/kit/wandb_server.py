"""The part of the HTTP of Weights & Biases that a run with metrics needs: log in, start or resume, stream rows.

A run's rows are lines of a file, sent with the number of the first one, as the real server stores them.
"""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = {"id": "e", "name": "me"}


class WandbServer:
    """Serves on loopback until `close`. `history` has the rows of every run, `exit_codes` how its attempts ended."""

    def __init__(self) -> None:
        self.history: dict[str, list[str]] = {}
        self.exit_codes: dict[str, list[int]] = {}
        self.configs: dict[str, Any] = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                content = json.dumps(server.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_PUT = do_POST

            def log_message(self, format: str, *args: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, body: bytes) -> Any:
        if path.startswith("/files/") and path.endswith("/file_stream"):
            self._stream(path.split("/")[-2], json.loads(body))
        if path != "/graphql":
            return {}
        sent = json.loads(body)
        asked, given = sent["operationName"], sent.get("variables") or {}
        match asked:
            case "Viewer":
                return {
                    "data": {
                        "viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
                    }
                }
            case "RunResumeStatus":
                bucket = self._bucket(given["name"]) if given["name"] in self.history else None
                return {"data": {"model": {"id": "p", "name": given["project"], "entity": ENTITY, "bucket": bucket}}}
            case "UpsertBucket":
                is_new = given["name"] not in self.history
                self.history.setdefault(given["name"], [])
                self.configs[given["name"]] = json.loads(given["config"] or "{}")
                project = {"id": "p", "name": given["project"], "entity": ENTITY}
                return {
                    "data": {
                        "upsertBucket": {
                            "bucket": {**self._bucket(given["name"]), "project": project},
                            "inserted": is_new,
                        }
                    }
                }
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in given["files"]]
                return {"data": {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}}
        return {"data": {}}

    def _bucket(self, run: str) -> dict[str, Any]:
        lines = self.history[run]
        counts = {"logLineCount": 0, "historyLineCount": len(lines), "eventsLineCount": 0}
        tails = {"historyTail": json.dumps(lines[-1:]), "eventsTail": "[]", "summaryMetrics": "{}", "config": "{}"}
        names = {"id": run, "name": run, "displayName": run, "description": "", "sweepName": None}
        return {**names, **counts, **tails, "tags": [], "notes": None, "wandbConfig": json.dumps({"t": 1})}

    def _stream(self, run: str, sent: dict[str, Any]) -> None:
        rows = (sent.get("files") or {}).get("wandb-history.jsonl")
        if rows:
            self.history[run][rows["offset"] :] = rows["content"]
        if sent.get("complete"):
            self.exit_codes.setdefault(run, []).append(sent["exitcode"])
