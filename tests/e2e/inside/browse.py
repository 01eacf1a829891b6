"""An agent that shows a page of its own to its browser; standard library only.

Not imported by anything: a test hands this file's text to an agent (``python3 -c``).
"""

from __future__ import annotations

import http.client
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import quote, urlsplit

PAGE = b"<title>before</title><script>document.title = 'after ' + (20 + 22)</script>"
SECONDS = 30.0


class Site(BaseHTTPRequestHandler):
    """One page, and who asked for it."""

    seen: ClassVar[list[str]] = []
    asked = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(PAGE)))
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE)
        if self.path == "/page":
            self.seen.append(self.headers["User-Agent"])
            self.asked.set()

    def log_message(self, *_arguments: object) -> None:
        """Standard output is the answer."""


def ask(method: str, path: str) -> tuple[int, str]:
    place = urlsplit(os.environ["BROWSER_CDP_URL"])
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=SECONDS)
    connection.request(method, path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def title_of(page: str) -> str:
    pages = json.loads(ask("GET", "/json/list")[1])
    return str(next(entry["title"] for entry in pages if entry["id"] == page))


def main() -> None:
    server = ThreadingHTTPServer(("0.0.0.0", 8000), Site)  # noqa: S104 - in a sandbox
    threading.Thread(target=server.serve_forever, daemon=True).start()
    version = json.loads(ask("GET", "/json/version")[1])
    page = json.loads(ask("PUT", f"/json/new?{quote('http://agent:8000/page', safe=':/')}")[1])
    assert Site.asked.wait(SECONDS), "nobody asked for the page"
    for _ in range(300):
        if (title := title_of(page["id"])).startswith("after"):
            break
        threading.Event().wait(0.1)
    seen = {
        "browser": version["Browser"],
        "socket": version["webSocketDebuggerUrl"],
        "agent": Site.seen[0],
        "title": title,
    }
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
