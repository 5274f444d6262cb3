"""Older names of the bridge: see `jtops.core.legacy.names`."""

from jtops.core.legacy.names import *  # noqa: F403
