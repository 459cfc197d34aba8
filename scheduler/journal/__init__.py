"""The journal: which jobs were accepted, how far they came and how they ended, in one SQLite file."""
