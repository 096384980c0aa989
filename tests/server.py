"""An https server of this process, whose certificate is its own: serves a folder, or misbehaves as told."""

import contextlib
import http.server
import shutil
import ssl
import subprocess
import threading

import pytest


class Server:
    """``base`` is the address of the folder; ``faults`` maps file names to what is done instead of serving them."""

    def __init__(self, folder, certificate, key):
        self.faults, self.requests = {}, []
        server = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args):
                super().__init__(*args, directory=str(folder))

            def do_GET(self):
                name = self.path.split("?")[0].rsplit("/", 1)[-1]
                server.requests.append(self.path)
                fault = server.faults.get(name)
                if fault is None:
                    return super().do_GET()
                with contextlib.suppress(OSError):  # the client hung up
                    fault(self)

            def log_message(self, *_):
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        # In the connection's own thread: a client that refuses the certificate must not end the server.
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True, do_handshake_on_connect=False)
        self._http.handle_error = lambda *_: None
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        self.base = f"https://localhost:{self._http.server_port}"

    def close(self):
        self._http.shutdown()
        self._http.server_close()


@contextlib.contextmanager
def serving(folder, place):
    """A server of ``folder``; ``place`` takes its certificate, ``place / "cert.pem"``."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    certificate, key = place / "cert.pem", place / "key.pem"
    if not certificate.exists():
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
            + ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)],
            check=True,
            capture_output=True,
        )
    server = Server(folder, certificate, key)
    try:
        yield server
    finally:
        server.close()


def answer(status, headers=(), body=b"", announced=None):
    """A fault: this answer; ``announced`` is the length that is claimed, None that of the body."""

    def fault(request):
        request.send_response(status)
        for name, value in headers:
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body) if announced is None else announced))
        request.end_headers()
        request.wfile.write(body)

    return fault


def redirect(url, status=302):
    return answer(status, [("Location", url)])


def endless(request):
    """A fault: a body that never ends."""
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(bytes(1 << 16))


def endless_redirect(url):
    """A fault: a redirect with a body that never ends."""

    def fault(request):
        request.send_response(302)
        request.send_header("Location", url)
        request.end_headers()
        while True:
            request.wfile.write(bytes(1 << 16))

    return fault


def hang_up(request):
    """A fault: no answer at all."""
    request.connection.close()
