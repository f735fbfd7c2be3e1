"""Published training runs, as their sources state them: what constants are fitted on and held against.

`RUNS` is the CSV, compressed; `SOURCES.md` says where each row is from, and what to beware of. Nothing in it is
estimated, and an empty cell is not stated by its source.
"""

from pathlib import Path

RUNS = Path(__file__).with_name("training_runs.csv.gz")
"""4,082 runs; `fit.rows.rows` and `fit.cells.records` read it."""
