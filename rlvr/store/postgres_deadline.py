"""PostgreSQL connections whose calls end: also those to a server that is frozen, which takes packets and never answers.

The server ends a statement after its `statement_timeout`; a server that cannot do that is left `SLACK_S` later, and the
connection is closed. Keepalives and `tcp_user_timeout` tell of a machine that is gone, not of a process that hangs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

STATEMENT_S = 30  # of one statement, unless the server, the role or the URL sets a statement_timeout
SLACK_S = 5.0


class DeadlineConnection(psycopg.Connection[Any]):
    """Raises OperationalError, and is closed, where a call has had no answer for `deadline_s`; None waits for ever."""

    deadline_s: float | None = STATEMENT_S + SLACK_S

    def limit_statements(self) -> None:
        """Set the server's `statement_timeout` where it has none, and the deadline a little above it."""
        known = "SELECT setting::int FROM pg_settings WHERE name = 'statement_timeout'"
        [milliseconds] = self.execute(known).fetchone() or [0]
        if not milliseconds:
            self.execute(f"SET statement_timeout = '{STATEMENT_S}s'".encode())
        self.deadline_s = (milliseconds / 1000 or STATEMENT_S) + SLACK_S

    @contextmanager
    def without_deadline(self) -> Iterator[None]:
        """For what may take long within one transaction, such as a migration."""
        usual, self.deadline_s = self.deadline_s, None
        try:
            for name in ("idle_in_transaction_session_timeout", "statement_timeout"):
                self.execute(f"SET LOCAL {name} = 0".encode())
            yield
        finally:
            self.deadline_s = usual

    def wait(self, gen: Any, *args: Any, **named: Any) -> Any:
        return super().wait(self._limit(gen), *args, **named)

    def _limit(self, gen: Any) -> Any:
        """The generator of a call, which psycopg resumes with 0 at every interval without news of the socket."""
        began, news = time.monotonic(), None
        try:
            while True:
                needs = gen.send(news)
                news = yield needs
                if not news and self.deadline_s is not None and time.monotonic() - began > self.deadline_s:
                    gen.close()
                    self.close()
                    raise psycopg.OperationalError(f"no answer for {self.deadline_s:g} s: the server hangs")
        except StopIteration as end:
            return end.value
