"""Published training runs, as their sources state them: what constants are fitted on, or held against.

`RUNS` and `TRANSCRIBED` are CSVs of the same columns; `SOURCES.md` says where each row is from, and what to beware of.
Nothing in them is estimated, and an empty cell is not stated by its source.
"""

from pathlib import Path

RUNS = Path(__file__).with_name("training_runs.csv.gz")
"""4,082 runs; `fit.rows.rows` and `fit.cells.records` read it."""

TRANSCRIBED = Path(__file__).with_name("transcribed_runs.csv")
"""59 more, of other sources: no constant is fitted on them, so that they tell how forecasts hold for what is new."""
