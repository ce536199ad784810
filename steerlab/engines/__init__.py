"""Backends, each in its own folder, which alone imports the backend's library."""
