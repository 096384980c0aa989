"""Bytes by https, and by nothing else. Knows what an address is, not what is behind it."""

from __future__ import annotations

import http.client
import ssl
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ..version import __version__

_SILENCE_SECONDS = 30.0  # without a byte, a server is taken for dead
_FILE_SECONDS = 300.0  # for a whole file, however steadily it drips
_CHUNK = 1 << 16


class DownloadError(OSError):
    """A file was not received whole; the message says why."""


class _OnlyToHttps(urllib.request.HTTPRedirectHandler):
    """Follows redirects, each of which is looked at before a connection is made."""

    def redirect_request(self, request: Any, response: Any, code: int, reason: str, headers: Any, url: str) -> Any:
        if urlsplit(url).scheme != "https":
            raise DownloadError(f"the server redirects to {url}, which is not https")
        response.close()  # or its body would be read to the end, if it has one
        return super().redirect_request(request, response, code, reason, headers, url)


def refusal(address: str) -> str | None:
    """Why an address cannot be that of a folder to download from; None if it can."""
    parts = urlsplit(address)
    if parts.scheme != "https" or not parts.netloc:
        return "only https addresses are downloaded from (https://host/folder)"
    if parts.path.endswith(".zip"):
        return "a zip file is not downloaded, for all of it would be: unpack it on the server and give the folder's address"
    return None


def below(address: str, name: str) -> str:
    """The address of a file in the folder at ``address``, whose query (an access token, say) is kept."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}", fragment=""))


def opener() -> urllib.request.OpenerDirector:
    """With handlers for https alone: nothing of http:, file: or ftp: can be reached, whatever an answer says.

    Servers must have a certificate of the system's authorities, or of those in ``SSL_CERT_FILE``; ``https_proxy`` is followed.
    """
    found = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPSHandler(context=ssl.create_default_context()),
        _OnlyToHttps(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        found.add_handler(handler)
    return found


def get(client: urllib.request.OpenerDirector, url: str, most: int) -> bytes:
    """What an https address holds: at most ``most`` bytes.

    Raises:
        DownloadError: it is no https address, or leads to none; the server cannot be reached, is silent, ends early, sends more
            than ``most`` bytes, or takes too long.
    """
    if reason := refusal(url):
        raise DownloadError(reason)
    deadline = time.monotonic() + _FILE_SECONDS
    request = urllib.request.Request(url, headers={"User-Agent": f"flashmel/{__version__}"})
    received = bytearray()
    try:
        with client.open(request, timeout=_SILENCE_SECONDS) as response:
            while chunk := response.read1(_CHUNK):
                received += chunk
                if len(received) > most:
                    raise DownloadError(f"it is longer than the {most} bytes expected")
                if time.monotonic() > deadline:
                    raise DownloadError(f"it took more than {_FILE_SECONDS:.0f} s, of which {len(received)} bytes came")
            if response.length:  # of what was announced; None if nothing was
                raise DownloadError(f"the connection ended {response.length} bytes early")
    except DownloadError:
        raise
    except urllib.error.HTTPError as error:
        error.close()
        raise DownloadError(f"the server answers {error.code} {error.reason}") from error
    except http.client.HTTPException as error:
        raise DownloadError(f"the connection ended early ({type(error).__name__})") from error
    except (OSError, ValueError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        raise DownloadError(str(cause) or type(error).__name__) from error
    return bytes(received)
