import sys

from _pkg_info import *  # type: ignore[import-not-found] # noqa: F403

__legacy__ = sys.modules[__name__]  # what pip asks for when an sdist names no backend
