"""`sandbox="dsec"` in Inspect AI: this module is the entry point, and importing it registers the provider."""

from .config import DSecSandbox, DSecSandboxConfig
from .environment import DSecSandboxEnvironment

__all__ = ["DSecSandbox", "DSecSandboxConfig", "DSecSandboxEnvironment"]
