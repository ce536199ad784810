"""An engine that runs elsewhere: the Engine protocol over HTTP, against `steerlab serve`."""

from steerlab.engines.remote.engine import RemoteEngine

__all__ = ["RemoteEngine"]
