"""All benchmarks with an aim, in one table: which there are, how they run, what they found.

Each row is measured as a whole by processes of its own, and docs/benchmarks.json keeps it with command, date, commit
and load. A benchmark that fails leaves its fault in the table, not the figures of another day.
"""
