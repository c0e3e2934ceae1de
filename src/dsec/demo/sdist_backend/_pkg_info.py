"""A build backend that builds nothing: metadata comes from the sdist's own PKG-INFO.

`pip download` asks a source distribution's build backend for metadata before it hands the file over. That would mean
installing every backend and running each package's build code on this machine as the caller. The modules beside this one
carry the backends' names, go on PYTHONPATH for that one call, and answer from the file that is in every sdist.
"""

from __future__ import annotations

from email.parser import BytesHeaderParser
from pathlib import Path


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: object = None) -> str:
    with open("PKG-INFO", "rb") as file:
        headers = BytesHeaderParser().parse(file)
    folder = Path(metadata_directory) / f"{headers['Name'].replace('-', '_')}-{headers['Version']}.dist-info"
    folder.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {headers['Name']}\nVersion: {headers['Version']}\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")
    return folder.name


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:
    return []


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    raise NotImplementedError("this backend only answers metadata")
