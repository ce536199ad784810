"""Steering vectors, plans and their operators, positions, extraction, files and receipts."""

import steerlab.steering._vector_methods  # noqa: F401  connects the methods of vectors with files, formats, diagnostics
