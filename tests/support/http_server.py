"""An HTTP server in threads of the test's own process, whose replies a test makes."""

import abc
import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HttpServer(ThreadingHTTPServer, abc.ABC):
    """Listens on a free port of loopback until it is closed; a context manager."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, headers, content = self.server.reply(self.path, self.headers, body)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                with contextlib.suppress(ConnectionError):  # the sender may have given up
                    self.end_headers()
                    self.wfile.write(content)

            do_GET = do_POST

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self._serving = threading.Thread(target=self.serve_forever, args=[0.01])
        self._serving.start()

    @property
    def url(self):
        """Address without a path."""
        return f"http://127.0.0.1:{self.server_port}"

    @abc.abstractmethod
    def reply(self, path, headers, body):
        """Return the status, headers and content for one request, whose headers have names in any case."""

    def server_close(self):
        self.shutdown()
        self._serving.join()
        super().server_close()
