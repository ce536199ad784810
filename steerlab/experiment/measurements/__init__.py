"""What an experiment measures: a module for each kind of measurement, and the registry that lists them.

A module holds the result's class, how it is computed from an engine, how it is kept in a run, its section of the
report, and a `Measurement` that says all this to the rest of the package.
"""
