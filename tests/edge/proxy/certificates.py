"""A certificate authority of the test's own."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path


class Authority:
    """`pem` is what clients must trust; `server(name)` what a server of that name shows."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.pem = directory / "ca.pem"
        self._key = directory / "ca.key"
        self._openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                      "-subj", "/CN=Test authority", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
                      "-keyout", str(self._key), "-out", str(self.pem))  # fmt: skip

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)

    def server(self, *names: str) -> ssl.SSLContext:
        """Names are of hosts, or addresses as `IP:127.0.0.1`."""
        key, request, certificate = (self._directory / f"{names[0]}.{end}" for end in ("key", "csr", "pem"))
        alternatives = ",".join(name if ":" in name else f"DNS:{name}" for name in names)
        self._openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={names[0]}",
                      "-keyout", str(key), "-out", str(request))  # fmt: skip
        extensions = self._directory / "extensions"
        extensions.write_text(f"subjectAltName={alternatives}\n")
        self._openssl("x509", "-req", "-days", "2", "-in", str(request), "-CA", str(self.pem), "-CAkey", str(self._key),
                      "-CAcreateserial", "-extfile", str(extensions), "-out", str(certificate))  # fmt: skip
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        return context

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.pem))
