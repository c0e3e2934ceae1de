from _pkg_info import *  # type: ignore[import-not-found] # noqa: F403
