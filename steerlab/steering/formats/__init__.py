"""Other tools' vector files, read and written: each module says what its format means in terms of our hook points."""
