"""One node: admission, lifecycle, journal, and the way of every request to its sandbox (report, 3)."""
