"""Steering vectors, plans and their operators, positions, extraction, files and receipts."""
